"""The site: `python -m sphinx docs OUT`."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "_ext")]

if sys.flags.optimize > 1:
    sys.exit("the pages are made of docstrings, which python -OO and PYTHONOPTIMIZE=2 remove")

import scratchformer  # noqa: E402

project = "scratchformer"
version = release = scratchformer.__version__
copyright = "the authors of scratchformer, MIT licence"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "math_nodes",
    "root_files",
    "docstrings",
    "operations",
    "layers",
    "museum",
    "live",
    "living",
    "path",
    "exercises",
]
exclude_patterns = ["README.md", "_build"]

myst_enable_extensions = ["dollarmath", "html_image", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "scratchformer"
html_static_path = ["../scratchformer/pages/static"]
html_favicon = "../scratchformer/pages/static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["_templates"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_search_summary = False  # a browser refuses to load them where the site is opened as a file
html_theme_options = {"top_of_page_buttons": []}


def setup(app):
    """Mend for screen readers what Sphinx and the theme write."""

    def mend(app, page, template, context, doctree):
        tree = context.get("furo_navigation_tree", "")
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
        body = re.sub(r'<th class="head">(<p></p>)?</th>', "<td></td>", context.get("body", ""))
        context["body"] = re.sub(r"<dl>(?=\s*<dd>)", '<dl role="presentation">', body)  # the arguments of a signature

    app.connect("html-page-context", mend, priority=900)

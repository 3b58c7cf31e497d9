"""The directive that puts the live part of an operation into its page, with the scripts that it needs."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from scratchformer.catalogue import mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.pages.live import FILES, live_html


class Live(SphinxDirective):
    """The live section of an operation: `.. live:: attention`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        if name not in CASES:
            return []
        return [nodes.raw("", live_html(name, mistakes_of(name)), format="html")]


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Load the scripts on the pages that have a live part."""
    if '<section class="live"' not in context.get("body", ""):
        return
    app.add_css_file("live/live.css")
    for file in FILES:
        app.add_js_file(file, loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("live", Live)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Mathematics in a page, {math}`y_td = Σ_s p_ts v_sd` or the directive `math`, in the notation of derivations."""

from __future__ import annotations

from docutils import nodes
from reports import compound
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from scratchformer.pages.mathml import mathml, of_equation


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), compound()))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    whole = node.get("equation")
    shown = of_equation(whole) if whole else mathml(node.astext(), compound(), display=True)
    translator.body.append(f'<div class="math">{shown}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""A living training step: `.. living::` puts a small model into the page, which runs it from the plan of its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from step_plan import plan_of

from scratchformer.models import LanguageModel
from scratchformer.rng import Key

SIZES: dict[str, Any] = dict(vocab_size=24, d_model=12, heads=2, depth=1, context=12, d_ff=24)
ROWS = 6  # sequences in a batch; the first one is drawn
ADAM = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8)
DECIMALS = 3  # of the weights at the beginning
SEED = 3
TEXT = """\
the cat sat on the mat. the dog sat on the log. the cat saw the dog, and the dog saw the cat. \
a bird came to the tree, and the cat ran to the tree. the bird sang a song. the dog lay in the sun. \
"""
STATIC = Path(__file__).parents[1] / "_static"
FILES = ("live/evaluate.js", "live/live.js", "living/step.js", "living/picture.js", "living/living.js")
STYLES = ("live/live.css", "living/living.css")


def make_model() -> LanguageModel:
    """The tutorial's generator, in float64, with weights of few decimals, so that they can be written in the page."""
    model = LanguageModel(**SIZES, key=Key(SEED)).to(dtype=np.float64)
    for p in model.parameters():
        p.data[...] = np.round(p.data, DECIMALS)
    return model


def living_data() -> dict[str, Any]:
    """What the page runs: the plan of a step, the weights at the beginning, a text, and the settings."""
    model, draw = make_model(), np.random.default_rng(SEED)
    ids, targets = draw.integers(0, SIZES["vocab_size"], (2, ROWS, SIZES["context"]))
    plan, _ = plan_of(model, ids, targets)
    weights = {name: p.data.ravel().tolist() for name, p in model.named_parameters().items()}
    return {
        "plan": plan,
        "weights": weights,
        "rows": ROWS,
        "length": SIZES["context"],
        "symbols": SIZES["vocab_size"],
        "text": TEXT,
        "adam": ADAM,
    }


def living_html() -> str:
    text = json.dumps(living_data(), ensure_ascii=False, separators=(",", ":")).replace("</", r"<\/")
    return (
        '<section class="living" aria-label="A training step of a small transformer">\n'
        "<noscript><p>With JavaScript, a small transformer is trained here.</p></noscript>\n"
        f'<script type="application/json">{text}</script>\n</section>'
    )


class LivingStep(SphinxDirective):
    """The living training step."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", living_html(), format="html")]


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Load the scripts on the pages that have a living step."""
    if '<section class="living' not in context.get("body", ""):
        return
    for file in STYLES:
        app.add_css_file(file)
    for file in FILES:
        app.add_js_file(file, loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("living", LivingStep)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

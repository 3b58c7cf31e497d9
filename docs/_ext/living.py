"""A living training step: `.. living::` puts a small model into the page, which runs it from the plan of its trace.

The data of each model is a script in _static/living/models, which a page loads when its model is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from docutils import nodes
from live import PageSizes, checked
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from step_plan import plan_of, wrong_plans

from scratchformer import models
from scratchformer.catalogue.derivations import CASES
from scratchformer.models import LanguageModel
from scratchformer.pages.live import begin
from scratchformer.rng import Key

SIZES: dict[str, Any] = dict(vocab_size=24, d_model=12, heads=2, context=12)
MODELS: dict[str, tuple[str, Callable[..., LanguageModel]]] = {
    "LanguageModel": ("the tutorial's generator", partial(models.LanguageModel, **SIZES, depth=1, d_ff=24)),
    "four-heads": ("with four heads", partial(models.LanguageModel, **SIZES | {"heads": 4}, depth=1, d_ff=24)),
    "two-blocks": ("with two blocks", partial(models.LanguageModel, **SIZES, depth=2, d_ff=24)),
    "pre-norm": ("with the norms first", partial(models.LanguageModel, **SIZES, depth=1, d_ff=24, norm="pre")),
    "GPT2": ("GPT-2", partial(models.GPT2, **SIZES, depth=1)),
    "Llama": ("Llama", partial(models.Llama, **SIZES, depth=1, kv_heads=1, d_ff=24)),
}
ROWS = 6  # sequences in a batch; the first one is drawn
ADAM = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8)
DECIMALS = 3  # of the weights at the beginning
SEED = 3
TEXT = """\
the cat sat on the mat. the dog sat on the log. the cat saw the dog, and the dog saw the cat. \
a bird came to the tree, and the cat ran to the tree. the bird sang a song. the dog lay in the sun. \
"""
FILES = ("live/evaluate.js", "live/live.js", "living/step.js", "living/picture.js", "living/living.js")
STYLES = ("live/live.css", "living/living.css")


def make_model(name: str) -> LanguageModel:
    """A model in float64, with weights of few decimals, so that they can be written in the page."""
    _, make = MODELS[name]
    model = make(key=Key(SEED)).to(dtype=np.float64)
    for p in model.parameters():
        p.data[...] = np.round(p.data, DECIMALS)
    return model


def living_data(name: str) -> dict[str, dict[str, Any]]:
    """What the page runs, by key: for the name of the model, the plan of a step, the weights at the beginning, a text,
    and the settings; and for each mistake in the code of its layers, the plan of the step that the wrong code takes.
    """
    model, draw = make_model(name), np.random.default_rng(SEED)
    batch = draw.integers(0, SIZES["vocab_size"], (2, ROWS, SIZES["context"]))
    plan, made = plan_of(model, *batch)
    wrong = {f"{name}-{i}": each for i, each in enumerate(wrong_plans(made, *batch))}
    for key, (mistake, _) in wrong.items():
        told = {"operation": mistake.name.partition(":")[0], "title": mistake.title, "effect": mistake.effect}
        code = [dedent(" " * 100 + text).strip() for text in next(iter(mistake.replace.items()))]
        plan["mistakes"].append({**told, "functions": {}, "code": code, "plan": key})
    data = {
        "plan": plan,
        "weights": {name: p.data.ravel().tolist() for name, p in model.named_parameters().items()},
        "rows": ROWS,
        "length": SIZES["context"],
        "symbols": SIZES["vocab_size"],
        "text": TEXT,
        "adam": ADAM,
        "update": update_data(),
    }
    return {name: data} | {key: each for key, (_, each) in wrong.items()}


@cache
def update_data() -> dict[str, Any]:
    """The equations of a step of Adam for one weight, as a live page takes them: see `live.begin`."""
    case = CASES["adam_step"](PageSizes("adam_step"))
    return begin(case, checked(case)) | {"mistakes": []}


def script(key: str, data: dict[str, Any]) -> str:
    """A script that gives a page some data. A page that is opened as a file can load scripts, and no JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"(globalThis.LivingModels ??= {{}})[{json.dumps(key)}] = {text};\n"


def living_html(name: str = "LanguageModel") -> str:
    titles = json.dumps({key: title for key, (title, _) in MODELS.items()})
    return (
        f'<section class="living" data-model="{name}" data-models="{escape(titles)}" '
        'aria-label="A training step of a small transformer">\n'
        "<noscript><p>With JavaScript, a small transformer is trained here.</p></noscript>\n</section>"
    )


class LivingStep(SphinxDirective):
    """The living training step of a model: `.. living:: GPT2`, by default the tutorial's generator."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", living_html(*self.arguments), format="html")]


def write_models(folder: Path) -> None:
    """Write the data of all models below a site's folder."""
    into = folder / "_static" / "living" / "models"
    into.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        for key, data in living_data(name).items():
            (into / f"{key}.js").write_text(script(key, data), encoding="utf-8")


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        write_models(Path(app.outdir))


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
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

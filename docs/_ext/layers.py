"""A page for each layer and model, and the API reference, written before the build."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

from block_pictures import block_picture
from docstrings import MODULES, directive, heading, pieces, prose, rendered, table
from layer_pictures import layer_picture
from levels import SENTENCE
from live import COMPOSED, PageSizes
from living import MODELS
from operations import LEGEND, OPERATIONS, calls, joined, layers, write_page
from sphinx.application import Sphinx

import scratchformer
from scratchformer import models, nn
from scratchformer.nn import Layer
from scratchformer.pages.passages import Passage, before_derivation

METHODS = ("forward", "loss", "backward", "loss_backward")
LIVE = {  # the layers that compute in the page: the derivations, and the names of their orders if there are two
    **dict.fromkeys(
        (
            "BasicSelfAttention", "SingleHeadAttention", "MultiHeadLoop", "SelfAttention", "CrossAttention",
            "RelativeSelfAttention", "RotarySelfAttention", "FeedForward", "SwiGLU", "LlamaBlock",
            "EmbeddingSum", "PositionEmbedding", "GridPositions", "SinusoidalPositions",
        ),
        ("",),
    ),
    **dict.fromkeys(("Residual", "TransformerBlock", "DecoderBlock"), ("Post-norm", "Pre-norm")),
}  # fmt: skip
# Layers that are one operation, whose live part they show.
OPERATION_OF = {"Linear": "linear", "LayerNorm": "layernorm", "RMSNorm": "rmsnorm", "TokenEmbedding": "embedding"}


def page(module: Any, name: str) -> str:
    """The page of a layer or a model, in Markdown."""
    layer = getattr(module, name)
    parts = [f"# {name}"]
    parts += [fenced(f"{{living}} {name}", "")] if module is models and name in MODELS else []
    begin, *passages = pieces(inspect.getdoc(layer) or "", name)
    derivation = passages[before_derivation(passages) :]
    if f"{name}, pre" in COMPOSED:
        fact, derivation[0] = first_sentences(derivation[0])
        begin = begin._replace(text=f"{begin.text} {fact}")
    parts += [rst(rendered([begin], name)), *live(name)]
    parts += ["## Forward and backward", raw(layer_picture(name))]
    if derivation:
        parts += ["## Derivation", rst(LEGEND), rst(rendered(derivation, name))]
    parts += ["## What changed", changes(name)] if changes(name) else []
    parts += ["## Arguments", rst(directive("autoclass", f"{module.__name__}.{name}"))]
    parts += ["## The code", *code(layer)] if code(layer) else []
    if called := [f"{{doc}}`/operations/{operation}`" for operation in calls(module, name)]:
        parts.append(f"The derivations of the operations it calls: {', '.join(called)}.")
    return joined(parts)


def live(name: str) -> list[str]:
    """The live sections of a layer's derivation, one for each order of its parts."""
    sections = []
    for title in LIVE.get(name, ("",) * (name in OPERATION_OF)):
        case = f"{name}, pre" if sections else OPERATION_OF.get(name, name)
        picture = raw(block_picture(COMPOSED[case](PageSizes(case)), case)) if f"{name}, pre" in COMPOSED else ""
        shown = [picture, fenced(f"{{live}} {case}", "")]
        if sections:  # the other order of the parts
            shown = [raw(f'<details class="other-order"><summary>{title}</summary>'), *shown, raw("</details>")]
        sections += shown if sections else [f"## Try it{title and f': {title.lower()}'}", *shown]
    return sections


def first_sentences(passage: Passage) -> tuple[str, Passage]:
    """The first two sentences of a derivation's text, after "Backward.", and the text without them."""
    first, second, *rest = SENTENCE.split(passage.text.removeprefix(label := "Backward. "))
    return f"{first} {second}", passage._replace(text=label + " ".join(rest))


def code(layer: type) -> list[str]:
    """Both directions of a layer, which it may have from another class, and the loss of a model."""
    parts = []
    for method in METHODS:
        kind = next(kind for kind in layer.__mro__ if method in vars(kind) or kind is object)
        if kind is layer or (method in ("forward", "backward") and kind not in (Layer, object)):
            parts += [] if kind is layer else [f"Inherited from `{kind.__name__}`:"]
            parts.append(fenced("python", source(kind, method)))
    return parts


def raw(html: str) -> str:
    return fenced("{raw} html", html)


def rst(text: str) -> str:
    return fenced("{eval-rst}", text)


def changes(name: str) -> str:
    """What a model changes in the one before it."""
    if not find_spec("changes"):
        return ""
    from changes import BEFORE, model_changes

    return model_changes(name) if name in BEFORE else ""


def fenced(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"


def source(layer: type, method: str) -> str:
    return dedent(inspect.getsource(vars(layer)[method])).rstrip()


def reference(name: str) -> str:
    """The API page of a module. Names that have their own page are links to it."""
    module = getattr(scratchformer, name)
    with_page = {"ops": OPERATIONS, "nn": layers(nn), "models": layers(models)}.get(name, ())
    path, excluded = f"scratchformer.{name}", [*with_page, *(f"{op}_backward" for op in with_page if name == "ops")]
    parts = [heading(path, "=")]
    if with_page:
        rows = [(f":py:obj:`{one} <{path}.{one}>`", prose(summary(getattr(module, one)))) for one in with_page]
        parts.append(table(["on a page of its own", ""], rows))
    options = {"exclude-members": ", ".join(excluded)} if with_page else {}
    return joined([*parts, directive("automodule", path, **options)])


def summary(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0]


def write(app: Sphinx) -> None:
    folder = Path(app.srcdir)
    for module in (nn, models):
        for name in layers(module):
            write_page(folder / "layers" / f"{name}.md", page(module, name))
    for name in (*MODULES, "dispatch"):
        write_page(folder / "api" / f"{name}.rst", reference(name))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""A page for each layer and model, and the API reference, written before the build."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

from docstrings import MODULES, directive, heading, prose, table
from layer_pictures import layer_picture
from living import MODELS
from operations import OPERATIONS, calls, joined, layers, write_page
from sphinx.application import Sphinx

import scratchformer
from scratchformer import models, nn

METHODS = ("forward", "loss", "backward", "loss_backward")


def page(module: Any, name: str) -> str:
    """The page of a layer or a model, in Markdown."""
    layer = getattr(module, name)
    parts = [f"# {name}"]
    parts += [fenced(f"{{living}} {name}", "")] if module is models and name in MODELS else []
    parts += [fenced("{eval-rst}", directive("autoclass", f"{module.__name__}.{name}"))]
    parts += ["## What changed", changes(name)] if changes(name) else []
    parts += ["## Forward and backward", fenced("{raw} html", layer_picture(name))]
    methods = [method for method in METHODS if method in vars(layer)]
    if methods:
        parts += ["## The code", *(fenced("python", source(layer, method)) for method in methods)]
    if called := [f"{{doc}}`/operations/{operation}`" for operation in calls(module, name)]:
        parts.append(f"The derivations of the operations it calls: {', '.join(called)}.")
    return joined(parts)


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

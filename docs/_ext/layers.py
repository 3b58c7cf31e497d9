"""A page for each layer and model, and the pages of the API reference, written before the build."""

from __future__ import annotations

import inspect
from pathlib import Path
from textwrap import dedent
from typing import Any

from docstrings import MODULES, block, directive, heading, prose, table
from operations import OPERATIONS, joined, slot, write_page
from sphinx.application import Sphinx

import scratchformer
from scratchformer import models, nn

PLAIN = ("Layer", "Param", "FlatParameters", "Model")  # what layers and models share: in the API reference alone


def layers(module: Any) -> list[str]:
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name)) and name not in PLAIN]


def page(app: Sphinx, module: Any, name: str) -> str:
    """The page of a layer or a model."""
    layer = getattr(module, name)
    autodoc = directive("autoclass", f"{module.__name__}.{name}", members="")
    parts = [heading(name, "="), slot(app, "pictures", "trace", name), autodoc]
    methods = [method for method in ("forward", "loss", "backward", "loss_backward") if method in vars(layer)]
    if methods:
        parts += [heading("The code"), *(source(layer, method) for method in methods)]
    return joined(parts)


def source(layer: type, method: str) -> str:
    return block("python", dedent(inspect.getsource(vars(layer)[method])).rstrip())


def reference(name: str) -> str:
    """The page of a module in the API reference. What has a page of its own is linked to."""
    module = getattr(scratchformer, name)
    elsewhere = {"ops": [*OPERATIONS, *(f"{op}_backward" for op in OPERATIONS)]}.get(name) or (
        layers(module) if name in ("nn", "models") else []
    )
    exclude = {"exclude-members": ", ".join(elsewhere)} if elsewhere else {}
    parts = [heading(f"scratchformer.{name}", "="), directive("automodule", f"scratchformer.{name}", **exclude)]
    rows = [
        (f":py:obj:`{one} <scratchformer.{name}.{one}>`", prose(inspect.getdoc(getattr(module, one)).splitlines()[0]))
        for one in elsewhere
        if hasattr(module, one) and not one.endswith("_backward")
    ]
    if rows:
        parts.insert(1, table(["on a page of its own", ""], rows))
    return joined(parts)


def write(app: Sphinx) -> None:
    folder = Path(app.srcdir)
    for module in (nn, models):
        for name in layers(module):
            write_page(folder / "layers" / f"{name}.rst", page(app, module, name))
    for name in MODULES:
        write_page(folder / "api" / f"{name}.rst", reference(name))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

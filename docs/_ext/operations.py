"""A page for each operation, written into docs/operations/ before the build."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from textwrap import indent

from docstrings import block, typeset
from scratchformer import ops
from sphinx.application import Sphinx

OPERATIONS = (
    "linear", "relu", "gelu", "silu", "tanh", "dense", "swiglu", "softmax", "log_softmax", "cross_entropy", "layernorm",
    "rmsnorm", "embedding", "gather", "sinusoidal_positions", "rotary_frequencies", "rotary", "dropout", "mean_pool",
    "max_pool", "attention", "relative_shift", "relative_attention",
)  # fmt: skip


def heading(text: str, line: str = "-") -> str:
    return f"{text}\n{line * len(text)}"


def description(name: str) -> str:
    """What the docstring says before its derivation: (the signature with it, the rest)."""
    op = getattr(ops, name)
    docstring = inspect.getdoc(op)
    first, backward, rest = docstring.partition("\n\nBackward")
    signature = f".. py:function:: {name}{inspect.signature(op)}\n\n{indent(typeset(first), '   ')}"
    return signature, typeset((backward + rest).strip())


def code(function: object) -> str:
    return block("python", inspect.getsource(function).rstrip())


def page(name: str) -> str:
    """The page of an operation."""
    op = getattr(ops, name)
    signature, derivation = description(name)
    parts = [heading(name, "="), ".. py:currentmodule:: scratchformer.ops", signature]
    if derivation:
        parts += [heading("Derivation"), derivation]
    parts += [heading("The code"), code(getattr(op, "reference", op))]
    if backward := getattr(ops, f"{name}_backward", None):
        parts.append(f".. py:function:: {name}_backward{inspect.signature(backward)}")
        parts.append(code(backward.reference))
        for twin in op.twins.values():
            parts += [heading("Its fast twin"), typeset(sys.modules[twin.__module__].__doc__), code(twin)]
            parts += [code(twin_backward) for twin_backward in backward.twins.values()]
    return "\n\n".join(parts) + "\n"


def write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "operations"
    folder.mkdir(exist_ok=True)
    for name in OPERATIONS:
        path, text = folder / f"{name}.rst", page(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

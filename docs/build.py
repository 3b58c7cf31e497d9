"""Write docs/derivations.md from the docstrings of the operations: `python docs/build.py`.

A test compares the file with the code, and another every derivation with the backward that it ends on.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from scratchformer import models, nn, ops

TARGET = Path(__file__).parent / "derivations.md"

ORDER = (
    "linear", "relu", "gelu", "silu", "tanh", "dense", "swiglu", "softmax", "log_softmax", "cross_entropy", "layernorm",
    "rmsnorm", "embedding", "gather", "sinusoidal_positions", "rotary_frequencies", "rotary", "dropout", "mean_pool",
    "max_pool", "attention", "relative_shift", "relative_attention",
)  # fmt: skip
LAYERS = (
    "BasicSelfAttention", "MultiHeadLoop", "CrossAttention", "SelfAttention", "RelativeSelfAttention",
    "RotarySelfAttention", "SwiGLU", "Residual", "TransformerBlock", "DecoderBlock", "Stack", "EmbeddingSum",
    "TiedOutput", "MaskedPrediction", "GridPositions",
)  # fmt: skip


def section(name: str, thing: object, code: object | None) -> str:
    text = f"## {name}\n\n```text\n{inspect.getdoc(thing)}\n```\n"
    if code is not None:
        text += f"\nThe backward, whole:\n\n```python\n{inspect.getsource(code).rstrip()}\n```\n"
    return text


def page() -> str:
    """The text of the page."""
    parts = [
        "# The derivations\n\n"
        "Every operation with its gradient, from indices to the line of code. This page is made from the docstrings\n"
        "by `docs/build.py`; the letters are those of `scratchformer/ops/__init__.py`.\n"
    ]
    for name in ORDER:
        backward = getattr(ops, f"{name}_backward", None)
        parts.append(section(name, getattr(ops, name), backward and backward.reference))
    parts.append("# Layers whose backward is more than a call\n")
    for name in LAYERS:
        layer = getattr(nn if hasattr(nn, name) else models, name)
        parts.append(section(name, layer, layer.backward))
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
    print(TARGET)

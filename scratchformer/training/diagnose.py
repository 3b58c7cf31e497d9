"""Finding where a number stopped being finite."""

from __future__ import annotations

from typing import Any

from ..backend import array_module
from ..nn import Layer
from ..rng import Key


def first_nonfinite(model: Layer, batch: Any, key: Key) -> str:
    """Run the loss of `batch` (on the model's device) once more and say which layer's output is the first with NaN or
    infinity; if all are finite, which parameter's gradient is.
    """
    found: list[str] = []

    def watch(name: str, layer: Layer) -> None:
        forward = layer.forward

        def watched(*inputs: Any, **options: Any) -> Any:
            y, cache = forward(*inputs, **options)
            if not found and not bool(array_module(y).isfinite(y).all()):
                found.append(f"the output of {name or 'the whole model'} ({type(layer).__name__})")
            return y, cache

        layer.forward = watched

    layers = dict(model.named_layers())
    try:
        for name, layer in layers.items():
            watch(name, layer)
        model.loss(*batch, key=key)
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    for name, p in model.named_parameters().items():
        if not found and not bool(array_module(p.grad).isfinite(p.grad).all()):
            found.append(f"the gradient of {name}")
    return found[0] if found else "the loss itself"

"""Finding where a number stopped being finite."""

from __future__ import annotations

from typing import Any

from ..backend import array_module
from ..nn import Layer
from ..rng import Key
from .replicas import Replicas


def first_nonfinite(replicas: Replicas, batch: Any, key: Key) -> str:
    """Run the loss of `batch` once more, in the micro-batches and with the keys of `replicas.gradients(batch, key)`,
    and say which layer's output is the first with NaN or infinity. If all are finite, say which parameter's gradient
    is the first, in the order of backward, which is from the output to the input.
    """
    model = replicas.model
    found: list[str] = []

    def watch(name: str, layer: Layer) -> None:
        forward = layer.forward

        def watched(*inputs: Any, **options: Any) -> Any:
            y, cache = forward(*inputs, **options)
            parts = y if isinstance(y, tuple) else (y,)
            if not found and not all(bool(array_module(part).isfinite(part).all()) for part in parts):
                found.append(f"the output of {name or 'the whole model'} ({type(layer).__name__})")
            return y, cache

        layer.forward = watched

    layers = dict(model.named_layers())
    try:
        for name, layer in layers.items():
            watch(name, layer)
        for index, micro in enumerate(batch.split(replicas.rows(batch))):
            if not found:
                model.loss(*replicas.move(micro), key=key.fold(index))
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    for name, p in reversed(model.named_parameters().items()):
        if not found and not bool(array_module(p.grad).isfinite(p.grad).all()):
            found.append(f"the gradient of {name}")
    return found[0] if found else "the loss itself"

"""Finding where a number stopped being finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backend import Array, array_module
from ..nn import Layer
from ..rng import Key
from .replicas import Replicas


def nonfinite_tensor(tensors: Mapping[str, Array]) -> str | None:
    """The name of the first floating-point tensor with NaN or infinity; None if all are finite."""
    for name, array in tensors.items():
        if np.issubdtype(array.dtype, np.inexact) and not bool(array_module(array).isfinite(array).all()):
            return name
    return None


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

        layer.forward = watched  # type: ignore[method-assign]  # taken away again below

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
    if found:
        return found[0]
    bad = nonfinite_tensor({name: p.grad for name, p in reversed(model.named_parameters().items())})
    return f"the gradient of {bad}" if bad else "the loss itself"

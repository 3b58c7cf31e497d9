"""The error of a run that diverges, and the first tensor that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend import Array, array_module
from ..nn import Layer
from ..rng import Key

if TYPE_CHECKING:
    from .replicas import Replicas


class Diverged(RuntimeError):
    """The loss, a gradient, a parameter or the optimizer's state is no longer finite.

    step: the step of a run in which that happened, if it was noticed later.
    """

    def __init__(self, what: str, step: int | None = None) -> None:
        super().__init__(what)
        self.step = step


def nonfinite_tensor(tensors: Mapping[str, Array]) -> str | None:
    """The name of the first floating-point tensor that contains NaN or infinity; None if all are finite."""
    for name, array in tensors.items():
        if np.issubdtype(array.dtype, np.inexact) and not bool(array_module(array).isfinite(array).all()):
            return name
    return None


def first_nonfinite(replicas: Replicas, batch: Any, key: Key | None) -> str:
    """Compute the loss of `batch` again, with the micro-batches and keys of `replicas.gradients(batch, key)`, and name
    the first layer whose output contains NaN or infinity. If all outputs are finite, name the first parameter whose
    gradient is not, in the order of backward, from the output to the input.
    """
    replicas.refresh()
    model = replicas.models[0]
    first: list[str] = []

    def watch(name: str, layer: Layer) -> None:
        forward = layer.forward

        def watched(*inputs: Any, **options: Any) -> Any:
            y, cache = forward(*inputs, **options)
            parts = y if isinstance(y, tuple) else (y,)
            if not first and not all(bool(array_module(part).isfinite(part).all()) for part in parts):
                first.append(f"the output of {name or 'the whole model'} ({type(layer).__name__})")
            return y, cache

        layer.forward = watched  # type: ignore[method-assign]  # removed again below

    layers = dict(model.named_layers())
    try:
        for name, layer in layers.items():
            watch(name, layer)
        for index, micro in enumerate(batch.split(replicas.rows(batch))):
            if not first:
                with np.errstate(**replicas.errors):
                    model.loss(*replicas.move(micro), key=None if key is None else key.fold(index))
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    if first:
        return first[0]
    bad = nonfinite_tensor({name: p.grad for name, p in reversed(model.named_parameters().items())})
    return f"the gradient of {bad}" if bad else "the loss itself"

"""Gradient checkpointing: trade time for memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..ops.checks import expect_instance
from .layer import Layer, Param


class RecomputeCache(NamedTuple):
    inputs: tuple
    options: dict[str, Any]


class Recompute(Layer):
    """Runs `layer` but stores only its inputs; backward runs forward again to rebuild the cache.

    This reduces the stored activations to the layer's inputs and costs one more forward. Dropout draws the same mask
    again, since its key is among the options. The names of the parameters do not change.
    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """

    def __init__(self, layer: Layer) -> None:
        expect_instance("layer", layer, Layer)
        self.layer: Any = layer

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        yield from self.layer.named_children()

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, RecomputeCache]:
        y, _ = self.layer.forward(*inputs, **options)
        return y, RecomputeCache(inputs, options)

    def backward(self, dy: Any, cache: RecomputeCache) -> Any:
        _, inner = self.layer.forward(*cache.inputs, **cache.options)
        return self.layer.backward(dy, inner)

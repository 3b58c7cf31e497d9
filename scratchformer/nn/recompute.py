"""Gradient checkpointing: trade time for memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..checks import expect_boolean, expect_instance
from .layer import Layer, Param, expect_backward


class RecomputeCache(NamedTuple):
    inputs: tuple
    options: dict[str, Any]
    kept: list | None = None  # with `keep`, the layer's own cache, until the first backward takes it


class Recompute(Layer):
    """Runs `layer` but stores only its inputs; backward runs forward again to rebuild the cache.

    This reduces the stored activations to the layer's inputs and costs one more forward. Dropout draws the same mask
    again, since its key is among the options. The names of the parameters do not change.
    keep: also keep the cache until the first backward, which frees it. It is meant for the last of several layers:
    backward begins with it, so at that moment its cache would be computed again anyway.
    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """

    def __init__(self, layer: Layer, keep: bool = False) -> None:
        expect_instance("layer", layer, Layer)
        expect_boolean(keep=keep)
        self.layer: Any = layer
        self.keep = keep

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        yield from self.layer.named_children()

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, RecomputeCache]:
        y, inner = self.layer.forward(*inputs, **options)
        return y, RecomputeCache(inputs, options, [inner] if self.keep else None)

    def backward(self, dy: Any, cache: RecomputeCache) -> Any:
        expect_backward(cache, RecomputeCache)
        if cache.kept:
            inner = cache.kept.pop()
        else:
            _, inner = self.layer.forward(*cache.inputs, **cache.options)
        return self.layer.backward(dy, inner)


def recompute_blocks(model: Layer, recompute: bool = True) -> None:
    """Let a model recompute its blocks, or stop doing so; its weights, `config` and results stay the same.

    Sets the attribute `recompute` of every layer in the model that has one, such as `Stack` and the body of a model.
    Raises ValueError if there is none.
    """
    expect_instance("model", model, Layer)
    expect_boolean(recompute=recompute)
    layers: list[Any] = [layer for _, layer in model.named_layers() if hasattr(layer, "recompute")]
    if not layers:
        raise ValueError(
            f"model: expected blocks to recompute (a `Stack`, or a layer with the attribute `recompute`), "
            f"got a {type(model).__name__} without any"
        )
    for layer in layers:
        layer.recompute = recompute

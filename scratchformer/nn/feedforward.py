"""The feed-forward layer of a block: two affine maps with an activation between them, at each position separately."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array
from ..checks import expect_positive
from ..ops import Activation
from ..rng import Key, fold
from .layer import Layer, expect_backward
from .linear import Linear


class FeedForwardCache(NamedTuple):
    up: Any
    down: Any


class FeedForward(Layer):
    """y = activation(x w₁ + b₁) w₂ + b₂, with widths C → F → C.

    d_ff: F, by default 4 C. activation: a name or your own pair of functions, see `Linear`. x: (..., C).
    """

    def __init__(
        self, d_model: int, d_ff: int | None = None, activation: Activation = "relu", key: Key = Key(0)
    ) -> None:
        expect_positive(d_model=d_model)
        d_ff = 4 * int(d_model) if d_ff is None else d_ff
        expect_positive(d_ff=d_ff)
        self.up = Linear(d_model, d_ff, key=fold(key, "up"), activation=activation)
        self.down = Linear(d_ff, d_model, key=fold(key, "down"))

    def forward(self, x: Array) -> tuple[Array, FeedForwardCache]:
        a, up = self.up.forward(x)  # (..., F)
        y, down = self.down.forward(a)
        return y, FeedForwardCache(up, down)

    def backward(self, dy: Array, cache: FeedForwardCache) -> Array:
        expect_backward(cache, FeedForwardCache, dy=dy)
        return self.up.backward(self.down.backward(dy, cache.down), cache.up)

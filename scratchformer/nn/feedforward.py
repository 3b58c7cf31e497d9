"""The feed-forward part of a block: two affine layers with an activation between them, at every position alike."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..ops.checks import expect_positive
from ..rng import Key
from .layer import Layer
from .linear import Linear

ACTIVATIONS = {
    "relu": (ops.relu, ops.relu_backward),
    "gelu": (ops.gelu, ops.gelu_backward),
    "gelu_tanh": (partial(ops.gelu, approximate="tanh"), ops.gelu_backward),
}


class FeedForwardCache(NamedTuple):
    up: Any
    activation: Any
    down: Any


class FeedForward(Layer):
    """y = activation(x w₁ + b₁) w₂ + b₂, with widths C → F → C.

    d_ff: F, by default 4 C. activation: "relu", "gelu" or "gelu_tanh". x: (..., C).
    """

    def __init__(self, d_model: int, d_ff: int | None = None, activation: str = "relu", key: Key = Key(0)) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        d_ff = 4 * d_model if d_ff is None else d_ff
        expect_positive(d_model=d_model, d_ff=d_ff)
        self.up = Linear(d_model, d_ff, key=key.fold("up"))
        self.down = Linear(d_ff, d_model, key=key.fold("down"))
        self.activation = activation

    def forward(self, x: Array) -> tuple[Array, FeedForwardCache]:
        activation, _ = ACTIVATIONS[self.activation]
        h, up = self.up.forward(x)  # (..., F)
        a, act = activation(h)
        y, down = self.down.forward(a)
        return y, FeedForwardCache(up, act, down)

    def backward(self, dy: Array, cache: FeedForwardCache) -> Array:
        _, activation_backward = ACTIVATIONS[self.activation]
        da = self.down.backward(dy, cache.down)
        dh = activation_backward(da, cache.activation)
        return self.up.backward(dh, cache.up)

"""The dropout layer."""

from __future__ import annotations

from .. import ops
from ..backend import Array
from ..checks import expect_fraction, expect_real
from ..rng import Key
from .layer import Layer


class Dropout(Layer):
    """With a key, zeroes each element with probability p and scales the rest; with no key, or p = 0, y = x."""

    def __init__(self, p: float) -> None:
        expect_fraction("p", p)
        self.p = float(p)

    def forward(self, x: Array, key: Key | None = None) -> tuple[Array, tuple | None]:
        return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)

    def backward(self, dy: Array, cache: tuple | None) -> Array:
        expect_real("dy", dy)
        return dy if cache is None else ops.dropout_backward(dy, cache)

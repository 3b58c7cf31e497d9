"""Token and position embeddings."""

from __future__ import annotations

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..ops.checks import expect_positive, expect_shape
from ..ops.precision import widen
from ..rng import Key
from .layer import Layer, Param


class TokenEmbedding(Layer):
    """y = table[ids]: a learned vector of width d_model for each of vocab_size tokens, normal at the start.

    std: of the normal distribution. ids: (B, T), integers. Returns (B, T, C).
    There is nothing to pass back to ids, so backward gives None.
    """

    def __init__(self, vocab_size: int, d_model: int, std: float = 1.0, key: Key = Key(0)) -> None:
        expect_positive(vocab_size=vocab_size, d_model=d_model)
        draw = key.generator()
        self.table = Param(np.float32(std) * draw.standard_normal((vocab_size, d_model), np.float32), "table")

    def forward(self, ids: Array) -> tuple[Array, tuple]:
        return ops.embedding(ids, self.table.data)

    def backward(self, dy: Array, cache: tuple) -> None:
        ops.embedding_backward(dy, cache, out=self.table.grad)


class PositionEmbedding(Layer):
    """y = x + table[:T]: a learned vector for each of max_length positions, normal at the start.

    std: of the normal distribution. x: (B, T, C) with T ≤ max_length; `start` is the position of x[:, 0].

    Backward: y_btc = x_btc + table_tc, so dx = dy, and a position collects from every sequence, dtable_tc = Σ_b dy_btc.
    """

    def __init__(self, max_length: int, d_model: int, std: float = 1.0, key: Key = Key(0)) -> None:
        expect_positive(max_length=max_length, d_model=d_model)
        draw = key.generator()
        self.table = Param(np.float32(std) * draw.standard_normal((max_length, d_model), np.float32), "table")

    def forward(self, x: Array, start: int = 0) -> tuple[Array, slice]:
        max_length, C = self.table.data.shape
        expect_shape("x", x, "B T C", C=C)
        stop = start + x.shape[1]
        if stop > max_length:
            raise ValueError(f"x: expected (B, T, C) with T up to {max_length}, got T = {stop}")
        return x + self.table.data[start:stop], slice(start, stop)

    def backward(self, dy: Array, cache: slice) -> Array:
        self.table.grad[cache] += widen(dy).sum(axis=0)
        return dy


class SinusoidalPositions(Layer):
    """y = x + P[:T], with the fixed clock faces of `ops.sinusoidal_positions`; dx = dy. For any length."""

    def forward(self, x: Array, start: int = 0) -> tuple[Array, None]:
        expect_shape("x", x, "B T C")
        _, T, C = x.shape
        return x + ops.sinusoidal_positions(T, C, array_module(x), x.dtype, start), None

    def backward(self, dy: Array, cache: None) -> Array:
        return dy

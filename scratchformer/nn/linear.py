"""The affine layer."""

from __future__ import annotations

import math

import numpy as np

from .. import ops
from ..backend import Array
from ..checks import expect_boolean
from ..rng import Key
from .layer import Layer, Param, initial_generator


class Linear(Layer):
    """y = x w + b, or y = f(x w + b) with an activation f.

    d_in, d_out: the widths of x (..., d_in) and y (..., d_out). w and b are initially uniform in ±1/√d_in, drawn from
    `key`: two layers of the same size with the same key, or both without one, start with the same weights.
    activation: None, "relu", "gelu", "gelu_tanh", "silu", or your own pair (op, op_backward), see
    `ops.activation_pair`. A layer with an activation must have a bias.
    """

    def __init__(
        self, d_in: int, d_out: int, bias: bool = True, key: Key = Key(0), activation: ops.Activation | None = None
    ) -> None:
        draw = initial_generator(key, d_in=d_in, d_out=d_out)
        expect_boolean(bias=bias)
        if activation is not None:
            ops.activation_pair(activation)
            if not bias:
                raise ValueError("bias: expected True, since the layer has an activation, got False")
        bound = 1 / math.sqrt(d_in)
        self.w = Param(draw.uniform(-bound, bound, (d_in, d_out)).astype(np.float32, copy=False), "w")
        self.b = Param(draw.uniform(-bound, bound, d_out).astype(np.float32, copy=False), "b") if bias else None
        self.activation = activation

    def forward(self, x: Array) -> tuple[Array, tuple]:
        b = None if self.b is None else self.b.data
        if self.activation is None:
            return ops.linear(x, self.w.data, b)
        return ops.dense(x, self.w.data, b, self.activation)

    def backward(self, dy: Array, cache: tuple) -> Array:
        backward = ops.linear_backward if self.activation is None else ops.dense_backward
        dx, dw, *db = backward(dy, cache)
        self.w.grad += dw
        if self.b is not None:
            self.b.grad += db[0]
        return dx

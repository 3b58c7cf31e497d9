"""The layer norm layer."""

from __future__ import annotations

import numpy as np

from .. import ops
from ..backend import Array
from ..checks import expect_number, expect_positive
from .layer import Layer, Param


class LayerNorm(Layer):
    """y = γ x̂ + β over the last axis, of width d_model; γ starts at 1 and β at 0."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        expect_positive(d_model=d_model)
        expect_number("eps", eps, zero=False)
        self.gamma = Param(np.ones(d_model, np.float32), "gamma")
        self.beta = Param(np.zeros(d_model, np.float32), "beta")
        self.eps = float(eps)

    def forward(self, x: Array) -> tuple[Array, tuple]:
        return ops.layernorm(x, self.gamma.data, self.beta.data, self.eps)

    def backward(self, dy: Array, cache: tuple) -> Array:
        dx, dgamma, dbeta = ops.layernorm_backward(dy, cache)
        self.gamma.grad += dgamma
        self.beta.grad += dbeta
        return dx

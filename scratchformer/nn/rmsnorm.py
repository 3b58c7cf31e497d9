"""The RMS norm layer."""

from __future__ import annotations

import numpy as np

from .. import ops
from ..backend import Array
from ..checks import expect_number, expect_positive
from .layer import Layer, Param


class RMSNorm(Layer):
    """y = γ x/ρ, where ρ is the root mean square of x over the last axis, of width d_model; γ starts at 1."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        expect_positive(d_model=d_model)
        expect_number("eps", eps, zero=False)
        self.gamma = Param(np.ones(d_model, np.float32), "gamma")
        self.eps = float(eps)

    def forward(self, x: Array) -> tuple[Array, tuple]:
        return ops.rmsnorm(x, self.gamma.data, self.eps)

    def backward(self, dy: Array, cache: tuple) -> Array:
        dx, dgamma = ops.rmsnorm_backward(dy, cache)
        self.gamma.grad += dgamma
        return dx

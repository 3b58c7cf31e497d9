"""Activations in compiled code: each is h Φ(h), and the backward multiplies dy with its slope at h."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from ..ops.activations import CUBIC
from .numba_code import compiled
from .numba_math import constant, exp, narrow, read
from .numpy_dense import ERF_P, ERF_POLYNOMIAL

ROOT = math.sqrt(8 / math.pi)  # 2u = ROOT h (1 + CUBIC h²), see `ops.dense`


@compiled
def sigmoid(x: Any) -> Any:
    one = constant(1, x)
    return one / (one + exp(-x))


def normal_cdf(h: Any) -> Any:
    """½ (1 + erf(h/√2)); in float32 with the polynomial of `numpy_dense`."""


@overload(normal_cdf, strict=False)
def _normal_cdf(h: Any) -> Any:
    if h != numba.float32:
        return lambda h: 0.5 * (1 + math.erf(h * math.sqrt(0.5)))
    p, half, one = np.float32(ERF_P * math.sqrt(0.5)), np.float32(0.5), np.float32(1)
    c5, c4, c3, c2, c1 = (np.float32(c / 2) for c in ERF_POLYNOMIAL)

    def cdf(h):  # type: ignore[no-untyped-def]
        t = one / (one + p * abs(h))
        tail = ((((c5 * t + c4) * t + c3) * t + c2) * t + c1) * t * exp(-half * h * h)  # ½ (1 − erf(|h|/√2))
        return tail if h < 0 else one - tail

    return cdf


@compiled
def relu_backward(dy: Any, y: Any, dh: Any) -> None:
    """From y, which is positive where h is."""
    zero = dy.dtype.type(0)
    for i in range(dy.size):
        dh[i] = dy[i] if read(y[i]) > 0 else zero


@compiled
def silu(h: Any, y: Any) -> None:
    for i in range(h.size):
        z = read(h[i])
        y[i] = narrow(z / (constant(1, z) + exp(-z)), y)


@compiled
def silu_backward(dy: Any, h: Any, dh: Any) -> None:
    for i in range(dy.size):
        z = read(h[i])
        s = sigmoid(z)
        dh[i] = narrow(read(dy[i]) * (s + z * s * (constant(1, z) - s)), dh)


@compiled
def gelu(h: Any, y: Any) -> None:
    for i in range(h.size):
        z = read(h[i])
        y[i] = narrow(z * normal_cdf(z), y)


@compiled
def gelu_backward(dy: Any, h: Any, dh: Any) -> None:
    for i in range(dy.size):
        z = read(h[i])
        bell = exp(constant(-0.5, z) * z * z) * constant(1 / math.sqrt(2 * math.pi), z)
        dh[i] = narrow(read(dy[i]) * (normal_cdf(z) + z * bell), dh)


@compiled
def gelu_tanh(h: Any, y: Any) -> None:
    for i in range(h.size):
        z = read(h[i])
        one, root, cubic = constant(1, z), constant(ROOT, z), constant(ROOT * CUBIC, z)
        y[i] = narrow(z / (one + exp(-(root + cubic * (z * z)) * z)), y)


@compiled
def gelu_tanh_backward(dy: Any, h: Any, dh: Any) -> None:
    for i in range(dy.size):
        z = read(h[i])
        one, root, cubic = constant(1, z), constant(ROOT, z), constant(ROOT * CUBIC, z)
        square = z * z
        s = one / (one + exp(-(root + cubic * square) * z))
        slope = root + constant(3, z) * cubic * square  # of 2u
        dh[i] = narrow(read(dy[i]) * (s + z * s * (one - s) * slope), dh)


FORWARD = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
BACKWARD = {"relu": relu_backward, "silu": silu_backward, "gelu": gelu_backward, "gelu_tanh": gelu_tanh_backward}

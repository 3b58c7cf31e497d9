"""Rotary positions in compiled code, in one pass, with heads inside: no copy of x into halves and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.positions import BASE
from ..ops.rotary import Scaling, check_rotary
from .numba_code import as_bits, compiled
from .numba_math import alike, narrow, read


class FastRotaryCache(NamedTuple):
    cos: np.ndarray  # (T, D/2)
    sin: np.ndarray  # (T, D/2)
    shape: tuple[int, ...]  # of x, (B, H, T, D)


@ops.rotary.twin(np.ndarray, fast=True)
def rotary(x: np.ndarray, start: int = 0, base: float = BASE, scaling: Scaling = None) -> tuple[np.ndarray, Any]:
    """As `ops.rotary`, in one pass.

    Forward, for each sequence and head, with φ_ti, i_d, j_d and σ_d as in `rotary`:

        θ_i = base^(−2 i/D)        φ_ti = (start + t) θ_i        cos_ti = cos(φ_ti)        sin_ti = sin(φ_ti)
        i_d = d mod (D/2)        j_d = (d + D/2) mod D        σ_d = −1 where d < D/2, 1 elsewhere
        y_td = x_td cos_ti + σ_d x_tj sin_ti with i = i_d, j = j_d

    Backward. As derived in `rotary`, the rotation by −φ:

        dx_td = dy_td cos_ti − σ_d dy_tj sin_ti with i = i_d, j = j_d

    In code:

        return turned(dy, cache.cos, cache.sin, -1.0)

    y is laid out as (B, T, H, D), as x is when it comes from a projection. The cache is that of the reference.
    """
    if not (alike(x) and x.ndim == 4):
        return ops.rotary.twins.get(np.ndarray, ops.rotary.reference)(x, start, base, scaling)
    cos, sin = check_rotary(x, start, base, scaling)
    return turned(x, cos, sin, 1.0), FastRotaryCache(cos, sin, x.shape)


@ops.rotary_backward.twin(FastRotaryCache)
def rotary_backward(dy: np.ndarray, cache: FastRotaryCache) -> np.ndarray:
    """dx, as `ops.rotary_backward`."""
    if not (alike(dy) and dy.shape == cache.shape):
        expect_like("dy", dy, cache.shape)
        return turned(dy.astype(cache.cos.dtype), cache.cos, cache.sin, -1.0).astype(dy.dtype)
    return turned(dy, cache.cos, cache.sin, -1.0)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float) -> np.ndarray:
    """x (B, H, T, D), rotated forwards or backwards."""
    inside = as_bits(np.ascontiguousarray(x.transpose(0, 2, 1, 3)))
    y = np.empty_like(inside)
    turn(inside, cos, sin, sign, y)
    return y.view(x.dtype).transpose(0, 2, 1, 3)


@compiled
def turn(x: Any, cos: Any, sin: Any, sign: Any, y: Any) -> None:
    half = cos.shape[1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                row, to = x[b, t, h], y[b, t, h]
                for i in range(half):
                    first, second, s = read(row[i]), read(row[half + i]), cos.dtype.type(sign) * sin[t, i]
                    to[i] = narrow(first * cos[t, i] - second * s, to)
                    to[half + i] = narrow(second * cos[t, i] + first * s, to)

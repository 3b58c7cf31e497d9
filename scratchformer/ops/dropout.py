"""Dropout with an explicit random key, so that it can be replayed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, array_module
from ..dispatch import backward, operation
from ..rng import Key, expect_key, random_uint16
from .checks import expect_floating, expect_fraction, expect_like
from .precision import widen

LEVELS = 2**16  # uniform 16-bit integers decide, so p is rounded to a multiple of 1/65536


class DropoutCache(NamedTuple):
    keep: Array  # of the shape of x, boolean
    scale: float


@operation
def dropout(x: Array, p: float, key: Key) -> tuple[Array, DropoutCache]:
    """y_i = k_i x_i / (1 − p), where k_i is 0 with probability p and 1 otherwise.

    x: any shape. p: 0 ≤ p < 1. key: determines the k_i, so the same key drops the same elements on every backend.
    Returns y of the shape of x, and the cache. The division preserves the expectation: E[y_i] = x_i.
    Raises ValueError if p is not in [0, 1).

    Forward, for each element i. A uniform integer u_i from 0 to 65535 decides, so p is rounded to r, a multiple of
    1/65536:

        k := keep
        r = min(⌊65536 p + ½⌋, 65535)/65536        scale = 1/(1 − r)
        k_i = [u_i ≥ 65536 r]        y_i = k_i x_i/(1 − r)

    Backward. Given the key, the k_i are constants:

        ∂y_i/∂x_i = k_i/(1 − r)        dx_i = dy_i ∂y_i/∂x_i = dy_i k_i/(1 − r)

    In NumPy:

        dx = dy * cache.keep * cache.scale

    The cache keeps k as booleans, one byte per element. (The key alone would do, at the cost of drawing k again.)
    Source: Srivastava et al., "Dropout", JMLR 2014, with the scaling moved from test to training.
    """
    expect_floating(x=x)
    keep, scale = decide(p, key, x.shape, array_module(x))
    return (widen(x) * keep * scale).astype(x.dtype, copy=False), DropoutCache(keep, scale)


def decide(p: float, key: Key, shape: tuple[int, ...], xp: Any) -> tuple[Array, float]:
    """Which elements of `shape` are kept, boolean, and 1/(1 − p)."""
    expect_fraction("p", p)
    expect_key(key)
    threshold = threshold_of(p)
    keep = random_uint16(key, math.prod(shape), xp) >= threshold
    return keep.reshape(shape), LEVELS / (LEVELS - threshold)


def threshold_of(p: float) -> int:
    """How many of the integers drop an element, 65536 r: a half is rounded up."""
    return min(math.floor(p * LEVELS + 0.5), LEVELS - 1)


@backward
def dropout_backward(dy: Array, cache: DropoutCache) -> Array:
    """dx: see `dropout`."""
    expect_like("dy", dy, cache.keep.shape)
    dtype, dy = dy.dtype, widen(dy)
    dx = dy * cache.keep * cache.scale
    return dx.astype(dtype, copy=False)

"""Dropout with an explicit random key, so that it can be replayed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..backend import Array, array_module, cast, is_numpy_like, widen
from ..checks import expect_floating, expect_fraction, expect_like
from ..dispatch import backward, operation
from ..rng import Bits, Key, expect_key

LEVELS = 2**16  # uniform 16-bit integers decide, so p is rounded to a multiple of 1/65536


class DropoutCache(NamedTuple):
    u: Bits  # the uniform integers that decide what is kept
    p: float
    shape: tuple[int, ...]  # of x


def drawn(x: Array, p: float, key: Key) -> dict[str, Bits]:
    """The u_i of `dropout`. Raises TypeError or ValueError unless its arguments are valid."""
    expect_floating(x=x)
    expect_fraction("p", p)
    expect_key(key)
    return {"u": Bits(key.start())}


@operation(given=drawn)
def dropout(x: Array, p: float, key: Key) -> tuple[Array, DropoutCache]:
    """y_i = k_i x_i / (1 − p), where k_i is 0 with probability p and 1 otherwise.

    x: any shape. p: 0 ≤ p < 1. key: determines the k_i, so the same key drops the same elements on every backend.
    Returns y of the shape of x, and the cache. The division preserves the expectation: E[y_i] = x_i.
    Raises ValueError if p is not in [0, 1).

    Forward, for each element i. A uniform integer u_i from 0 to 65535 decides, so p is rounded to r, a multiple of
    1/65536:

        r = min(⌊65536 p + ½⌋, 65535)/65536        scale = 1/(1 − r)
        k_i = [u_i ≥ 65536 r]        y_i = k_i x_i/(1 − r) = k_i scale x_i

    Backward. Given the key, the k_i are constants:

        ∂y_i/∂x_i = k_i/(1 − r)        dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale

    In NumPy, where `keep` is k:

        dx = dy * keep * scale

    The cache keeps where the u_i start, and no array: they are drawn again.
    Source: Srivastava et al., "Dropout", JMLR 2014, with the scaling moved from test to training.
    """
    bits = drawn(x, p, key)["u"]
    keep, scale = decide(p, bits, widen(x))
    return cast(widen(x) * keep * scale, x.dtype), DropoutCache(bits, p, x.shape)


def decide(p: float, bits: Bits, x: Array) -> tuple[Array, float]:
    """Which elements of an array like x are kept, 1 or 0, and 1/(1 − p)."""
    xp, threshold = array_module(x), threshold_of(p)
    size = math.prod(x.shape)
    # The standard has no arithmetic that may wrap around, so for other libraries NumPy draws.
    u = bits.draw(size, xp) if is_numpy_like(xp) else xp.asarray(bits.draw(size).astype(np.int32))
    return cast(xp.reshape(u >= threshold, x.shape), x.dtype), LEVELS / (LEVELS - threshold)


def threshold_of(p: float) -> int:
    """How many of the integers drop an element, 65536 r: a half is rounded up."""
    return min(math.floor(p * LEVELS + 0.5), LEVELS - 1)


@backward
def dropout_backward(dy: Array, cache: DropoutCache) -> Array:
    """dx: see `dropout`."""
    expect_like("dy", dy, cache.shape)
    dtype, dy = dy.dtype, widen(dy)
    keep, scale = decide(cache.p, cache.u, dy)
    dx = dy * keep * scale
    return cast(dx, dtype)

"""Dropout with an explicit random key, so that it can be replayed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, array_module, widen
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
    keep, scale = decide(p, bits, x.shape, array_module(x))
    return (widen(x) * keep * scale).astype(x.dtype, copy=False), DropoutCache(bits, p, x.shape)


def decide(p: float, bits: Bits, shape: tuple[int, ...], xp: Any) -> tuple[Array, float]:
    """Which elements of `shape` are kept, boolean, and 1/(1 − p)."""
    threshold = threshold_of(p)
    keep = bits.draw(math.prod(shape), xp) >= threshold
    return keep.reshape(shape), LEVELS / (LEVELS - threshold)


def threshold_of(p: float) -> int:
    """How many of the integers drop an element, 65536 r: a half is rounded up."""
    return min(math.floor(p * LEVELS + 0.5), LEVELS - 1)


@backward
def dropout_backward(dy: Array, cache: DropoutCache) -> Array:
    """dx: see `dropout`."""
    expect_like("dy", dy, cache.shape)
    dtype, dy = dy.dtype, widen(dy)
    keep, scale = decide(cache.p, cache.u, cache.shape, array_module(dy))
    dx = dy * keep * scale
    return dx.astype(dtype, copy=False)

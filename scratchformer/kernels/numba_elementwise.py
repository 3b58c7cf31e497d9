"""Dropout in one pass of compiled code, which draws its random bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_fraction, expect_like
from ..ops.dropout import LEVELS, threshold_of
from ..rng import GAMMA, MIX_1, MIX_2, Key, expect_key, start_of
from .numba_code import as_bits, compiled
from .numba_math import alike, constant, narrow, read

WORDS = 256  # random words that are drawn before they are used


def flat(x: np.ndarray) -> np.ndarray:
    """The numbers of x as compiled code takes them, in a row; bfloat16 as bits."""
    return as_bits(np.ascontiguousarray(x)).reshape(-1)


class FastDropoutCache(NamedTuple):
    start: np.uint64  # of the random words
    threshold: int
    shape: tuple[int, ...]


@ops.dropout.twin(np.ndarray, fast=True)
def dropout(x: np.ndarray, p: float, key: Key) -> tuple[np.ndarray, Any]:
    """As `ops.dropout`, with the random bits drawn in the loop, and again in the backward.

    Forward, for each element i, with keep as in `dropout`:

        y_i = keep_i scale x_i

    Backward. Given the key, the factors are constants:

        ∂y_i/∂x_j = δ_ij keep_i scale        dx_i = Σ_j dy_j ∂y_j/∂x_i = keep_i scale dy_i

    It is the same function of dy as y is of x:

        keep_some(flat(dy), start, threshold, flat(dx))

    The cache keeps where the bits start, and no mask.
    """
    if not alike(x):
        return ops.dropout.twins[np.ndarray](x, p, key)
    expect_fraction("p", p)
    expect_key(key)
    cache = FastDropoutCache(start_of(key), threshold_of(p), x.shape)
    y = np.empty(x.shape, x.dtype)
    keep_some(flat(x), cache.start, cache.threshold, flat(y))
    return y, cache


@ops.dropout_backward.twin(FastDropoutCache)
def dropout_backward(dy: np.ndarray, cache: FastDropoutCache) -> np.ndarray:
    """dx, as `ops.dropout_backward`."""
    start, threshold, shape = cache
    if not (alike(dy) and dy.shape == shape):
        expect_like("dy", dy, shape)
        return dropout_backward(np.asarray(dy, np.float32), cache).astype(dy.dtype)
    dx = np.empty(shape, dy.dtype)
    keep_some(flat(dy), start, threshold, flat(dx))
    return dx


@compiled
def keep_some(x: Any, start: Any, threshold: Any, y: Any) -> None:
    """y = x/(1 − r) where the integer of `random_uint16` is at least `threshold`, which is 65536 r; 0 elsewhere."""
    words = np.empty(WORDS, np.uint64)
    bits, least = words.view(np.uint16), np.uint16(threshold)
    for first in range(0, y.size, 4 * WORDS):
        for i in range(WORDS):
            word = start + np.uint64(first // 4 + i) * GAMMA
            word = (word ^ (word >> np.uint64(30))) * MIX_1
            word = (word ^ (word >> np.uint64(27))) * MIX_2
            words[i] = word ^ (word >> np.uint64(31))
        part, to = x[first : first + 4 * WORDS], y[first : first + 4 * WORDS]
        for i in range(to.size):
            z = read(part[i])
            factor = constant(LEVELS, z) / constant(LEVELS - threshold, z)
            to[i] = narrow(z * (factor if bits[i] >= least else constant(0, z)), to)

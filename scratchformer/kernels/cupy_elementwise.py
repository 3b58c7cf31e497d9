"""Elementwise sums and dropout on a GPU: a thread reads 16 bytes at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array
from ..ops.add import AddCache
from ..ops.checks import expect_fraction, expect_like
from ..ops.dropout import LEVELS, threshold_of
from ..rng import Key, expect_key, start_of
from .cupy_code import alike, contiguous, launch_each, real


@ops.add.twin(cupy.ndarray, fast=True)
def add(x: Array, f: Array) -> tuple[Array, AddCache]:
    """As `ops.add`:

        y_i = x_i + f_i        dx_i = dy_i        df_i = dy_i

    The backward is that of the reference, since it only copies.
    """
    if not (alike(x, f) and x.shape == f.shape):
        return ops.add.reference(x, f)
    y = cupy.empty(x.shape, x.dtype)
    launch_each("elementwise", "add", (contiguous(x), contiguous(f), y), KIND=0)
    return y, AddCache(x.shape)


class CudaDropoutCache(NamedTuple):
    key: Key
    threshold: int
    scale: float
    shape: tuple[int, ...]


@ops.dropout.twin(cupy.ndarray, fast=True)
def dropout(x: Array, p: float, key: Key) -> tuple[Array, Any]:
    """As `ops.dropout`, with the random bits drawn again in the backward.

    Forward, for each element i, with keep as in `dropout`:

        y_i = keep_i scale x_i

    Backward. Given the key, the factors are constants:

        ∂y_i/∂x_j = δ_ij keep_i scale        dx_i = Σ_j dy_j ∂y_j/∂x_i = keep_i scale dy_i

    It is the same function of dy as y is of x:

        return dropped(dy, cache)

    A thread computes the bits of its elements itself, so nothing but x is read. The cache keeps no array.
    """
    if not alike(x):
        return ops.dropout.reference(x, p, key)
    expect_fraction("p", p)
    expect_key(key)
    threshold = threshold_of(p)
    cache = CudaDropoutCache(key, threshold, LEVELS / (LEVELS - threshold), x.shape)
    return dropped(x, cache), cache


@ops.dropout_backward.twin(CudaDropoutCache)
def dropout_backward(dy: Array, cache: CudaDropoutCache) -> Array:
    """dx, as `ops.dropout_backward`."""
    expect_like("dy", dy, cache.shape)
    return dropped(dy, cache)


def dropped(x: Array, cache: CudaDropoutCache) -> Array:
    """keep · scale · x, with `keep` drawn from the key."""
    x, y = contiguous(x), cupy.empty(x.shape, x.dtype)
    start, scale = np.uint64(start_of(cache.key)), real(x.dtype).type(cache.scale)
    launch_each("elementwise", "dropout", (x, y), start, np.int32(cache.threshold), scale, KIND=0)
    return y

"""Dropout on NumPy: the mask and the scale become one floating-point array, which is multiplied in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.dropout import decide
from ..rng import Key
from .numpy_arrays import one_real_dtype

plain = ops.dropout.reference


class NumpyDropoutCache(NamedTuple):
    keep: np.ndarray  # of the shape of x, boolean
    scale: float


@ops.dropout.twin(np.ndarray)
def dropout(x: np.ndarray, p: float, key: Key) -> tuple[np.ndarray, NumpyDropoutCache]:
    """As `ops.dropout`."""
    if not one_real_dtype(x):
        return plain(x, p, key)
    keep, scale = decide(p, key, x.shape, np)
    y = np.multiply(keep, scale, dtype=x.dtype)
    y *= x
    return y, NumpyDropoutCache(keep, scale)


@ops.dropout_backward.twin(NumpyDropoutCache)
def dropout_backward(dy: np.ndarray, cache: NumpyDropoutCache) -> np.ndarray:
    """dx, as `ops.dropout_backward`."""
    expect_like("dy", dy, cache.keep.shape)
    dx = np.multiply(cache.keep, cache.scale, dtype=dy.dtype)
    dx *= dy
    return dx

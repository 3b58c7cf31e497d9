"""Dropout on NumPy: the mask and the scale become one array of factors, which is multiplied in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.dropout import decide
from ..rng import Key
from .numpy_arrays import one_real_dtype
from .numpy_half import in_half

plain = in_half(ops.dropout, ops.dropout_backward)


class NumpyDropoutCache(NamedTuple):
    keep: np.ndarray  # of the shape of x, boolean
    scale: float


@ops.dropout.twin(np.ndarray)
def dropout(x: np.ndarray, p: float, key: Key) -> tuple[np.ndarray, NumpyDropoutCache]:
    """As `ops.dropout`, with an array of factors, each 0 or 1/(1 − p).

    Forward, for each element i, with keep as in `dropout`:

        factor_i := keep_i scale        y_i = factor_i x_i

    Backward. Given the key, the factors are constants:

        ∂y_i/∂x_j = δ_ij factor_i        dx_i = Σ_j dy_j ∂y_j/∂x_i = factor_i dy_i

    The array of factors is computed again, and becomes the gradient:

        dx = np.multiply(cache.keep, cache.scale, dtype=dy.dtype)
        dx *= dy

    Each direction allocates only one floating-point array, its result. The cache is that of the reference.
    """
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
    dy = dy.astype(dy.dtype.type, copy=False)  # in the machine's byte order
    dx = np.multiply(cache.keep, cache.scale, dtype=dy.dtype)
    dx *= dy
    return dx

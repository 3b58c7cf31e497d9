"""The norm of a flat gradient on a GPU, and clipping."""

from __future__ import annotations

import cupy
import numpy as np

from ..backend import Array
from ..optim import optimizer
from .cupy_code import alike, kernel, vector

BLOCKS = 1056  # that sum squares


def real_numbers(*arrays: Array) -> bool:
    """Whether all are contiguous CuPy arrays of float32, or all of float64."""
    return alike(*arrays) and arrays[0].itemsize >= 4 and all(x.flags.c_contiguous and x.size for x in arrays)


def sum_of_squares(x: Array) -> Array:
    """As `optim.optimizer.sum_of_squares`, without a float64 copy of x."""
    V, sums = vector(x.dtype, x.data.ptr), cupy.empty(min(BLOCKS, -(-x.size // 256)), np.float64)
    kernel("optimizer", "squares", x.dtype.name, V=V)((sums.size,), (256,), (x, sums, np.int64(x.size)))
    return sums.sum()


def is_norm(norm: Array, max_norm: float) -> bool:
    return alike(norm) and norm.dtype == np.float64 and not norm.shape


def share_for(norm: Array, max_norm: float) -> Array:
    share = cupy.empty((), np.float64)
    kernel("optimizer", "share", "float64", V=1)((1,), (1,), (norm, share, np.float64(max_norm)))
    return share


optimizer.share_for.add_twin(cupy.ndarray, is_norm, share_for, fast=True)
optimizer.sum_of_squares.add_twin(cupy.ndarray, real_numbers, sum_of_squares, fast=True)

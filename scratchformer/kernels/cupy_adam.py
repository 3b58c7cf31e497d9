"""The norm of a flat gradient on a GPU."""

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


optimizer.sum_of_squares.add_twin(cupy.ndarray, real_numbers, sum_of_squares, fast=True)

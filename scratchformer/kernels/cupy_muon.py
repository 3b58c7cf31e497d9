"""Muon's iteration on a GPU, for all matrices of one shape together."""

from __future__ import annotations

import cupy
import numpy as np

from ..backend import Array, device_of
from ..ops.rounding import bfloat16
from ..optim import muon
from .cupy_code import kernel
from .cupy_products import available, product

MULTIPLE = 8  # the sizes of matrices are rounded up to a multiple, since the fast kernels want multiples of 16 bytes
BLOCKS = 64  # that read a matrix, at most


def fits(g: Array, steps: int = muon.STEPS, precision: str = "float32") -> bool:
    if g.dtype != np.float32 or not g.size or not available():
        return False
    muon.expect_matrices(g, steps, precision)
    return True


def newton_schulz(g: Array, steps: int = muon.STEPS, precision: str = "float32") -> Array:
    """As `optim.newton_schulz`. With the precision "bfloat16" that rounds float32 factors to bfloat16 and multiplies
    them in float32; here bfloat16 arrays are multiplied, and summed in float32.

    A product gives s x y + t z, so the sums of the polynomial need no kernels of their own. The rows and columns of
    zeros that are added stay zeros, and change nothing else.
    """
    a, b, c = muon.COEFFICIENTS
    dtype = bfloat16(device_of(g)) if precision == "bfloat16" else np.float32
    wide = g if g.shape[-2] <= g.shape[-1] else g.swapaxes(-1, -2)
    matrices = wide.reshape(-1, *wide.shape[-2:])
    count, I, J = matrices.shape
    x = cupy.zeros((count, rounded_up(I), rounded_up(J)), np.float32)
    x[:, :I, :J] = matrices
    divide_by_norms(x)
    gram = cupy.empty((*x.shape[:2], x.shape[1]), np.float32)
    for _ in range(steps):
        left = x.astype(dtype)
        product(left, left.swapaxes(1, 2), gram)
        square = gram.astype(dtype)
        product(square, square, gram, gram, scales=(c, b))
        product(gram.astype(dtype), left, x, x, scales=(1.0, a))
    y = x[:, :I, :J].reshape(wide.shape)
    return y if wide is g else y.swapaxes(-1, -2)


def divide_by_norms(x: Array) -> None:
    """Divide each matrix of x (N, I, J) by its norm, which is computed in float64."""
    count, size, V = len(x), x[0].size, 4
    blocks = min(BLOCKS, -(-size // (256 * V)))
    sums = cupy.empty((count, blocks), np.float64)
    run = (blocks, count), (256,)
    kernel("optimizer", "squares", "float32", V=V)(*run, (x, sums, np.int64(size)))
    arguments = x, sums, np.int64(size), np.int64(blocks), np.float64(muon.SMALLEST)
    kernel("optimizer", "divide_by_norms", "float32", V=V)(*run, arguments)


def rounded_up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


muon.newton_schulz.add_twin(cupy.ndarray, fits, newton_schulz, fast=True)

"""Muon's iteration on a GPU, with products in bfloat16."""

from __future__ import annotations

import cupy
import numpy as np

from ..backend import Array
from ..optim import muon
from .cupy_products import available, product


def fits(g: Array, steps: int = muon.STEPS, precision: str = "float32") -> bool:
    if precision != "bfloat16" or g.dtype != np.float32 or not g.size or not available():
        return False
    muon.expect_matrix(g, steps, precision)
    return True


def newton_schulz(g: Array, steps: int = muon.STEPS, precision: str = "bfloat16") -> Array:
    """As `optim.newton_schulz`, which rounds float32 factors to bfloat16 and multiplies them in float32; here bfloat16
    arrays are multiplied, and summed in float32.
    """
    import ml_dtypes

    a, b, c = muon.COEFFICIENTS
    x = cupy.ascontiguousarray(muon.scaled(g))
    gram, change = cupy.empty((len(x), len(x)), np.float32), cupy.empty_like(x)
    for _ in range(steps):
        left = x.astype(ml_dtypes.bfloat16)
        product(left, left.T, gram)
        square = gram.astype(ml_dtypes.bfloat16)
        polynomial = (b * gram + c * product(square, square, cupy.empty_like(gram))).astype(ml_dtypes.bfloat16)
        x = a * x + product(polynomial, left, change)
    return x if x.shape == g.shape else x.T


muon.newton_schulz.add_twin(cupy.ndarray, fits, newton_schulz, fast=True)

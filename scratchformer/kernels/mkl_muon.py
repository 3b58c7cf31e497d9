"""Muon's iteration with products in bfloat16."""

from __future__ import annotations

import numpy as np

from ..optim import muon
from .mkl_products import CBLAS, NO_TRANSPOSE, ROWS, TRANSPOSE, products
from .numba_multiply import half
from .numpy_attention import accepted


def fits(g: np.ndarray, steps: int = muon.STEPS, precision: str = "float32") -> bool:
    library = products()
    if precision != "bfloat16" or g.dtype != np.float32 or not g.size or library is None or not library.bfloat16:
        return False
    return g.ndim == 2 and accepted(muon.expect_matrices, g, steps, precision)


def newton_schulz(g: np.ndarray, steps: int = muon.STEPS, precision: str = "bfloat16") -> np.ndarray:
    """As `optim.newton_schulz`, for bfloat16 where products in it are faster than in float32.

    The equations are those of the reference. One call replaces c by α a b + β c, with a and b in bfloat16 and c in
    float32, so the sums of the polynomial need no passes of their own. The order of sums differs from the reference's.
    """
    a, b, c = muon.COEFFICIENTS
    multiply = CBLAS(products().bfloat16)  # type: ignore[union-attr]  # there are: see `fits`
    x = np.ascontiguousarray(muon.normalized(g))
    I, J = x.shape
    gram = np.empty((I, I), np.float32)
    for _ in range(steps):
        left = half(x)
        at = left.ctypes.data
        multiply(ROWS, NO_TRANSPOSE, TRANSPOSE, I, I, J, 1.0, at, J, at, J, 0.0, gram.ctypes.data, I)
        square = half(gram)
        to = square.ctypes.data
        multiply(ROWS, NO_TRANSPOSE, NO_TRANSPOSE, I, I, I, c, to, I, to, I, b, gram.ctypes.data, I)
        polynomial = half(gram)
        multiply(ROWS, NO_TRANSPOSE, NO_TRANSPOSE, I, J, I, 1.0, polynomial.ctypes.data, I, at, J, a, x.ctypes.data, J)
    return x if x.shape == g.shape else x.T


muon.newton_schulz.add_twin(np.ndarray, fits, newton_schulz, fast=True)

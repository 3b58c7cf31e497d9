"""Adam on NumPy, with a single temporary array, on pieces that fit in cache."""

from __future__ import annotations

import math

import numpy as np

from ..optim import adam
from .numpy_arrays import one_real_dtype

plain = adam.adam_step.reference


@adam.adam_step.twin(np.ndarray)
def adam_step(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, lr: float, betas: tuple, eps: float, steps: int
) -> None:
    """As `optim.adam.adam_step`."""
    if not one_real_dtype(w, g, m, v):
        return plain(w, g, m, v, lr, betas, eps, steps)
    beta1, beta2 = betas
    change = np.multiply(g, 1 - beta1)
    m *= beta1
    m += change
    np.multiply(g, g, out=change)
    change *= 1 - beta2
    v *= beta2
    v += change
    np.sqrt(v, out=change)
    change *= 1 / math.sqrt(1 - beta2**steps)  # √v̂
    change += eps
    np.divide(m, change, out=change)
    change *= lr / (1 - beta1**steps)
    w -= change
    return None

"""Adam on NumPy, with a single temporary array, on pieces that fit in cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..optim import adam
from .numpy_arrays import one_real_dtype

plain = adam.adam_step.reference


@adam.adam_step.twin(np.ndarray)
def adam_step(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, lr: float, beta1: float, beta2: float, eps: float, steps: int
) -> None:
    """As `optim.adam.adam_step`, with one temporary array.

    For each weight i, with m0, v0 and w0 for the values before the step, and t for `steps`, as in `Adam`:

        t := steps
        m_i = β1 m0_i + (1 − β1) g_i        v_i = β2 v0_i + (1 − β2) g_i²
        m̂_i = m_i/(1 − β1^t)                v̂_i = v_i/(1 − β2^t)
        w_i = w0_i − lr m̂_i/(√v̂_i + eps)

    The two bias corrections are scalars, so no arrays m̂ and v̂ are needed. The correction of v moves out of the root,
    and that of m is applied at the end, together with lr:

        √v̂_i = 1/√(1 − β2^t) √v_i
        change_i := lr/(1 − β1^t) · m_i/(1/√(1 − β2^t) √v_i + eps)        w_i = w0_i − change_i

    All intermediate results share one array, which in the end holds the change of w:

        change = np.multiply(g, 1 - beta1)
        m *= beta1
        m += change
        np.multiply(g, 1 - beta2, out=change)
        change *= g
        v *= beta2
        v += change
        np.sqrt(v, out=change)
        change *= 1 / math.sqrt(1 - beta2**steps)
        change += eps
        np.divide(m, change, out=change)
        change *= lr / (1 - beta1**steps)
        w -= change

    A step on a piece allocates one array, which stays in the processor's cache with the four others if the piece is
    small. Where v overflows, 0 v, which is NaN, is subtracted too, as in `Adam`. (There is no backward: nothing is
    differentiated.)
    """
    if not one_real_dtype(w, g, m, v):
        return plain(w, g, m, v, lr, beta1, beta2, eps, steps)
    change = np.multiply(g, 1 - beta1)
    m *= beta1
    m += change
    overflows: list[Any] = []
    with np.errstate(over="call", call=lambda *error: overflows.append(error)):
        np.multiply(g, 1 - beta2, out=change)
        change *= g
        v *= beta2
        v += change
    np.sqrt(v, out=change)
    change *= 1 / math.sqrt(1 - beta2**steps)
    change += eps
    np.divide(m, change, out=change)
    change *= lr / (1 - beta1**steps)
    w -= change
    if overflows:
        w -= 0 * v
    return None

"""Adam in compiled code: one pass over w, g, m and v."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ..optim import adam
from .numba_code import compiled
from .numpy_arrays import one_real_dtype


@adam.adam_step.twin(np.ndarray, fast=True)
def adam_step(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, lr: float, beta1: float, beta2: float, eps: float, steps: int
) -> None:
    """As `optim.adam.adam_step`, in one pass and without temporary arrays.

    For each weight i, with m0, v0 and w0 for the values before the step, and t for `steps`, as in `Adam`:

        t := steps
        m_i = β1 m0_i + (1 − β1) g_i        v_i = β2 v0_i + (1 − β2) g_i²

    The bias corrections are two scalars, rate and root:

        rate := lr/(1 − β1^t)        root := √(1 − β2^t)
        w_i = w0_i − rate m_i/(√v_i/root + eps)
        w_i = w0_i − lr (m_i/(1 − β1^t))/(√(v_i/(1 − β2^t)) + eps)

    (There is no backward: nothing is differentiated.)

        step(w, g, m, v, rate, beta1, beta2, root, eps)

    Every operation is rounded as in the reference, so the results are the same, bit for bit; 0 v_i is added to the
    change, too, which is NaN where v overflows.
    """
    if not (one_real_dtype(w, g, m, v) and all(x.ndim == 1 and x.flags.c_contiguous for x in (w, g, m, v))):
        return adam.adam_step.twins[np.ndarray](w, g, m, v, lr, beta1, beta2, eps, steps)
    rate, root = lr / (1 - beta1**steps), math.sqrt(1 - beta2**steps)
    step(w, g, m, v, rate, beta1, beta2, root, eps)
    return None


@partial(compiled, fastmath=())
def step(w: Any, g: Any, m: Any, v: Any, rate: Any, beta1: Any, beta2: Any, root: Any, eps: Any) -> None:
    number = w.dtype.type
    kept1, new1, kept2, new2 = number(beta1), number(1 - beta1), number(beta2), number(1 - beta2)
    rate_, root_, eps_, zero = number(rate), number(root), number(eps), number(0)
    for i in range(w.size):
        m[i] = kept1 * m[i] + new1 * g[i]
        v[i] = kept2 * v[i] + new2 * g[i] * g[i]
        w[i] -= rate_ * m[i] / (np.sqrt(v[i]) / root_ + eps_) + zero * v[i]

"""Checks and row statistics of the NumPy twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

REAL = {np.dtype(np.float32), np.dtype(np.float64)}


def one_real_dtype(*arrays: np.ndarray | None) -> bool:
    """Whether all are NumPy arrays of one dtype, float32 or float64; anything else is left to the references."""
    dtypes = {x.dtype if type(x) is np.ndarray else None for x in arrays}
    return len(dtypes) == 1 and dtypes <= REAL


def accepted(check: Callable, *args: Any) -> bool:
    """Whether these arguments pass the check of a reference. If not, the reference raises the error."""
    try:
        check(*args)
    except Exception:
        return False
    return True


def root_mean_square(x: np.ndarray, eps: float) -> np.ndarray:
    """√(1/C Σ_c x_c² + eps) for each row of x (..., C). If squares overflow, rows are first divided by their largest
    number.
    """
    with np.errstate(over="ignore"):
        squares = np.vecdot(x, x)
    if squares.max(initial=0) < np.inf:
        return np.sqrt(squares / x.shape[-1] + eps)
    size = abs(x).max(axis=-1).clip(1, np.finfo(x.dtype).max)
    x = x / size[..., None]
    return size * np.sqrt(np.vecdot(x, x) / x.shape[-1] + eps / size / size)


def normalised(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """x̂ (..., C) and 1/σ (..., 1) of the rows of x (..., C)."""
    C = x.shape[-1]
    share = 2.0 ** -C.bit_length()  # as in `ops.layernorm.row_mean`
    shares = np.full(C, share, x.dtype)
    mean = x @ shares
    mean /= C * share
    xhat = x - mean[..., None]
    sigma = root_mean_square(xhat, eps)
    if (np.abs(mean) > sigma).any():  # then the rounding of the mean counts
        xhat -= (xhat @ shares / (C * share))[..., None]
        sigma = root_mean_square(xhat, eps)
    rstd = 1 / sigma[..., None]
    xhat *= rstd
    return xhat, rstd

"""What the NumPy twins ask of their arguments."""

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

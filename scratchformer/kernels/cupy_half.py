"""Half precision on a GPU where there is no kernel for it: an operation runs on float32 copies, and rounds its results.

CuPy has no products of batches of bfloat16 matrices.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ..backend import Array, is_floating_type
from ..dispatch import Operation


def is_real(x: Any) -> bool:
    return isinstance(x, cupy.ndarray) and is_floating_type(x.dtype)


def widened(x: Any) -> Any:
    """x in float32, if it is an array of real numbers."""
    return x.astype(np.float32) if is_real(x) else x


def add_twin_in_half(op: Operation, op_backward: Operation) -> None:
    """Register `op` on float32 copies for arrays of real numbers that are all in one half precision."""

    def dtypes(*args: Any, **kwargs: Any) -> set[np.dtype]:
        return {x.dtype for x in (*args, *kwargs.values()) if is_real(x)}

    def fits(*args: Any, **kwargs: Any) -> bool:
        return [x.itemsize for x in dtypes(*args, **kwargs)] == [2]

    def forward(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        (dtype,) = dtypes(*args, **kwargs)
        y, cache = op.reference(*map(widened, args), **{name: widened(x) for name, x in kwargs.items()})
        return y.astype(dtype), cache

    def backward(dy: Array, cache: Any) -> tuple[Array, ...]:
        return tuple(x.astype(dy.dtype) for x in op_backward.reference(widened(dy), cache))

    op.add_twin(cupy.ndarray, fits, forward, backward, fast=True)

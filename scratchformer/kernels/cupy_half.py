"""Half precision on a GPU where there is no kernel for it: an operation runs on float32 copies, and rounds its results.

CuPy has no products of batches of bfloat16 matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array, is_floating_type
from ..dispatch import Operation


class CudaHalfCache(NamedTuple):
    cache: Any  # of the float32 forward
    dtype: np.dtype  # of the arguments


def is_real(x: Any) -> bool:
    return isinstance(x, cupy.ndarray) and is_floating_type(x.dtype)


def widened(x: Any) -> Any:
    """x in float32, if it is an array of real numbers."""
    return x.astype(np.float32) if is_real(x) else x


def in_half(op: Operation, op_backward: Operation) -> Callable:
    """A function that is `op` on float32 copies if all its arrays of real numbers are in one half precision, and
    otherwise the reference. Registers the backward for its cache.
    """

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        dtypes = {x.dtype for x in (*args, *kwargs.values()) if is_real(x)}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        if dtype.itemsize > 2:
            return op.reference(*args, **kwargs)
        y, cache = op.reference(*map(widened, args), **{name: widened(x) for name, x in kwargs.items()})
        return y.astype(dtype), CudaHalfCache(cache, dtype)

    @op_backward.twin(CudaHalfCache)
    def backward(dy: Array, cache: CudaHalfCache) -> tuple[Array, ...]:
        gradients = op_backward.reference(dy.astype(np.float32), cache.cache)
        return tuple(x.astype(cache.dtype) for x in gradients)

    return forward


relative_attention = in_half(ops.relative_attention, ops.relative_attention_backward)
ops.relative_attention.twin(cupy.ndarray, fast=True)(relative_attention)

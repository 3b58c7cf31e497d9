"""Half precision on NumPy: an operation runs on float32 copies, and its results are rounded.

NumPy has no BLAS for float16: its own loops take a hundred times as long for a matrix product. Its functions of
bfloat16 arrays are slow too, or return float32. So each array is widened, which is exact, the operation runs in
float32, and y and the gradients are rounded once. Between forward and backward, large arrays of the cache are kept in
half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..backend import is_floating_type
from ..dispatch import Operation


class HalfCache(NamedTuple):
    """The cache of the float32 forward, with its large arrays in half precision."""

    cache: Any
    dtype: np.dtype  # of the arguments


def in_half(op: Operation, op_backward: Operation) -> Callable:
    """What a NumPy twin of `op` calls for arrays that it does not handle.

    If all its arrays of real numbers are in one half precision, this is `op` on float32 copies; otherwise it is the
    reference. A loss stays in float32, as in the reference.
    """

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        dtype = half_of(args)
        if dtype is None:
            return op.reference(*args, **kwargs)
        wide = [x.astype(np.float32) if is_real(x) else x for x in args]
        y, cache = op(*wide, **kwargs)
        narrow = y.astype(dtype) if isinstance(y, np.ndarray) else y
        known = {place(w): x for w, x in zip([*wide, y], [*args, narrow], strict=True) if is_real(w)}
        large = y.size if isinstance(y, np.ndarray) else args[0].size  # y may be a loss
        return narrow, HalfCache(mapped(lambda x: narrowed(x, dtype, known, large), cache), dtype)

    @op_backward.twin(HalfCache)
    def backward(dy: Any, cache: HalfCache, **kwargs: Any) -> Any:
        wide = mapped(lambda x: x.astype(np.float32) if x.dtype == cache.dtype else x, cache.cache)
        gradients = op_backward(dy.astype(np.float32) if is_real(dy) else dy, wide, **kwargs)
        return mapped(lambda x: x.astype(cache.dtype), gradients)

    return forward


def is_real(x: Any) -> bool:
    return type(x) is np.ndarray and is_floating_type(x.dtype)


def half_of(args: tuple) -> np.dtype | None:
    """The half precision of all arrays of real numbers among `args`; None if there is no such type."""
    dtypes = {x.dtype for x in args if is_real(x)}
    return dtypes.pop() if len(dtypes) == 1 and next(iter(dtypes)).itemsize == 2 else None


def mapped(function: Callable[[np.ndarray], np.ndarray], cache: Any) -> Any:
    """`cache`, or gradients, with `function` of each array; NamedTuples keep their types."""
    if isinstance(cache, np.ndarray):
        return function(cache)
    if isinstance(cache, tuple):
        parts = [mapped(function, part) for part in cache]
        return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
    return cache


def narrowed(x: np.ndarray, dtype: np.dtype, known: dict[tuple, np.ndarray], large: int) -> np.ndarray:
    """An array of the cache as it is kept: an argument or y itself, another one rounded if it is `large`, and the
    statistics of rows as they are.
    """
    if place(x) in known:
        return known[place(x)].reshape(x.shape)
    return x.astype(dtype) if x.dtype == np.float32 and x.size >= large else x


def place(x: np.ndarray) -> tuple:
    """Which numbers x has: where they begin in memory, how many there are, and, if they are not contiguous, how they
    are laid out.
    """
    layout = () if x.flags.c_contiguous else (x.shape, x.strides)
    return x.__array_interface__["data"][0], x.size, *layout


plain = in_half(ops.linear, ops.linear_backward)


@ops.linear.twin(np.ndarray)
def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """As `ops.linear`, in half precision on float32 copies; otherwise the reference itself."""
    return plain(x, w, b)

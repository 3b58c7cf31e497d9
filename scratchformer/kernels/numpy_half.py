"""Half precision where the library has no products of it: an operation runs on float32 copies, and rounds its results.

NumPy has no BLAS for float16: its own loops take a hundred times as long for a matrix product. Its functions of
bfloat16 arrays are slow too, or return float32. CuPy has no products of batches of bfloat16 matrices. So each array is
widened, which is exact, the operation runs in float32, and y and the gradients are rounded once. Between forward and
backward, large arrays of the cache are kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array, is_floating_type, library_of
from ..dispatch import Operation


def add_twin_in_half(op: Operation, op_backward: Operation, kind: type = np.ndarray, fast: bool = False) -> None:
    """Register a twin of `op` for arguments whose arrays of real numbers are in one half precision."""

    def fits(*args: Any, **kwargs: Any) -> bool:
        return half_of([*args, *kwargs.values()]) is not None

    def forward(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        given = [*args, *kwargs.values()]
        wide = [x.astype(np.float32) if is_real(x) else x for x in given]
        y, cache = op(*wide[: len(args)], **dict(zip(kwargs, wide[len(args) :], strict=True)))
        dtype = half_of(given)
        narrow = y.astype(dtype)
        known = {place(w): x for w, x in zip([*wide, y], [*given, narrow], strict=True) if is_real(w)}
        return narrow, (mapped(lambda x: narrowed(x, dtype, known, y.size), cache), dtype)

    def backward(dy: Array, cache: Any) -> Any:
        kept, dtype = cache
        wide = mapped(lambda x: x.astype(np.float32) if x.dtype == dtype else x, kept)
        return mapped(lambda x: x.astype(dtype), op_backward(dy.astype(np.float32), wide))

    op.add_twin(kind, fits, forward, backward, fast=fast, bytes=2)


def is_real(x: Any) -> bool:
    return library_of(x) is not None and is_floating_type(x.dtype)


def half_of(args: list) -> np.dtype | None:
    """The half precision of all arrays of real numbers among `args`; None if there is no such type."""
    dtypes = {x.dtype for x in args if is_real(x)}
    return dtypes.pop() if len(dtypes) == 1 and next(iter(dtypes)).itemsize == 2 else None


def mapped(function: Callable[[Array], Array], cache: Any) -> Any:
    """`cache`, or gradients, with `function` of each array; NamedTuples keep their types."""
    if library_of(cache) is not None:
        return function(cache)
    if isinstance(cache, tuple):
        parts = [mapped(function, part) for part in cache]
        return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
    return cache


def narrowed(x: Array, dtype: np.dtype | None, known: dict[tuple, Array], large: int) -> Array:
    """An array of the cache as it is kept: an argument or y itself, another one rounded if it is `large`, and the
    statistics of rows as they are.
    """
    if place(x) in known:
        return known[place(x)].reshape(x.shape)
    return x.astype(dtype) if x.dtype == np.float32 and x.size >= large else x


def place(x: Array) -> tuple:
    """Which numbers x has: where they begin in memory, how many there are, and, if they are not contiguous, how they
    are laid out.
    """
    layout = () if x.flags.c_contiguous else (x.shape, x.strides)
    start = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return start, x.size, *layout


for op, op_backward in (
    (ops.attention, ops.attention_backward),
    (ops.linear, ops.linear_backward),
    (ops.relative_attention, ops.relative_attention_backward),
):
    add_twin_in_half(op, op_backward)

"""Half precision on NumPy: an operation runs on float32 copies, and its results are rounded.

NumPy has no BLAS for float16: its own loops take a hundred times as long for a matrix product. Its functions of
bfloat16 arrays are slow too, or return float32. So each array is widened, which is exact, the operation runs in
float32, and y and the gradients are rounded once. A loss stays in float32, as in the reference. Between forward and
backward, large arrays of the cache are kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..backend import is_floating_type
from ..dispatch import Operation, Twin


def twin_in_half(op: Operation, op_backward: Operation) -> Twin:
    """The twin of `op` for arguments whose arrays of real numbers are in one half precision."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = [*args, *kwargs.values()]
        wide = [x.astype(np.float32) if is_real(x) else x for x in given]
        y, cache = op(*wide[: len(args)], **dict(zip(kwargs, wide[len(args) :], strict=True)))
        dtype = half_of(given)
        narrow = y.astype(dtype) if isinstance(y, np.ndarray) else y
        known = {place(w): x for w, x in zip([*wide, y], [*given, narrow], strict=True) if is_real(w)}
        large = y.size if isinstance(y, np.ndarray) else given[0].size  # y may be a loss
        return narrow, (mapped(lambda x: narrowed(x, dtype, known, large), cache), dtype)

    def backward(dy: Any, cache: Any, **kwargs: Any) -> Any:
        kept, dtype = cache
        wide = mapped(lambda x: x.astype(np.float32) if x.dtype == dtype else x, kept)
        gradients = op_backward(dy.astype(np.float32) if is_real(dy) else dy, wide, **kwargs)
        return mapped(lambda x: x.astype(dtype), gradients)

    return Twin(op.__name__, lambda *args, **kwargs: half_of([*args, *kwargs.values()]) is not None, forward, backward)


def is_real(x: Any) -> bool:
    return type(x) is np.ndarray and is_floating_type(x.dtype)


def half_of(args: list) -> np.dtype | None:
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


def narrowed(x: np.ndarray, dtype: np.dtype | None, known: dict[tuple, np.ndarray], large: int) -> np.ndarray:
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


for op, op_backward in (
    (ops.attention, ops.attention_backward),
    (ops.linear, ops.linear_backward),
    (ops.relative_attention, ops.relative_attention_backward),
):
    op.add_twin(np.ndarray, *twin_in_half(op, op_backward)[1:4], bytes=2)

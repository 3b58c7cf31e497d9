"""The affine map in compiled code: a product, with the bias and the rounding in one pass after it, without the
interpreter lock from beginning to end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.linear import LinearCache, check_linear
from .mkl_products import product, products
from .numba_code import BFLOAT16, as_bits, compiled
from .numba_math import DTYPES, narrow, read, wide_empty, wide_scratch

BLOCK = 256  # rows: their products stay in cache until they are rounded
NO_BIAS: dict[Any, np.ndarray] = {}


class FastLinearCache(NamedTuple):
    x: np.ndarray  # (..., I)
    w: np.ndarray  # (I, O)
    has_bias: bool


def takes(*arrays: np.ndarray | None) -> bool:
    """Whether all are NumPy arrays of one of the types that the loops know, and none is empty."""
    first = arrays[0]
    for x in arrays:
        if type(x) is not np.ndarray or x.dtype != first.dtype or not x.size:  # type: ignore[union-attr]
            return False
    return first.dtype in DTYPES or first.dtype.name == BFLOAT16  # type: ignore[union-attr]


def rows(x: np.ndarray) -> np.ndarray:
    """x as (N, C), contiguous; bfloat16 as bits."""
    return np.ascontiguousarray(as_bits(x).reshape(-1, x.shape[-1]))


def matrix(w: np.ndarray) -> tuple[np.ndarray, bool]:
    """A contiguous array with the numbers of w, which is transposed if the second result is true."""
    w = as_bits(w)
    return (w.T, True) if w.flags.f_contiguous and not w.flags.c_contiguous else (np.ascontiguousarray(w), False)


def bias_of(b: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    """b as compiled code takes it, with no elements if there is no b."""
    return np.empty(0, x.dtype) if b is None else np.ascontiguousarray(as_bits(b))


@ops.linear.twin(np.ndarray, fast=True)
def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """As `ops.linear`, with each result rounded once.

    Forward, with all leading axes folded into n:

        y_no = Σ_i x_ni w_io + b_o

    Backward. As derived in `linear`:

        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no        db_o = Σ_n dy_no

    A product c = a b is a call of BLAS, in which either factor may be transposed. So w is not copied if it is a
    transposed view, as the table of tied embeddings is. Products and sums of bfloat16 arrays are float32. y and dx are
    rounded to bfloat16 in the pass that adds b; dw and db, which are added up, are not rounded.

        product(library, dy, False, w, not across, wide)
        product(library, x, True, dy, False, dw)

    The cache is that of the reference.
    """
    library = products()
    if library is None or not (takes(x, w) if b is None else takes(x, w, b)):
        return ops.linear.twins.get(np.ndarray, ops.linear.reference)(x, w, b)
    check_linear(x, w, b)
    flat, (table, across) = rows(x), matrix(w)
    y = np.empty((len(flat), w.shape[1]), flat.dtype)
    affine(library, flat, table, across, bias_of(b, flat), -np.inf, y)
    return y.view(x.dtype).reshape(*x.shape[:-1], w.shape[1]), FastLinearCache(x, w, b is not None)


@ops.linear_backward.twin(FastLinearCache)
def linear_backward(dy: np.ndarray, cache: FastLinearCache) -> tuple[np.ndarray, ...]:
    """(dx, dw, db), or (dx, dw) without bias, as `ops.linear_backward`; in bfloat16 dw and db are float32."""
    x, w, has_bias = cache
    expect_like("dy", dy, (*x.shape[:-1], w.shape[1]))
    if dy.dtype != x.dtype:
        return ops.linear_backward.reference(dy, LinearCache(*cache))
    flat, (table, across) = rows(x), matrix(w)
    dx = np.empty_like(flat)
    dw, db = affine_backward(products(), rows(dy), flat, table, across, has_bias, dx)
    dx = dx.view(x.dtype).reshape(x.shape)
    return (dx, dw, db) if has_bias else (dx, dw)


@compiled
def affine(library: Any, x: Any, w: Any, across: Any, b: Any, least: Any, y: Any) -> None:
    """y = max(x w + b, least). across: w is transposed in memory. b has no elements if there is no bias; then `least`
    has no effect.
    """
    for start in range(0, y.shape[0], BLOCK):
        part = y[start : start + BLOCK]
        h = wide_scratch(part)
        product(library, x[start : start + BLOCK], False, w, across, h)
        if b.size:
            for n in range(part.shape[0]):
                for o in range(part.shape[1]):
                    part[n, o] = narrow(max(h[n, o] + read(b[o]), h.dtype.type(least)), part)  # NaN stays
        else:
            round_into(h, part)


@compiled
def round_into(x: Any, y: Any) -> None:
    """y = x, unless both are one array."""
    if x.ctypes.data != y.ctypes.data:
        for n in range(y.shape[0]):
            for o in range(y.shape[1]):
                y[n, o] = narrow(x[n, o], y)


@compiled
def affine_backward(library: Any, dy: Any, x: Any, w: Any, across: Any, has_bias: Any, dx: Any) -> Any:
    """Write dx, and return dw and db."""
    for start in range(0, dx.shape[0], BLOCK):
        part = dx[start : start + BLOCK]
        h = wide_scratch(part)
        product(library, dy[start : start + BLOCK], False, w, not across, h)
        round_into(h, part)
    dw = wide_empty((x.shape[1], dy.shape[1]), dy)
    product(library, x, True, dy, False, dw)
    db = wide_empty(dy.shape[1], dy)
    if has_bias:
        db[:] = 0
        for n in range(dy.shape[0]):
            for o in range(dy.shape[1]):
                db[o] += read(dy[n, o])
    return dw, db

"""The affine map in compiled code: a product, with the bias and the rounding in one pass after it, without the
interpreter lock from beginning to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from .. import ops
from . import numba_tiles
from .mkl_products import product, products
from .numba_code import as_bits, compiled
from .numba_math import BITS, alike, narrow, read, rows, wide_buffer, wide_empty

BLOCK = 256, 512  # rows and columns: their float32 products stay in cache until they are rounded


def fits(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> bool:
    return (alike(x, w) if b is None else alike(x, w, b)) and are_affine(x, w, b) and products() is not None


def are_affine(x: np.ndarray, w: np.ndarray, b: np.ndarray | None) -> bool:
    """Whether the shapes are those of x w + b."""
    return w.ndim == 2 and x.shape[-1:] == w.shape[:1] and w.size > 0 and (b is None or b.shape == w.shape[1:])


def matrix(w: np.ndarray) -> tuple[np.ndarray, bool]:
    """A contiguous array with the numbers of w, which is transposed if the second result is true."""
    w = as_bits(w)
    if w.flags.c_contiguous:
        return w, False
    return (w.T, True) if w.flags.f_contiguous else (np.ascontiguousarray(w), False)


def as_row(b: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """b as compiled code takes it, with no elements if there is no b."""
    return like[0, :0] if b is None else rows(b)[0]


def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """As `ops.linear`, with each result rounded once.

    Forward, with all leading axes folded into n:

        y_no = Σ_i x_ni w_io + b_o

    Backward. As derived in `linear`:

        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no        db_o = Σ_n dy_no

    A product c = a b is one call (`mkl_products`), in which either factor may be transposed. So w is not copied if it
    is a transposed view, as the table of tied embeddings is. Products and sums of bfloat16 arrays are float32. y and dx
    are rounded to bfloat16 in the pass that adds b; dw and db, which are added up, are not rounded. On processors with
    AMX, `numba_tiles` does all this for bfloat16, if I and O are multiples of 32 and the rows are not too few.

        dw, db = gradients(rows(dy), flat, table, across, has_bias, dx)

    One call of compiled code computes all three, without the interpreter lock.
    """
    flat, (table, across) = rows(x), matrix(w)
    y = np.empty((len(flat), w.shape[1]), flat.dtype)
    affine_map(flat, table, across, as_row(b, flat), y)
    return y.view(x.dtype).reshape(*x.shape[:-1], w.shape[1]), (x, w, b is not None)


def linear_backward(dy: np.ndarray, cache: tuple[np.ndarray, np.ndarray, bool]) -> tuple[np.ndarray, ...]:
    """(dx, dw, db), or (dx, dw) without bias, as `ops.linear_backward`; in bfloat16 dw and db are float32."""
    x, w, has_bias = cache
    flat, (table, across) = rows(x), matrix(w)
    dx = np.empty_like(flat)
    dw, db = gradients(rows(dy), flat, table, across, has_bias, dx)
    dx = dx.view(x.dtype).reshape(x.shape)
    return (dx, dw, db) if has_bias else (dx, dw)


ops.linear.add_twin(np.ndarray, fits, linear, linear_backward, fast=True)


def dense_fits(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: Any = "relu") -> bool:
    return activation == "relu" and b is not None and fits(x, w, b)


def dense(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: str = "relu") -> tuple[np.ndarray, tuple]:
    """As `ops.dense` with ReLU, which is applied to h = x w + b in place.

    Forward, with all leading axes folded into n:

        h_no = Σ_i x_ni w_io + b_o        y_no = max(h_no, 0)

    Backward. y is positive exactly where h is:

        dh_no = dy_no where y_no > 0, 0 elsewhere
        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no        db_o = Σ_n dh_no

    The last line is the backward of the affine map:

        return linear_backward(dh, linear_cache)

    The cache keeps y, which the next layer keeps anyway, in place of a comparison. So a caller must not change it
    before backward.
    """
    del activation
    y, cache = linear(x, w, b)
    cut_off(rows(y))
    return y, (cache, y)


def dense_backward(dy: np.ndarray, cache: tuple) -> tuple[np.ndarray, ...]:
    """(dx, dw, db), as `ops.dense_backward`."""
    linear_cache, y = cache
    dh = np.empty_like(y)
    pass_positive(rows(dy), rows(y), rows(dh))
    return linear_backward(dh, linear_cache)


ops.dense.add_twin(np.ndarray, dense_fits, dense, dense_backward, fast=True)


@compiled
def cut_off(y: Any) -> None:
    """y = max(y, 0); NaN stays."""
    for n in range(y.shape[0]):
        for o in range(y.shape[1]):
            y[n, o] = y.dtype.type(0) if read(y[n, o]) <= 0 else y[n, o]


@compiled
def pass_positive(dy: Any, y: Any, dh: Any) -> None:
    """dh = dy [y > 0]"""
    for n in range(y.shape[0]):
        for o in range(y.shape[1]):
            dh[n, o] = dy[n, o] if read(y[n, o]) > 0 else y.dtype.type(0)


def affine_map(x: np.ndarray, w: np.ndarray, across: bool, b: np.ndarray, y: np.ndarray) -> None:
    """y = x w + b as `affine` computes it, by tiles where that pays."""
    if numba_tiles.pays(x, y):
        numba_tiles.multiply(x, w, across, b, y)
    else:
        affine(products(), x, w, across, b, y)


def gradients(dy: np.ndarray, x: np.ndarray, w: np.ndarray, across: bool, has_bias: bool, dx: np.ndarray) -> Any:
    """Write dx, and return dw and db."""
    if not numba_tiles.pays(x, dy):
        return affine_backward(products(), dy, x, w, across, has_bias, dx)
    numba_tiles.multiply(dy, w, not across, dy[0, :0], dx)
    dw, db = np.empty((x.shape[1], dy.shape[1]), np.float32), np.empty(dy.shape[1], np.float32)
    numba_tiles.multiply_transposed(x, dy, dw, db if has_bias else db[:0])
    return dw, db


@compiled
def affine(library: Any, x: Any, w: Any, across: Any, b: Any, y: Any) -> None:
    """y = x w + b. across: w is transposed in memory. b has no elements if there is no bias."""
    (N, O), (height, width) = y.shape, block(y)
    buffer = wide_buffer(y, height * width)
    for n0 in range(0, N, height):
        for o0 in range(0, O, width):
            shape = min(height, N - n0), min(width, O - o0)
            h = buffer[: shape[0] * shape[1]].reshape(shape)
            product(library, x[n0 : n0 + shape[0]], False, w, across, o0, h)
            columns_of_b = b[o0 : o0 + shape[1]]
            for n in range(shape[0]):
                finish_row(h[n], columns_of_b, y[n0 + n, o0 : o0 + shape[1]])


@compiled
def finish_row(h: Any, b: Any, y: Any) -> None:
    """y = h + b, rounded."""
    if b.size:
        for o in range(y.size):
            y[o] = narrow(h[o] + read(b[o]), y)
    elif h.ctypes.data != y.ctypes.data:
        for o in range(y.size):
            y[o] = narrow(h[o], y)


@compiled
def affine_backward(library: Any, dy: Any, x: Any, w: Any, across: Any, has_bias: Any, dx: Any) -> Any:
    """As `gradients`, by a library."""
    affine(library, dy, w, not across, dy[0, :0], dx)
    dw = wide_empty((x.shape[1], dy.shape[1]), dy)
    db = wide_empty(dy.shape[1], dy)
    product(library, x, True, dy, False, 0, dw)
    if has_bias:
        sums = np.zeros(db.size)  # float64: in float32 their rounding error would grow with the root of the rows
        for n in range(dy.shape[0]):
            for o in range(dy.shape[1]):
                sums[o] += read(dy[n, o])
        db[:] = sums
    return dw, db


def block(y: Any) -> tuple[int, int]:
    """How many rows and columns of y are computed at once: all, unless they are rounded afterwards."""
    raise TypeError("block: for compiled code only")


@overload(block, strict=False)
def _block(y: Any) -> Any:
    return (lambda y: BLOCK) if y.dtype == BITS else (lambda y: y.shape)

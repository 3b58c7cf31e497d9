"""Affine maps on a GPU, with or without an activation: products of cuBLASLt, which adds the bias itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from .. import ops
from ..backend import Array
from ..ops.activations import ACTIVATIONS, Activation
from .cupy_code import alike, contiguous, kernel, launch_each, real, vector
from .cupy_products import aligned, attempt, available, padded, product, readable

SUMS = 64  # at most this many partial sums for a column


def fits(x: Array, w: Array, b: Array | None = None) -> bool:
    return (
        (alike(x, w) if b is None else alike(x, w, b) and b.shape == w.shape[1:])
        and w.ndim == 2
        and x.shape[-1:] == w.shape[:1]
        and x.size > 0
        and w.size > 0
        and available()
    )


def rows(x: Array) -> Array:
    """x (..., I) as a matrix (N, I)."""
    return readable(x.reshape(-1, x.shape[-1]))


def affine(x: Array, w: Array, b: Array | None, out: Array, activation: str = "") -> bool:
    """out = the rows of x w + b, or ReLU of them. False if cuBLASLt has no such product; then without ReLU."""
    flat = rows(x)
    if attempt(flat, readable(w), out, bias=aligned(b), activation=activation):
        return True
    out[...] = ops.linear.reference(flat, w, b)[0]
    return False


def linear(x: Array, w: Array, b: Array | None = None) -> tuple[Array, tuple]:
    """As `ops.linear`, by cuBLASLt, which adds b to a tile of x w before it is rounded and written.

    Products of half-precision factors are summed in float32. y and dx are rounded to the type of x; dw and db, which
    are added up, are not rounded. w may be a transposed view, as the table of tied embeddings is; dw then lies in
    memory as w does. Rows of y are padded in memory to a multiple of 16 bytes, since products of unaligned rows are
    slow.
    """
    y = padded((x.size // x.shape[-1], w.shape[1]), x.dtype)
    affine(x, w, b, y)
    return y.reshape(*x.shape[:-1], w.shape[1]), (x, w, b is not None)


def linear_backward(
    dy: Array, cache: tuple, into: Sequence[Array | None] = (None, None), plus: Array | None = None
) -> tuple[Array, ...]:
    """(dx, dw, db), or (dx, dw) without bias, as `ops.linear_backward`; in half precision dw and db are float32.

    into, plus: see `dispatch.Operation.add_twin`. They are added to the products and sums before these are rounded.
    """
    x, w, has_bias = cache
    flat, dx = (-1, x.shape[-1]), cupy.empty(x.shape, x.dtype)
    dy, w = rows(dy), readable(w)
    product(dy, w.T, dx.reshape(flat), None if plus is None else readable(plus.reshape(flat)))
    dw = gradient(rows(x), dy, w, into[0])
    if not has_bias:
        return dx, dw
    db = into[1]
    return dx, dw, column_sums(dy, db) if can_add(db, dy.dtype) else added(column_sums(dy), db)


def can_add(into: Array | None, dtype: np.dtype) -> bool:
    """Whether kernels for arrays of this type can add a gradient to `into`."""
    if into is None:
        return False
    return into.dtype == real(dtype) and (into.flags.c_contiguous or into.T.flags.c_contiguous)


def added(gradient: Array, into: Array | None) -> Array:
    """The gradient, or `into` after it was added."""
    if into is None:
        return gradient
    into += gradient
    return into


def gradient(x: Array, dy: Array, w: Array, into: Any) -> Array:
    """dw = xᵀ dy, in memory as w or `into` is: if that is transposed, dwᵀ = dyᵀ x is computed."""
    dw, transposed = into, not w.flags.c_contiguous and w.T.flags.c_contiguous
    if not can_add(into, w.dtype) or into.data.ptr % 16:  # products of unaligned matrices are slow
        dw = cupy.empty(w.shape[::-1], real(w.dtype)).T if transposed else cupy.empty(w.shape, real(w.dtype))
    x, dy, out = (x.T, dy, dw) if dw.flags.c_contiguous else (dy.T, x, dw.T)
    product(x, dy, out, out if dw is into else None)
    return dw if dw is into else added(dw, into)


def column_sums(x: Array, *into: Array) -> Array:
    """Σ_n x_nc of x (N, C), in float32 for half precision.

    into: an array (C,) to which they are added, or two (C/2,), for the two halves of the columns.
    """
    x = x if x.strides[1] == x.itemsize else contiguous(x)
    (N, C), dtype = x.shape, real(x.dtype)
    V = vector(x.dtype, C * x.itemsize, x.strides[0], x.data.ptr)
    across = -(-C // (32 * V))
    down = max(1, min(SUMS, 528 // across, N // 32))
    to = (cupy.empty((down, C), dtype),) if down > 1 or not into else into
    apart = (to[-1].data.ptr - to[0].data.ptr) // dtype.itemsize
    run = kernel("column_sums", "column_sums", x.dtype.name, V=V)
    sizes = np.int64(apart), np.int32(C // len(to)), np.int32(N), np.int32(C), np.int32(to is into)
    run((across, down), (32, 8), (x, np.int64(x.strides[0] // x.itemsize), to[0], *sizes))
    if down > 1:
        return column_sums(to[0], *into)
    return to[0] if into else to[0][0]


def dense_fits(x: Array, w: Array, b: Array, activation: Activation = "relu") -> bool:
    return isinstance(activation, str) and activation in ACTIVATIONS and b is not None and fits(x, w, b)


def dense(x: Array, w: Array, b: Array, activation: str = "relu") -> tuple[Array, tuple]:
    """As `ops.dense`. cuBLASLt applies ReLU itself; the others are a second kernel. (Its GELU is not precise enough.)

    For ReLU the cache keeps y, which is positive exactly where x w + b is. So a caller must not change it before
    backward.
    """
    y = cupy.empty((x.size // x.shape[-1], w.shape[1]), x.dtype)
    if activation == "relu":
        if not affine(x, w, b, y, "relu"):
            cupy.maximum(y, 0, out=y)
        kept = y
    else:
        affine(x, w, b, y)
        y, kept = ACTIVATIONS[activation][0](y)
    return y.reshape(*x.shape[:-1], w.shape[1]), (x, w, kept, activation)


def dense_backward(dy: Array, cache: tuple, **options: Any) -> tuple[Array, ...]:
    """(dx, dw, db), as `ops.dense_backward`. options: see `linear_backward`."""
    x, w, kept, activation = cache
    dy = contiguous(dy).reshape(-1, w.shape[1])
    if activation == "relu":
        dh = cupy.empty_like(kept)
        launch_each("elementwise", "relu_backward", (dy, kept, dh))
    else:
        dh = ACTIVATIONS[activation][1](dy, kept)
    return linear_backward(dh, (x, w, True), **options)


ops.linear.add_twin(cupy.ndarray, fits, linear, linear_backward, fast=True, adds=True)
ops.dense.add_twin(cupy.ndarray, dense_fits, dense, dense_backward, fast=True, adds=True)

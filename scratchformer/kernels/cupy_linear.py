"""Affine maps on a GPU, with or without an activation: products of cuBLASLt, which adds the bias itself."""

from __future__ import annotations

import cupy
import numpy as np

from .. import ops
from ..backend import Array
from ..ops.activations import ACTIVATIONS, Activation
from .cupy_code import alike, contiguous, kernel, launch_each, real, vector
from .cupy_products import aligned, attempt, available, padded_empty, product, readable

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
    y = padded_empty(x.size // x.shape[-1], w.shape[1], x.dtype)
    affine(x, w, b, y)
    return y.reshape(*x.shape[:-1], w.shape[1]), (x, w, b is not None)


def linear_backward(dy: Array, cache: tuple) -> tuple[Array, ...]:
    """(dx, dw, db), or (dx, dw) without bias, as `ops.linear_backward`; in half precision dw and db are float32."""
    x, w, has_bias = cache
    dy, w, dx = rows(dy), readable(w), cupy.empty(x.shape, x.dtype)
    product(dy, w.T, dx.reshape(-1, x.shape[-1]))
    dw = gradient(rows(x), dy, w)
    return (dx, dw, column_sums(dy)) if has_bias else (dx, dw)


def gradient(x: Array, dy: Array, w: Array) -> Array:
    """dw = xᵀ dy, in memory as w is: if that is transposed, dwᵀ = dyᵀ x is computed."""
    dtype = real(w.dtype)
    if w.flags.c_contiguous or not w.T.flags.c_contiguous:
        return product(x.T, dy, cupy.empty(w.shape, dtype))
    return product(dy.T, x, cupy.empty(w.shape[::-1], dtype)).T


def column_sums(x: Array) -> Array:
    """Σ_n x_nc of x (N, C), in float32 for half precision."""
    x = x if x.strides[1] == x.itemsize else contiguous(x)
    N, C = x.shape
    V = vector(x.dtype, C * x.itemsize, x.strides[0], x.data.ptr)
    across = -(-C // (32 * V))
    down = max(1, min(SUMS, 528 // across, N // 32))
    y = cupy.empty((down, C), real(x.dtype))
    run = kernel("column_sums", "column_sums", x.dtype.name, V=V)
    run((across, down), (32, 8), (x, np.int64(x.strides[0] // x.itemsize), y, np.int32(N), np.int32(C)))
    return column_sums(y) if down > 1 else y[0]


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


def dense_backward(dy: Array, cache: tuple) -> tuple[Array, ...]:
    """(dx, dw, db), as `ops.dense_backward`; in half precision dw and db are float32."""
    x, w, kept, activation = cache
    dy = contiguous(dy).reshape(-1, w.shape[1])
    if activation == "relu":
        dh = cupy.empty_like(kept)
        launch_each("elementwise", "relu_backward", (dy, kept, dh))
    else:
        dh = ACTIVATIONS[activation][1](dy, kept)
    return linear_backward(dh, (x, w, True))


ops.linear.add_twin(cupy.ndarray, fits, linear, linear_backward, fast=True)
ops.dense.add_twin(cupy.ndarray, dense_fits, dense, dense_backward, fast=True)

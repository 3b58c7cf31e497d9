"""Affine maps on a GPU, with or without an activation: products of cuBLASLt, which adds the bias itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..ops.activations import Activation
from ..ops.checks import expect_like
from ..ops.linear import LinearCache
from .cupy_code import alike, contiguous, kernel, launch_each, real, vector
from .cupy_products import aligned, attempt, available, padded_empty, product, readable

SUMS = 64  # at most this many partial sums for a column
KINDS = {"relu": "RELU", "silu": "SILU", "gelu": "GELU", "gelu_tanh": "GELU_TANH"}  # names in elementwise.cu


class CudaLinearCache(NamedTuple):
    x: Array  # (..., I)
    w: Array  # (I, O)
    has_bias: bool


class CudaDenseCache(NamedTuple):
    """What backward needs. For ReLU this includes the returned y, so a caller must not change y before backward."""

    x: Array  # (..., I)
    w: Array  # (I, O)
    kept: Array  # (N, O): y for ReLU, h = x w + b for the others
    activation: str


def fits(x: Array, w: Array, b: Array | None) -> bool:
    """Whether a product of cuBLASLt can compute x w + b. False for invalid arguments, for which the reference then
    raises the error.
    """
    return (
        available()
        and (alike(x, w) if b is None else alike(x, w, b) and b.shape == w.shape[1:])
        and w.ndim == 2
        and x.shape[-1:] == w.shape[:1]
        and x.size > 0
        and w.size > 0
    )


def rows(x: Array) -> Array:
    """x (..., I) as a matrix (N, I)."""
    return readable(x.reshape(-1, x.shape[-1]))


@ops.linear.twin(cupy.ndarray, fast=True)
def linear(x: Array, w: Array, b: Array | None = None) -> tuple[Array, Any]:
    """As `ops.linear`, by cuBLASLt, which adds b to a tile of x w before it is rounded and written.

    Forward, with all leading axes folded into n:

        y_no = Σ_i x_ni w_io + b_o

    Backward. As derived in `linear`:

        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no        db_o = Σ_n dy_no

    Products of half-precision factors are summed in float32. y and dx are rounded to the type of x; dw and db, which
    are added up, are not rounded.

        product(dy, w.T, dx.reshape(-1, x.shape[-1]))
        dw = gradient(rows(x), dy, w)
        db = column_sums(dy) if has_bias else None

    w may be a transposed view, as the table of tied embeddings is; dw then lies in memory as w does. Rows of y
    are padded in memory to a multiple of 16 bytes, since products of unaligned rows are slow. The cache keeps what the
    reference's does.
    """
    if not fits(x, w, b):
        return ops.linear.reference(x, w, b)
    flat = rows(x)
    y = padded_empty(len(flat), w.shape[1], x.dtype)
    if not attempt(flat, readable(w), y, bias=aligned(b)):
        return ops.linear.reference(x, w, b)
    return y.reshape(*x.shape[:-1], w.shape[1]), CudaLinearCache(x, w, b is not None)


@ops.linear_backward.twin(CudaLinearCache)
def linear_backward(dy: Array, cache: CudaLinearCache) -> tuple[Array, ...]:
    """(dx, dw, db), or (dx, dw) without bias, as `ops.linear_backward`; in half precision dw and db are float32."""
    x, w, has_bias = cache
    if not (alike(x, dy) and dy.shape == (*x.shape[:-1], w.shape[1])):
        return ops.linear_backward.reference(dy, LinearCache(*cache))
    dx, dw, db = affine_backward(rows(dy), x, w, has_bias)
    return (dx, dw, db) if has_bias else (dx, dw)


def affine_backward(dy: Array, x: Array, w: Array, has_bias: bool) -> tuple[Array, Array, Array | None]:
    """The gradients of x w + b, given that of its rows (N, O)."""
    dx = cupy.empty(x.shape, x.dtype)
    w = readable(w)
    product(dy, w.T, dx.reshape(-1, x.shape[-1]))
    dw = gradient(rows(x), dy, w)
    db = column_sums(dy) if has_bias else None
    return dx, dw, db


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


@ops.dense.twin(cupy.ndarray, fast=True)
def dense(x: Array, w: Array, b: Array, activation: Activation = "relu") -> tuple[Array, Any]:
    """As `ops.dense`. cuBLASLt applies ReLU itself; the others are a second kernel. (Its GELU is not precise enough.)

    Forward, with all leading axes folded into n. Each activation is h Φ(h):

        h_no = Σ_i x_ni w_io + b_o
        Φ_no = [h_no > 0] where activation = relu,
            1/(1 + exp(−h_no)) where activation = silu,
            ½ (1 + erf(h_no/√2)) where activation = gelu,
            ½ (1 + tanh(√(2/π) (h_no + 0.044715 h_no³))) elsewhere
        y_no = h_no Φ_no

    Backward. The slope of y is a function of h; for ReLU y is enough, since it is positive exactly where h is:

        slope_no := ∂y_no/∂h_no
        [h_no > 0] = [y_no > 0]        kept_no = y_no where activation = relu, h_no elsewhere
        dh_no = dy_no slope_no
        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no        db_o = Σ_n dh_no

    A kernel writes dh, and the rest is that of `linear`:

        launch_each("elementwise", "activation_backward", (dy, kept, dh), KIND=KINDS[activation])
        dx, dw, db = affine_backward(dh, x, w, True)

    The cache keeps x, w, and one array of the size of y.
    """
    if not (isinstance(activation, str) and activation in KINDS and b is not None and fits(x, w, b)):
        return ops.dense.reference(x, w, b, activation)
    flat, O = rows(x), w.shape[1]
    y = cupy.empty((len(flat), O), x.dtype)
    kept = y if activation == "relu" else cupy.empty_like(y)
    fused = "relu" if activation == "relu" else ""
    if not attempt(flat, readable(w), kept, bias=aligned(b), activation=fused):
        return ops.dense.reference(x, w, b, activation)
    if not fused:
        launch_each("elementwise", "activation", (kept, y), KIND=KINDS[activation])
    return y.reshape(*x.shape[:-1], O), CudaDenseCache(x, w, kept, activation)


@ops.dense_backward.twin(CudaDenseCache)
def dense_backward(dy: Array, cache: CudaDenseCache) -> tuple[Array, Array, Array]:
    """(dx, dw, db), as `ops.dense_backward`; in half precision dw and db are float32."""
    x, w, kept, activation = cache
    if not (alike(kept, dy) and dy.shape == (*x.shape[:-1], w.shape[1])):
        expect_like("dy", dy, (*x.shape[:-1], w.shape[1]))
        array_module(dy, x)
        dy = dy.astype(kept.dtype)
    dy, dh = contiguous(dy), cupy.empty_like(kept)
    launch_each("elementwise", "activation_backward", (dy, kept, dh), KIND=KINDS[activation])
    dx, dw, db = affine_backward(dh, x, w, True)
    return dx, dw, db

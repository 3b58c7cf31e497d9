"""Layer norm on a GPU: one kernel for each direction, which reads each row from memory once."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..ops.checks import expect_like
from ..ops.layernorm import check_layernorm
from .cupy_code import alike, contiguous, kernel, real, vector
from .cupy_linear import column_sums

WIDEST = 16_384  # bytes of a row in the type of its sums
BLOCKS = 528  # in the backward, each with sums of its own for dγ and dβ: 4 for each of the 132 processors of an H200


class CudaLayerNormCache(NamedTuple):
    x: Array  # (..., C)
    mean: Array  # (N,), μ
    rstd: Array  # (N,), 1/σ
    gamma: Array  # (C,)


def layout(*arrays: Array) -> dict[str, int]:
    """How the rows (C,) of arrays are divided among threads: see cuda/layernorm.cu."""
    x, C = arrays[0], arrays[0].shape[-1]
    V = vector(x.dtype, C * x.itemsize, *(a.data.ptr for a in arrays))
    while V > 1 and C // V < 32:
        V //= 2
    one_warp = -(-C // 32) <= 32  # a row in a single warp, with at most 32 numbers in a thread
    PER = -(-C // (32 * V)) if one_warp else max(1, 16 // V)
    THREADS = 32 if one_warp else 32 * -(-C // (32 * V * PER))
    return dict(C=C, V=V, PER=PER, THREADS=THREADS, ROWS=4 if one_warp else 1)


@ops.layernorm.twin(cupy.ndarray, fast=True)
def layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> tuple[Array, Any]:
    """As `ops.layernorm`, row by row, with x̂ computed again in the backward.

    Forward, with all leading axes folded into n:

        μ_n = 1/C Σ_c x_nc        rstd_n = 1/√(1/C Σ_c (x_nc − μ_n)² + eps)
        x̂_nc = (x_nc − μ_n) rstd_n        y_nc = γ_c x̂_nc + β_c

    Backward. As derived in `layernorm`:

        dγ_c = Σ_n dy_nc x̂_nc        dβ_c = Σ_n dy_nc        g_nc := ∂L/∂x̂_nc = dy_nc γ_c
        dx_nc = rstd_n (g_nc − mean_c'(g_nc') − x̂_nc mean_c'(g_nc' x̂_nc'))

    The threads of a block keep a row in their registers. In the backward a block goes through many rows and keeps its
    sums of dγ and dβ; the sums of all blocks are then added.

        sums = column_sums(of_blocks)
        dgamma, dbeta = sums[:C], sums[C:]

    In place of x̂ the cache keeps x itself, and μ and 1/σ of each row. Sums are float32 for half precision, and so are
    dγ and dβ, which are added up.
    """
    check_layernorm(x, gamma, beta, eps)
    C = x.shape[-1]
    if not alike(x, gamma, beta) or not x.size or C * real(x.dtype).itemsize > WIDEST:
        return ops.layernorm.reference(x, gamma, beta, eps)
    flat = contiguous(x).reshape(-1, C)
    N, y, sizes, wide = len(flat), cupy.empty(x.shape, x.dtype), layout(flat), real(x.dtype)
    mean, rstd = cupy.empty(N, wide), cupy.empty(N, wide)
    gamma, beta = contiguous(gamma), contiguous(beta)
    run = kernel("layernorm", "layernorm", x.dtype.name, **sizes)
    blocks = -(-N // sizes["ROWS"])
    run((blocks,), (sizes["THREADS"], sizes["ROWS"]), (flat, gamma, beta, wide.type(eps), y, mean, rstd, np.int32(N)))
    return y, CudaLayerNormCache(flat.reshape(x.shape), mean, rstd, gamma)


@ops.layernorm_backward.twin(CudaLayerNormCache)
def layernorm_backward(dy: Array, cache: CudaLayerNormCache) -> tuple[Array, Array, Array]:
    """(dx, dgamma, dbeta), as `ops.layernorm_backward`; in half precision dgamma and dbeta are float32."""
    x, mean, rstd, gamma = cache
    if not (alike(x, dy) and dy.shape == x.shape):
        expect_like("dy", dy, x.shape)
        array_module(dy, x)
        dy = dy.astype(x.dtype)
    dy, dx, C = contiguous(dy), cupy.empty(x.shape, x.dtype), x.shape[-1]
    sizes = layout(x, dy)
    N, ROWS = x.size // C, sizes["ROWS"]
    blocks = min(-(-N // ROWS), BLOCKS)
    of_blocks = cupy.empty((blocks, 2 * C), mean.dtype)
    run = kernel("layernorm", "layernorm_backward", x.dtype.name, **sizes)
    run((blocks,), (sizes["THREADS"], ROWS), (dy, x, gamma, mean, rstd, dx, of_blocks, np.int32(N)))
    sums = column_sums(of_blocks)
    dgamma, dbeta = sums[:C], sums[C:]
    return dx, dgamma, dbeta

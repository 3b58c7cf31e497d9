"""RMS norm in compiled code: one pass over each row, as in `numba_layernorm`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from .numba_code import as_bits, compiled, plus
from .numba_math import alike, narrow, numbers_like, read, rows, wide_empty
from .numba_rows import inverse_root


class FastRMSNormCache(NamedTuple):
    x: np.ndarray  # (..., C)
    rrms: np.ndarray  # (N,)
    gamma: np.ndarray  # (C,)


@ops.rmsnorm.twin(np.ndarray, fast=True)
def rmsnorm(x: np.ndarray, gamma: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, Any]:
    """As `ops.rmsnorm`, row by row, with x̂ computed again in the backward.

    Forward, with all leading axes folded into n:

        rrms_n = 1/√(1/C Σ_c x_nc² + eps)        x̂_nc = x_nc rrms_n        y_nc = γ_c x̂_nc

    Backward. As derived in `rmsnorm`:

        dγ_c = Σ_n dy_nc x̂_nc        g_nc := ∂L/∂x̂_nc = dy_nc γ_c
        dx_nc = rrms_n (g_nc − x̂_nc mean_c'(g_nc' x̂_nc'))

    The mean of a row and its terms of dγ are summed in one loop; a second loop writes dx:

        dgamma = backward(rows(dy), flat, rrms, as_bits(gamma), dx)

    The cache keeps x itself and
    one number of each row. Sums are float32 for bfloat16 arrays, and so is dγ.
    """
    if not (alike(x, gamma) and gamma.shape == x.shape[-1:] and 0 <= eps < math.inf):
        return ops.rmsnorm.twins[np.ndarray](x, gamma, eps)
    flat = rows(x)
    y, rrms = np.empty_like(flat), numbers_like(flat, len(flat))
    forward(flat, as_bits(gamma), eps, rrms, y)
    return y.view(x.dtype).reshape(x.shape), FastRMSNormCache(x, rrms, gamma)


@ops.rmsnorm_backward.twin(FastRMSNormCache)
def rmsnorm_backward(dy: np.ndarray, cache: FastRMSNormCache) -> tuple[np.ndarray, np.ndarray]:
    """(dx, dgamma), as `ops.rmsnorm_backward`; in bfloat16 dgamma is float32."""
    x, rrms, gamma = cache
    if not (alike(x, dy) and dy.shape == x.shape):
        expect_like("dy", dy, x.shape)
        dy = np.asarray(dy, x.dtype)
    flat = rows(x)
    dx = np.empty_like(flat)
    dgamma = backward(rows(dy), flat, rrms, as_bits(gamma), dx)
    return dx.view(x.dtype).reshape(x.shape), dgamma


@compiled
def forward(x: Any, gamma: Any, eps: Any, rrms: Any, y: Any) -> None:
    number = rrms.dtype.type
    for n in range(x.shape[0]):
        row, to, total = x[n], y[n], number(0)
        for c in range(row.size):
            total = plus(total, read(row[c]) * read(row[c]))
        rrms[n] = inverse_root(total, row, number(0), number(0), number(eps))
        scale = rrms[n]
        for c in range(row.size):
            to[c] = narrow(read(row[c]) * scale * read(gamma[c]), to)


@compiled
def backward(dy: Any, x: Any, rrms: Any, gamma: Any, dx: Any) -> Any:
    """Write dx, and return dγ."""
    dgamma = wide_empty(gamma.size, x)
    dgamma[:] = 0
    number = rrms.dtype.type
    for n in range(x.shape[0]):
        row, d, to, scale, mean_gx = x[n], dy[n], dx[n], rrms[n], number(0)
        for c in range(row.size):
            u = read(d[c]) * (read(row[c]) * scale)
            dgamma[c] += u
            mean_gx = plus(mean_gx, u * read(gamma[c]))
        mean_gx = mean_gx / number(row.size)
        for c in range(row.size):
            to[c] = narrow(scale * (read(d[c]) * read(gamma[c]) - read(row[c]) * scale * mean_gx), to)
    return dgamma

"""Layer norm in compiled code: one pass over each row, which stays in the processor's nearest cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from .numba_code import as_bits, compiled, plus
from .numba_math import alike, narrow, numbers_like, read, rows, wide_empty
from .numba_rows import centre, inverse_root


class FastLayerNormCache(NamedTuple):
    x: np.ndarray  # (..., C)
    statistics: np.ndarray  # (2, N): of each row μ − x_0 and 1/σ
    gamma: np.ndarray  # (C,)


@ops.layernorm.twin(np.ndarray, fast=True)
def layernorm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5) -> tuple[np.ndarray, Any]:
    """As `ops.layernorm`, row by row, with x̂ computed again in the backward.

    Forward, with all leading axes folded into n:

        μ_n = 1/C Σ_c x_nc        rstd_n = 1/√(1/C Σ_c (x_nc − μ_n)² + eps)
        x̂_nc = (x_nc − μ_n) rstd_n        y_nc = γ_c x̂_nc + β_c

    Backward. As derived in `layernorm`:

        dγ_c = Σ_n dy_nc x̂_nc        dβ_c = Σ_n dy_nc        g_nc := ∂L/∂x̂_nc = dy_nc γ_c
        dx_nc = rstd_n (g_nc − mean_c'(g_nc') − x̂_nc mean_c'(g_nc' x̂_nc'))

    The two means of a row, and its terms of dγ and dβ, are summed in one loop; a second loop writes dx. Nothing of the
    size of x is allocated but the results:

        dgamma, dbeta = backward(rows(dy), flat, statistics, as_bits(gamma), dx)

    μ would be rounded in proportion to its size, which may be large beside σ. So the loops subtract the row's first
    number before they sum, and again its mean: x − μ is (x − x₀) − mean(x − x₀).
    In place of x̂ the cache keeps x itself, and two numbers of each row. Sums are float32 for bfloat16 arrays, and so
    are dγ and dβ, which are added up.
    """
    if not (alike(x, gamma, beta) and gamma.shape == beta.shape == x.shape[-1:] and 0 <= eps < math.inf):
        return ops.layernorm.twins[np.ndarray](x, gamma, beta, eps)
    flat = rows(x)
    y, statistics = np.empty_like(flat), numbers_like(flat, (2, len(flat)))
    forward(flat, as_bits(gamma), as_bits(beta), eps, statistics, y)
    return y.view(x.dtype).reshape(x.shape), FastLayerNormCache(x, statistics, gamma)


@ops.layernorm_backward.twin(FastLayerNormCache)
def layernorm_backward(dy: np.ndarray, cache: FastLayerNormCache) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgamma, dbeta), as `ops.layernorm_backward`; in bfloat16 dgamma and dbeta are float32."""
    x, statistics, gamma = cache
    if not (alike(x, dy) and dy.shape == x.shape):
        expect_like("dy", dy, x.shape)
        dy = np.asarray(dy, x.dtype)
    flat = rows(x)
    dx = np.empty_like(flat)
    dgamma, dbeta = backward(rows(dy), flat, statistics, as_bits(gamma), dx)
    return dx.view(x.dtype).reshape(x.shape), dgamma, dbeta


@compiled
def forward(x: Any, gamma: Any, beta: Any, eps: Any, statistics: Any, y: Any) -> None:
    for n in range(x.shape[0]):
        row, to = x[n], y[n]
        first, mean, squares = centre(row)
        rstd = inverse_root(squares, row, first, mean, statistics.dtype.type(eps))
        statistics[0, n], statistics[1, n] = mean, rstd
        for c in range(row.size):
            to[c] = narrow(((read(row[c]) - first) - mean) * rstd * read(gamma[c]) + read(beta[c]), to)


@compiled
def backward(dy: Any, x: Any, statistics: Any, gamma: Any, dx: Any) -> Any:
    """Write dx, and return dγ and dβ."""
    N, C = x.shape
    dgamma, dbeta = wide_empty(C, x), wide_empty(C, x)
    dgamma[:], dbeta[:] = 0, 0
    zero, width = statistics.dtype.type(0), statistics.dtype.type(C)
    for n in range(N):
        row, d, to = x[n], dy[n], dx[n]
        first, mean, rstd = read(row[0]), statistics[0, n], statistics[1, n]
        mean_g, mean_gx = zero, zero
        for c in range(C):
            dyc, xhat = read(d[c]), ((read(row[c]) - first) - mean) * rstd
            dgamma[c] += dyc * xhat
            dbeta[c] += dyc
            g = dyc * read(gamma[c])
            mean_g, mean_gx = plus(mean_g, g), plus(mean_gx, g * xhat)
        mean_g, mean_gx = mean_g / width, mean_gx / width
        for c in range(C):
            xhat = ((read(row[c]) - first) - mean) * rstd
            to[c] = narrow(rstd * (read(d[c]) * read(gamma[c]) - mean_g - xhat * mean_gx), to)
    return dgamma, dbeta

"""Layer norm on NumPy in few passes: sums along and over rows are products with a vector, and arrays are reused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.layernorm import check_layernorm
from .numpy_arrays import one_real_dtype, root_mean_square
from .numpy_half import in_half

plain = in_half(ops.layernorm, ops.layernorm_backward)


class NumpyLayerNormCache(NamedTuple):
    xhat: np.ndarray  # (..., C)
    rstd: np.ndarray  # (..., 1)
    gamma: np.ndarray  # (C,)


def normalised(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """x̂ (..., C) and 1/σ (..., 1) of the rows of x (..., C)."""
    C = x.shape[-1]
    share = 2.0 ** -C.bit_length()  # as in `ops.layernorm.row_mean`
    shares = np.full(C, share, x.dtype)
    mean = x @ shares
    mean /= C * share
    xhat = x - mean[..., None]
    sigma = root_mean_square(xhat, eps)
    if (np.abs(mean) > sigma).any():  # then the rounding of the mean counts
        xhat -= (xhat @ shares / (C * share))[..., None]
        sigma = root_mean_square(xhat, eps)
    rstd = 1 / sigma[..., None]
    xhat *= rstd
    return xhat, rstd


@ops.layernorm.twin(np.ndarray)
def layernorm(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, NumpyLayerNormCache]:
    """As `ops.layernorm`, with sums that are products with a vector.

    Forward, with all leading axes folded into n:

        μ_n = 1/C Σ_c x_nc        rstd_n = 1/√(1/C Σ_c (x_nc − μ_n)² + eps)
        x̂_nc = (x_nc − μ_n) rstd_n        y_nc = γ_c x̂_nc + β_c

    Σ_c x_nc is a product of x with a vector, and Σ_c (x_nc − μ_n)² a dot product of a row with itself.

    Backward. As derived in `layernorm`:

        dγ_c = Σ_n dy_nc x̂_nc        dβ_c = Σ_n dy_nc        g_nc := ∂L/∂x̂_nc = dy_nc γ_c
        dx_nc = rstd_n (g_nc − mean_c'(g_nc') − x̂_nc mean_c'(g_nc' x̂_nc'))

    dγ and the second mean share the product u of dy and x̂. γ moves from the array to the vector: both means are
    products with γ/C, and g itself is needed only once, in the array that becomes dx:

        u_nc := dy_nc x̂_nc        dγ_c = Σ_n u_nc
        mean_g_n := mean_c(g_nc) = Σ_c dy_nc γ_c/C
        mean_gx_n := mean_c(g_nc x̂_nc) = Σ_c u_nc γ_c/C
        removed_nc := mean_g_n + x̂_nc mean_gx_n        dx_nc = rstd_n (dy_nc γ_c − removed_nc)

    In NumPy, with u overwritten once it has been used:

        u = dy * xhat
        dgamma, dbeta = ones @ u.reshape(-1, C), ones @ dy.reshape(-1, C)
        mean_g, mean_gx = dy @ (gamma / C), u @ (gamma / C)
        removed = np.multiply(xhat, mean_gx[..., None], out=u)
        removed += mean_g[..., None]
        dx = dy * gamma
        dx -= removed
        dx *= rstd

    Backward allocates two arrays of the size of x, u and dx. The cache is that of the reference.
    """
    if not one_real_dtype(x, gamma, beta):
        return plain(x, gamma, beta, eps)
    check_layernorm(x, gamma, beta, eps)
    xhat, rstd = normalised(x, eps)
    y = xhat * gamma
    y += beta
    return y, NumpyLayerNormCache(xhat, rstd, gamma)


@ops.layernorm_backward.twin(NumpyLayerNormCache)
def layernorm_backward(dy: np.ndarray, cache: NumpyLayerNormCache) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgamma, dbeta), as `ops.layernorm_backward`."""
    xhat, rstd, gamma = cache
    expect_like("dy", dy, xhat.shape)
    if dy.dtype != xhat.dtype:
        return ops.layernorm_backward.reference(dy, cache)
    C = gamma.size
    ones = np.ones(dy.size // C, dy.dtype)
    u = dy * xhat
    dgamma, dbeta = ones @ u.reshape(-1, C), ones @ dy.reshape(-1, C)
    mean_g, mean_gx = dy @ (gamma / C), u @ (gamma / C)
    removed = np.multiply(xhat, mean_gx[..., None], out=u)
    removed += mean_g[..., None]
    dx = dy * gamma
    dx -= removed
    dx *= rstd
    return dx, dgamma, dbeta

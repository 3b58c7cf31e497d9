"""Layer norm on NumPy in few passes: sums along or over rows are products with a vector, and arrays are reused.

Backward. The reference computes dγ = Σ_n dy x̂ and the means of g = γ dy and of g x̂. With the product u = dy x̂ they
are

    dγ = Σ_n u_n        mean(g) = dy · γ/C        mean(g x̂) = u · γ/C

so g itself is needed only once, in the array that becomes dx.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.layernorm import check_layernorm
from .numpy_arrays import one_real_dtype

plain = ops.layernorm.reference


class NumpyLayerNormCache(NamedTuple):
    xhat: np.ndarray  # (..., C)
    rstd: np.ndarray  # (..., 1)
    gamma: np.ndarray  # (C,)


@ops.layernorm.twin(np.ndarray)
def layernorm(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, NumpyLayerNormCache]:
    """As `ops.layernorm`."""
    if not one_real_dtype(x, gamma, beta):
        return plain(x, gamma, beta, eps)
    check_layernorm(x, gamma, beta, eps)
    C = gamma.shape[0]
    mean = x @ np.ones(C, x.dtype)
    mean /= C  # not a product with 1/C, which is rounded
    xhat = x - mean[..., None]
    rstd = np.vecdot(xhat, xhat)[..., None]
    rstd /= C
    rstd += eps
    np.divide(1, np.sqrt(rstd, out=rstd), out=rstd)
    xhat *= rstd
    y = xhat * gamma
    y += beta
    return y, NumpyLayerNormCache(xhat, rstd, gamma)


@ops.layernorm_backward.twin(NumpyLayerNormCache)
def layernorm_backward(dy: np.ndarray, cache: NumpyLayerNormCache) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgamma, dbeta), as `ops.layernorm_backward`."""
    xhat, rstd, gamma = cache
    expect_like("dy", dy, xhat.shape)
    C = gamma.shape[0]
    ones = np.ones(dy.size // C, dy.dtype)
    u = dy * xhat
    dgamma, dbeta = ones @ u.reshape(-1, C), ones @ dy.reshape(-1, C)
    mean_g, mean_gx = dy @ (gamma / C), u @ (gamma / C)
    np.multiply(xhat, mean_gx[..., None], out=u)
    u += mean_g[..., None]
    dx = dy * gamma
    dx -= u
    dx *= rstd
    return dx, dgamma, dbeta

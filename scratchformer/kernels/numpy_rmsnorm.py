"""RMS norm on NumPy in few passes: sums are products with a vector, and arrays are reused, as in `numpy_layernorm`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.rmsnorm import check_rmsnorm
from .numpy_arrays import one_real_dtype, root_mean_square
from .numpy_half import in_half

plain = in_half(ops.rmsnorm, ops.rmsnorm_backward)


class NumpyRMSNormCache(NamedTuple):
    xhat: np.ndarray  # (..., C)
    rrms: np.ndarray  # (..., 1)
    gamma: np.ndarray  # (C,)


@ops.rmsnorm.twin(np.ndarray)
def rmsnorm(x: np.ndarray, gamma: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, NumpyRMSNormCache]:
    """As `ops.rmsnorm`, with sums that are products with a vector.

    Forward, with all leading axes folded into n. The sum of squares is a dot product of a row with itself:

        rrms_n = 1/√(1/C Σ_c x_nc² + eps)        x̂_nc = x_nc rrms_n        y_nc = γ_c x̂_nc

    Backward. As derived in `rmsnorm`:

        dγ_c = Σ_n dy_nc x̂_nc        g_nc := ∂L/∂x̂_nc = dy_nc γ_c
        dx_nc = rrms_n (g_nc − x̂_nc mean_c'(g_nc' x̂_nc'))

    dγ and the mean share the product u of dy and x̂. The mean is a product of u with the vector γ/C, so g itself is
    needed only once, in the array that becomes dx:

        u_nc := dy_nc x̂_nc        dγ_c = Σ_n u_nc
        mean_gx_n := mean_c(g_nc x̂_nc) = Σ_c u_nc γ_c/C
        removed_nc := x̂_nc mean_gx_n        dx_nc = rrms_n (dy_nc γ_c − removed_nc)

    In NumPy, with u overwritten once it has been used:

        u = dy * xhat
        dgamma = np.ones(u.size // C, u.dtype) @ u.reshape(-1, C)
        mean_gx = u @ (gamma / C)
        removed = np.multiply(xhat, mean_gx[..., None], out=u)
        dx = dy * gamma
        dx -= removed
        dx *= rrms

    Backward allocates two arrays of the size of x, u and dx. The cache is that of the reference.
    """
    if not one_real_dtype(x, gamma):
        return plain(x, gamma, eps)
    check_rmsnorm(x, gamma, eps)
    rrms = 1 / root_mean_square(x, eps)[..., None]
    xhat = x * rrms
    return xhat * gamma, NumpyRMSNormCache(xhat, rrms, gamma)


@ops.rmsnorm_backward.twin(NumpyRMSNormCache)
def rmsnorm_backward(dy: np.ndarray, cache: NumpyRMSNormCache) -> tuple[np.ndarray, np.ndarray]:
    """(dx, dgamma), as `ops.rmsnorm_backward`."""
    xhat, rrms, gamma = cache
    expect_like("dy", dy, xhat.shape)
    if dy.dtype != xhat.dtype:
        return ops.rmsnorm_backward.reference(dy, cache)
    C = gamma.size
    u = dy * xhat
    dgamma = np.ones(u.size // C, u.dtype) @ u.reshape(-1, C)
    mean_gx = u @ (gamma / C)
    removed = np.multiply(xhat, mean_gx[..., None], out=u)
    dx = dy * gamma
    dx -= removed
    dx *= rrms
    return dx, dgamma

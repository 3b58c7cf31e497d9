"""RMS norm on NumPy in few passes: sums are products with a vector, and arrays are reused, as in `numpy_layernorm`.

Backward. With the product u = dy x̂, dγ_c = Σ_n u_nc and mean(g x̂) = u · γ/C.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.rmsnorm import check_rmsnorm
from .numpy_arrays import one_real_dtype

plain = ops.rmsnorm.reference


class NumpyRMSNormCache(NamedTuple):
    xhat: np.ndarray  # (..., C)
    rrms: np.ndarray  # (..., 1)
    gamma: np.ndarray  # (C,)


@ops.rmsnorm.twin(np.ndarray)
def rmsnorm(x: np.ndarray, gamma: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, NumpyRMSNormCache]:
    """As `ops.rmsnorm`."""
    if not one_real_dtype(x, gamma):
        return plain(x, gamma, eps)
    check_rmsnorm(x, gamma, eps)
    rrms = np.vecdot(x, x)[..., None]
    rrms /= gamma.shape[0]
    rrms += eps
    np.divide(1, np.sqrt(rrms, out=rrms), out=rrms)
    xhat = x * rrms
    return xhat * gamma, NumpyRMSNormCache(xhat, rrms, gamma)


@ops.rmsnorm_backward.twin(NumpyRMSNormCache)
def rmsnorm_backward(dy: np.ndarray, cache: NumpyRMSNormCache) -> tuple[np.ndarray, np.ndarray]:
    """(dx, dgamma), as `ops.rmsnorm_backward`."""
    xhat, rrms, gamma = cache
    expect_like("dy", dy, xhat.shape)
    C = gamma.shape[0]
    u = dy * xhat
    dgamma = np.ones(u.size // C, u.dtype) @ u.reshape(-1, C)
    mean_gx = u @ (gamma / C)
    np.multiply(xhat, mean_gx[..., None], out=u)
    dx = dy * gamma
    dx -= u
    dx *= rrms
    return dx, dgamma

"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_like, expect_number, expect_shape
from ..dispatch import backward, operation
from .layernorm import root_mean_square


class RMSNormCache(NamedTuple):
    x: Array  # (..., C)
    rrms: Array  # (..., 1), 1/ρ
    gamma: Array  # (C,)


def check_rmsnorm(x: Array, gamma: Array, eps: float) -> None:
    """Raise TypeError or ValueError unless these fit together as arguments of `rmsnorm`."""
    expect_floating(x=x, gamma=gamma)
    expect_number("eps", eps)
    array_module(x, gamma)
    expect_shape("gamma", gamma, "C")
    if x.shape[-1:] != gamma.shape:
        raise ValueError(f"x: expected (..., {gamma.shape[0]}), got {tuple(x.shape)}")
    expect_columns("x", x)


@operation(given=check_rmsnorm)
def rmsnorm(x: Array, gamma: Array, eps: float = 1e-6) -> tuple[Array, RMSNormCache]:
    """y = γ x̂ with x̂ = x/ρ: each row is divided by its root mean square, then scaled.

    x: (..., C). gamma: (C,). eps: added to the mean square. Returns y of the shape of x, and the cache.
    Raises ValueError if the widths differ.

    Forward, for each row:

        ρ = √(1/C Σ_c x_c² + eps)        x̂_c = x_c/ρ        y_c = γ_c x̂_c        mean_c(x̂_c²) = 1 − eps/ρ²

    The code divides once for each row, which is faster:

        rrms = 1/ρ = 1/√(mean_c(x_c²) + eps)        x̂_c = x_c rrms

    Backward. γ acts elementwise, and every row n uses it:

        dγ_c = Σ_n dy_nc x̂_nc        g_c := ∂L/∂x̂_c = dy_c γ_c

    Within one row, x_k affects x̂_c directly and through ρ:

        ∂ρ/∂x_k = 1/(2ρ) · 2 x_k/C = x̂_k/C
        ∂x̂_c/∂x_k = δ_ck/ρ − x_c/ρ² ∂ρ/∂x_k = (δ_ck − x̂_c x̂_k/C)/ρ

    Collecting terms,

        dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ = rrms (g_k − x̂_k mean_c(g_c x̂_c))

    This is the gradient of `layernorm` without the term for the mean, which is not subtracted here. γ is *inside* the
    mean, as a factor of g.

    In NumPy:

        dx = rrms * (g - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))

    The cache keeps x and γ, and one number of each row: 1/ρ. x̂ is computed again.
    Source: Zhang, Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """
    check_rmsnorm(x, gamma, eps)
    wide = widen(x)
    rrms = 1 / root_mean_square(wide, eps)
    y = gamma * (wide * rrms)
    return cast(y, x.dtype), RMSNormCache(x, rrms, gamma)


@backward
def rmsnorm_backward(dy: Array, cache: RMSNormCache) -> tuple[Array, Array]:
    """(dx, dgamma): see `rmsnorm`."""
    x, rrms, _ = cache
    expect_like("dy", dy, x.shape)
    xp, dtype, rows = array_module(dy), dy.dtype, tuple(range(dy.ndim - 1))
    dy, xhat = widen(dy), x * rrms
    dgamma = xp.sum(dy * xhat, axis=rows)
    g = dy * cache.gamma
    dx = rrms * (g - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))
    return cast(dx, dtype), cast(dgamma, dtype)

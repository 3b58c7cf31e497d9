"""Layer normalisation."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_like, expect_number, expect_shape
from ..dispatch import backward, operation


class LayerNormCache(NamedTuple):
    x: Array  # (..., C)
    shift: Array  # (..., 1), μ − x_0
    rstd: Array  # (..., 1), 1/σ
    gamma: Array  # (C,)


def check_layernorm(x: Array, gamma: Array, beta: Array, eps: float) -> None:
    """Raise TypeError or ValueError unless these are valid arguments of `layernorm`."""
    expect_floating(x=x, gamma=gamma, beta=beta)
    expect_number("eps", eps)
    array_module(x, gamma, beta)
    expect_shape("gamma", gamma, "C")
    expect_shape("beta", beta, "C", C=gamma.shape[0])
    if x.shape[-1:] != gamma.shape:
        raise ValueError(f"x: expected (..., {gamma.shape[0]}), got {tuple(x.shape)}")
    expect_columns("x", x)


@operation(given=check_layernorm)
def layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> tuple[Array, LayerNormCache]:
    """y = γ x̂ + β with x̂ = (x − μ)/σ: each row is normalised to mean 0 and variance 1, then scaled and shifted.

    x: (..., C). gamma, beta: (C,). eps: added to the variance. Returns y of the shape of x, and the cache.
    Raises ValueError if the widths differ.

    Forward, for each row:

        μ = 1/C Σ_c x_c        variance = 1/C Σ_c (x_c − μ)²        σ = √(variance + eps)
        x̂_c = (x_c − μ)/σ        y_c = γ_c x̂_c + β_c

    So x̂ has mean 0 and, but for eps, variance 1:

        Σ_c x̂_c = 0        mean_c(x̂_c²) = 1 − eps/σ²

    The rounding error of μ is in proportion to its size, which may be large compared with σ. To reduce this
    rounding, the code first subtracts the first number of the row, which leaves all differences from the mean as they
    are:

        u_c = x_c − x_{0}        shift = μ − x_{0} = mean_c(u_c)
        rstd = 1/σ = 1/√(mean_c((u_c − shift)²) + eps)        x̂_c = (u_c − shift) rstd

    Backward. γ and β act elementwise, and every row n uses them:

        dγ_c = Σ_n dy_nc x̂_nc        dβ_c = Σ_n dy_nc        g_c := ∂L/∂x̂_c = dy_c γ_c

    Within one row, x_k affects x̂_c directly, through μ and through σ. First μ, and with it the variance, where the
    δ leaves one term and the differences from the mean add up to 0:

        ∂μ/∂x_k = 1/C
        ∂variance/∂x_k = 2/C Σ_c (x_c − μ)(δ_ck − 1/C) = 2/C (x_k − μ)

    Then σ, by the chain rule for the square root, and x̂, by the quotient rule:

        ∂σ/∂x_k = 1/(2σ) ∂variance/∂x_k = 1/C · (x_k − μ)/σ = x̂_k/C
        ∂x̂_c/∂x_k = (δ_ck − 1/C)/σ − (x_c − μ)/σ² · ∂σ/∂x_k = (δ_ck − 1/C − x̂_c x̂_k/C)/σ

    Collecting terms,

        dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ
            = rstd (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))

    This removes from g its components along the vectors 1 and x̂, the directions that normalising removes. (A little
    of that along x̂ is left, since mean_c(x̂_c²) is not quite 1.) γ is *inside* both means, as a factor of g.

        Σ_k dx_k = 0

    In NumPy:

        dx = rstd * (g - xp.mean(g, axis=-1, keepdims=True) - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))

    The cache keeps x and γ, and two numbers of each row: μ − x₀ and 1/σ. x̂ is computed again.
    Source: Ba, Kiros, Hinton, "Layer normalization", 2016, equations 3 and 4.
    """
    check_layernorm(x, gamma, beta, eps)
    u = widen(x) - x[..., :1]
    xp = array_module(x)
    shift = xp.mean(u, axis=-1, keepdims=True)
    centred = u - shift
    rstd = 1 / root_mean_square(centred, eps)
    y = gamma * (centred * rstd) + beta
    return cast(y, x.dtype), LayerNormCache(x, shift, rstd, gamma)


@operation
def root_mean_square(x: Array, eps: float) -> Array:
    """√(1/C Σ_c x_c² + eps) for each row of x (..., C), as (..., 1)."""
    xp = array_module(x)
    return xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)


@backward
def layernorm_backward(dy: Array, cache: LayerNormCache) -> tuple[Array, Array, Array]:
    """(dx, dgamma, dbeta): see `layernorm`."""
    x, shift, rstd, _ = cache
    expect_like("dy", dy, x.shape)
    xp, dtype, rows = array_module(dy), dy.dtype, tuple(range(dy.ndim - 1))
    dy, xhat = widen(dy), (widen(x) - x[..., :1] - shift) * rstd
    dgamma = xp.sum(dy * xhat, axis=rows)
    dbeta = xp.sum(dy, axis=rows)
    g = dy * cache.gamma
    dx = rstd * (g - xp.mean(g, axis=-1, keepdims=True) - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))
    return tuple(cast(d, dtype) for d in (dx, dgamma, dbeta))

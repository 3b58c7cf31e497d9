"""Softmax and its logarithm, over the last axis."""

from __future__ import annotations

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_like
from ..dispatch import backward, operation


@operation
def softmax(z: Array) -> tuple[Array, Array]:
    """y_i = exp(z_i) / Z with Z = Σ_j exp(z_j), over the last axis.

    z: (..., V). Returns y of the same shape, whose rows are positive and sum to 1, and the cache, y itself.

    Forward, for each row:

        Z = Σ_j exp(z_j)        y_i = exp(z_i)/Z        Σ_i y_i = 1

    The row's maximum is subtracted first, so that no exponential overflows; it cancels in the quotient:

        m = max_j(z_j)        y_i = exp(z_i − m)/Σ_j exp(z_j − m)

    Backward. Z depends on every score, and the quotient rule gives

        ∂Z/∂z_k = exp(z_k)
        ∂y_i/∂z_k = (δ_ik exp(z_i) Z − exp(z_i) exp(z_k)) / Z² = y_i (δ_ik − y_k)

    By the chain rule

        dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i y_i (δ_ik − y_k) = y_k (dy_k − Σ_i dy_i y_i)
        Σ_k dz_k = 0        (a constant added to the row changes nothing)

    The Jacobian has V² entries, but it is a diagonal minus a rank-one matrix, so its product with dy costs only one dot
    product per row:

        dz = y * (dy - xp.sum(dy * y, axis=-1, keepdims=True))

    If y_k is nearly 1, rounding leaves little of this difference, so 1 − y_k is then computed as the sum r of the
    others (in code dz_k, as minus the sum of the others, which is the same):

        r := Σ_i [y_i ≤ ½] y_i        a := Σ_i [y_i ≤ ½] dy_i y_i
        dz_k = y_k (dy_k r − a) where y_k > ½, y_k (dy_k − Σ_i dy_i y_i) elsewhere
        dz = from_others(dz, y)

    The cache keeps only y, since the Jacobian is a function of y.
    """
    expect_floating(z=z)
    expect_columns("z", z)
    xp = array_module(z)
    wide = widen(z)
    y = xp.exp(wide - xp.max(wide, axis=-1, keepdims=True))
    y /= xp.sum(y, axis=-1, keepdims=True)
    y = cast(y, z.dtype)
    return y, y


@backward
def softmax_backward(dy: Array, y: Array) -> Array:
    """dz: see `softmax`."""
    expect_like("dy", dy, y.shape)
    xp, dtype, dy = array_module(dy, y), dy.dtype, widen(dy)
    dz = y * (dy - xp.sum(dy * y, axis=-1, keepdims=True))
    dz = from_others(dz, y)
    return cast(dz, dtype)


def from_others(dz: Array, p: Array) -> Array:
    """dz (..., V), whose rows sum to 0, with minus the sum of the others where the probability p is above ½."""
    xp, large = array_module(dz, p), p > 0.5
    others = xp.sum(xp.where(large, 0, dz), axis=-1, keepdims=True)
    return xp.where(large, -others, dz)


@operation
def log_softmax(z: Array) -> tuple[Array, Array]:
    """y_i = z_i − log Z with Z = Σ_j exp(z_j), over the last axis.

    z: (..., V). Returns y, log-probabilities of the same shape, and the cache, y itself.

    Forward, for each row:

        Z = Σ_j exp(z_j)        y_i = z_i − log(Z)

    The row's maximum is subtracted before the sum, so that nothing overflows, and the exponential of the maximum, 1, is
    added last (there may be k of them), so that a small rest does not round to 0; log1p(x) is log(1 + x):

        m = max_j(z_j)        k = Σ_j [z_j = m]
        y_i = z_i − m − log(Σ_j exp(z_j − m)) = z_i − m − log1p(k − 1 + Σ_j [z_j < m] exp(z_j − m))

    Backward. Z depends on every score:

        ∂Z/∂z_k = exp(z_k)      ∂y_i/∂z_k = δ_ik − exp(z_k)/Z = δ_ik − exp(y_k)
        dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i (δ_ik − exp(y_k)) = dy_k − exp(y_k) Σ_i dy_i

    In NumPy, with p for exp(y):

        dz = dy - p * xp.sum(dy, axis=-1, keepdims=True)

    If p_k is nearly 1, rounding leaves little of 1 − p_k, which is then computed as the sum of the others:

        p_k := exp(y_k)        r := Σ_i [p_i ≤ ½] p_i        a := Σ_i [p_i ≤ ½] dy_i
        dz_k = dy_k r − p_k a where p_k > ½, dy_k − p_k Σ_i dy_i elsewhere
        dz = from_others(dz, p)

    The cache keeps only y: exp(y) is the softmax.
    """
    expect_floating(z=z)
    expect_columns("z", z)
    xp = array_module(z)
    wide = widen(z)
    shifted = wide - xp.max(wide, axis=-1, keepdims=True)
    y = shifted - log_sum(shifted)
    y = cast(y, z.dtype)
    return y, y


@backward
def log_softmax_backward(dy: Array, y: Array) -> Array:
    """dz: see `log_softmax`."""
    expect_like("dy", dy, y.shape)
    xp = array_module(dy, y)
    dtype, dy, p = dy.dtype, widen(dy), xp.exp(widen(y))
    dz = dy - p * xp.sum(dy, axis=-1, keepdims=True)
    dz = from_others(dz, p)
    return cast(dz, dtype)


def log_sum(z: Array) -> Array:
    """log Σ_j exp(z_j) for each row of z (..., V) whose largest number is 0, as (..., 1)."""
    xp = array_module(z)
    largest = xp.argmax(z, axis=-1, keepdims=True) == xp.arange(z.shape[-1])  # one of them, whose exponential is 1
    return xp.log1p(xp.sum(xp.where(largest, 0, xp.exp(z)), axis=-1, keepdims=True))

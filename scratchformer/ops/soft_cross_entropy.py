"""The cross-entropy of predictions with other predictions, from which a model learns."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_gradient, expect_like
from ..dispatch import backward, operation
from .softmax import from_others, log_sum


class SoftCrossEntropyCache(NamedTuple):
    logits: Array  # (..., V)
    targets: Array  # (..., V)
    z_max: Array  # (..., 1)
    log_z: Array  # (..., 1), of z − z_max


def check_soft_cross_entropy(logits: Array, targets: Array) -> None:
    """Raise TypeError or ValueError unless these are valid arguments of `soft_cross_entropy`."""
    expect_floating(logits=logits, targets=targets)
    expect_columns("logits", logits)
    expect_like("targets", targets, logits.shape)
    array_module(logits, targets)
    if 0 in logits.shape:
        raise ValueError(f"logits: expected at least one row, got {tuple(logits.shape)}")


@operation(given=check_soft_cross_entropy)
def soft_cross_entropy(logits: Array, targets: Array) -> tuple[Array, SoftCrossEntropyCache]:
    """loss = −mean_n(Σ_v t_nv log(softmax_v(z_nv))), in nats: each row n has a distribution t_n over V classes.

    logits, targets: (..., V), both of the same shape. A row of targets has the probability of each class, such as the
    prediction of another model. Returns the loss, a scalar (float32 for logits in half precision), and the cache.
    Raises ValueError if the shapes differ or there is no row, TypeError if one is not floating-point.

    Forward, with all leading axes folded into n, and s the logarithm of the softmax:

        z := logits        t := targets
        s_nv = z_nv − log(Σ_v' exp(z_nv'))        p_nv := exp(s_nv)
        loss = −1/N Σ_n Σ_v t_nv s_nv

    With the row's maximum subtracted, no exponential overflows, and with log1p no small one rounds to 0:

        z_max_n = max_v(z_nv)        k_n = Σ_v [z_nv = z_max_n]
        log_z_n = log(Σ_v exp(z_nv − z_max_n)) = log1p(k_n − 1 + Σ_v [z_nv < z_max_n] exp(z_nv − z_max_n))
        s_nv = z_nv − z_max_n − log_z_n

    A class whose target is 0 adds nothing to the loss, even if its logit is −∞. (Then dtargets is infinite there.)

    Backward. Every logit of a row is in the logarithm of all its probabilities:

        ∂s_nv'/∂z_nv = δ_vv' − p_nv
        ∂loss/∂z_nv = −1/N Σ_v' t_nv' (δ_vv' − p_nv) = 1/N (p_nv Σ_v' t_nv' − t_nv)
        dz_nv = dloss/N (p_nv Σ_v' t_nv' − t_nv)

    A row of targets has the sum 1, so this is the difference of two predictions. The loss is linear in t:

        ∂loss/∂t_nv = −1/N s_nv        dt_nv = −dloss/N s_nv

    In code:

        dtargets = -share * log_p
        dlogits = share * (p * xp.sum(t, axis=-1, keepdims=True) - t)

    If p is nearly 1, rounding leaves little of 1 − p, which is then computed as the sum of the others:

        r_n := Σ_v [p_nv ≤ ½] p_nv        a_n := Σ_v [p_nv ≤ ½] t_nv
        dz_nv = dloss/N (p_nv a_n − t_nv r_n) where p_nv > ½, dloss/N (p_nv Σ_v' t_nv' − t_nv) elsewhere
        dlogits = from_others(dlogits, p)

    The cache keeps z and t, and two numbers of each row. s and p are computed again.

    Source: Hinton, Vinyals, Dean, "Distilling the knowledge in a neural network", 2015, section 2, with temperature 1.
    """
    check_soft_cross_entropy(logits, targets)
    xp, z = array_module(logits), widen(logits)
    t = cast(targets, z.dtype)
    z_max = xp.max(z, axis=-1, keepdims=True)
    log_z = log_sum(z - z_max)
    log_p = (z - z_max) - log_z
    loss = -xp.sum(t * xp.where(t == 0, t, log_p)) / math.prod(log_z.shape)  # 0 log 0 = 0
    return loss, SoftCrossEntropyCache(logits, targets, z_max, log_z)


@backward
def soft_cross_entropy_backward(dloss: Array | float, cache: SoftCrossEntropyCache) -> tuple[Array, Array]:
    """(dlogits, dtargets): see `soft_cross_entropy`. dloss: a number, or a zero-dimensional array."""
    expect_gradient("dloss", dloss, ())
    logits, targets, z_max, log_z = cache
    xp, share = array_module(logits), dloss / math.prod(log_z.shape)
    t, log_p = cast(targets, z_max.dtype), (logits - z_max) - log_z
    p = xp.exp(log_p)
    dtargets = -share * log_p
    dlogits = share * (p * xp.sum(t, axis=-1, keepdims=True) - t)
    dlogits = from_others(dlogits, p)
    return tuple(cast(dx, x.dtype) for dx, x in ((dlogits, logits), (dtargets, targets)))

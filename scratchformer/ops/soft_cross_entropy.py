"""The cross-entropy of predictions with other predictions, from which a model learns."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, array_module
from ..dispatch import backward, operation
from .checks import expect_columns, expect_floating, expect_gradient, expect_like
from .precision import widen
from .softmax import log_softmax


class SoftCrossEntropyCache(NamedTuple):
    log_p: Array  # (N, V)
    targets: Array  # (N, V)
    shape: tuple[int, ...]
    dtypes: tuple[Any, Any]  # of logits and targets


@operation
def soft_cross_entropy(logits: Array, targets: Array) -> tuple[Array, SoftCrossEntropyCache]:
    """loss = −mean_n Σ_v t_nv log softmax_v(z_nv), in nats, with a distribution t_n over the V classes for each row n.

    logits, targets: (..., V), both of the same shape. A row of targets has the probability of each class, such as the
    prediction of another model. Returns the loss, a scalar (float32 for logits in half precision), and the cache.
    Raises ValueError if the shapes differ or there is no row, TypeError if one is not floating-point.

    Forward, with all leading axes folded into n, and s the logarithm of the softmax:

        z := logits        t := targets        s := log_p
        s_nv = z_nv − log(Σ_v' exp(z_nv'))        p_nv := exp(s_nv)
        loss = −1/N Σ_n Σ_v t_nv s_nv

    A class whose target is 0 adds nothing to the loss, even if its logit is −∞. (Then dtargets is infinite there.)

    Backward. Every logit of a row is in the logarithm of all its probabilities:

        ∂s_nv'/∂z_nv = δ_vv' − p_nv
        ∂loss/∂z_nv = −1/N Σ_v' t_nv' (δ_vv' − p_nv) = 1/N (p_nv Σ_v' t_nv' − t_nv)
        dz_nv = dloss/N (p_nv Σ_v' t_nv' − t_nv)

    A row of targets has the sum 1, so this is the difference of two predictions. The loss is linear in t:

        ∂loss/∂t_nv = −1/N s_nv        dt_nv = −dloss/N s_nv

    In code:

        dlogits = share * (xp.exp(log_p) * targets.sum(axis=-1, keepdims=True) - targets)
        dtargets = -share * log_p

    The cache keeps s and t, both (N, V). p is computed again.

    Source: Hinton, Vinyals, Dean, "Distilling the knowledge in a neural network", 2015, section 2, with temperature 1.
    """
    expect_floating(logits=logits, targets=targets)
    expect_columns("logits", logits)
    expect_like("targets", targets, logits.shape)
    xp = array_module(logits, targets)
    V = logits.shape[-1]
    if not logits.size:
        raise ValueError(f"logits: expected at least one row, got {tuple(logits.shape)}")
    log_p, _ = log_softmax(widen(logits).reshape(-1, V))
    t = targets.reshape(-1, V).astype(log_p.dtype, copy=False)
    loss = -(t * xp.where(t == 0, t, log_p)).sum() / len(t)  # 0 log 0 = 0
    return loss, SoftCrossEntropyCache(log_p, t, logits.shape, (logits.dtype, targets.dtype))


@backward
def soft_cross_entropy_backward(dloss: Array | float, cache: SoftCrossEntropyCache) -> tuple[Array, Array]:
    """(dlogits, dtargets): see `soft_cross_entropy`. dloss: a number, or a zero-dimensional array."""
    expect_gradient("dloss", dloss, ())
    log_p, targets, shape, dtypes = cache
    xp, share = array_module(log_p), dloss / len(log_p)
    dlogits = share * (xp.exp(log_p) * targets.sum(axis=-1, keepdims=True) - targets)
    dtargets = -share * log_p
    return tuple(x.reshape(shape).astype(d, copy=False) for x, d in zip((dlogits, dtargets), dtypes, strict=True))

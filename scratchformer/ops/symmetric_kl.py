"""How far two predictions of the same token are apart: the symmetric Kullback-Leibler divergence."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module
from ..checks import expect_columns, expect_floating, expect_gradient
from ..dispatch import backward, operation
from .cross_entropy import given_targets
from .precision import widen


class SymmetricKLCache(NamedTuple):
    z: Array  # (..., V)
    w: Array  # (..., V)
    z_max: Array  # (N, 1)
    z_sum: Array  # (N, 1), of exp(z − z_max)
    w_max: Array  # (N, 1)
    w_sum: Array  # (N, 1)
    a: Array  # (N, 1)
    b: Array  # (N, 1)
    counted: Array  # (N,), boolean
    count: Array  # how many rows count, but at least 1


def given_rows(z: Array, w: Array, targets: Array, ignore_index: int | None = None) -> dict[str, Array]:
    """Which rows count (N,), by name. Raises TypeError, ValueError or IndexError unless these are valid arguments of
    `symmetric_kl`.
    """
    expect_floating(z=z, w=w)
    expect_columns("z", z)
    counted = given_targets(z, targets, ignore_index, 0.0)["counted"]
    array_module(z, w, targets)
    if w.shape != z.shape:
        raise ValueError(f"w: expected {tuple(z.shape)}, got {tuple(w.shape)}")
    return {"counted": counted}


@operation(given=given_rows)
def symmetric_kl(z: Array, w: Array, targets: Array, ignore_index: int | None = None) -> tuple[Array, SymmetricKLCache]:
    """loss = mean_n ½ (KL(p_n ‖ q_n) + KL(q_n ‖ p_n)), of p = softmax(z) and q = softmax(w), in nats.

    z, w: (..., V), two sets of logits for the same targets. targets: (...), integers from 0 to V − 1. They only tell
    which rows count: all but those whose target is `ignore_index`. Logits must be finite, also in rows that do not
    count. Returns the loss, a scalar (float32 for float16 logits), and the cache. If no target counts, the loss is 0.
    It is never negative, and 0 only where p and q are equal. Raises ValueError if shapes do not fit, TypeError if the
    targets are not integers, IndexError if one is out of range.

    Forward, with all leading axes folded into n, and k_n = 1 if the target of row n counts, else 0:

        k := counted
        p_nv = exp(z_nv)/Σ_v' exp(z_nv')        q_nv = exp(w_nv)/Σ_v' exp(w_nv')
        s_nv = log(p_nv)        r_nv = s_nv − log(q_nv)
        J_n = 1/2 (Σ_v p_nv r_nv − Σ_v q_nv r_nv) = 1/2 Σ_v (p_nv − q_nv) r_nv
        count = max(1, Σ_n k_n)        loss = 1/count Σ_n k_n J_n

    With the row's maximum subtracted, no exponential overflows, and no logarithm is of a small number:

        z_max_n = max_v(z_nv)        z_sum_n = Σ_v exp(z_nv − z_max_n)        p_nv = exp(z_nv − z_max_n)/z_sum_n
        w_max_n = max_v(w_nv)        w_sum_n = Σ_v exp(w_nv − w_max_n)        q_nv = exp(w_nv − w_max_n)/w_sum_n
        s_nv = z_nv − z_max_n − log(z_sum_n)        t_nv := w_nv − w_max_n − log(w_sum_n)        r_nv = s_nv − t_nv

    Backward. The derivatives of p and of its logarithm by the logits:

        ∂p_nv'/∂z_nv = p_nv' (δ_vv' − p_nv)        ∂s_nv'/∂z_nv = δ_vv' − p_nv

    Both occur in J. The second sum has no second term, since p and q both sum to 1:

        ∂J_n/∂z_nv = 1/2 Σ_v' r_nv' p_nv' (δ_vv' − p_nv) + 1/2 Σ_v' (p_nv' − q_nv') (δ_vv' − p_nv)
        a_n := Σ_v p_nv r_nv
        ∂J_n/∂z_nv = 1/2 (p_nv (r_nv − a_n) + p_nv − q_nv)

    Exchanging z and w exchanges p and q, and changes the sign of r:

        b_n := Σ_v q_nv r_nv
        ∂J_n/∂w_nv = 1/2 (q_nv (b_n − r_nv) + q_nv − p_nv)

    In the mean, each row that counts has weight 1/count, and every other row has weight 0:

        share_n := dloss k_n / (2 count)
        dz_nv = share_n (p_nv (r_nv − a_n) + p_nv − q_nv)
        dw_nv = share_n (q_nv (b_n − r_nv) + q_nv − p_nv)

    In code:

        dz = share * (p * (r - a) + p - q)
        dw = share * (q * (b - r) + q - p)

    The cache keeps the logits, and six numbers of each row. p, q and r are computed again. Source: Liang et al.,
    "R-Drop: regularized dropout for neural networks", 2021. There one model makes both predictions, under two draws of
    its dropout.
    """
    counted = given_rows(z, w, targets, ignore_index)["counted"]
    xp = array_module(z)
    z_max, w_max = (as_rows(x).max(axis=-1, keepdims=True) for x in (z, w))
    z_sum, w_sum = (xp.exp(as_rows(x) - m).sum(axis=-1, keepdims=True) for x, m in ((z, z_max), (w, w_max)))
    p, q, r = predictions(z, w, z_max, z_sum, w_max, w_sum)
    a, b = ((x * r).sum(axis=-1, keepdims=True) for x in (p, q))
    row = ((p - q) * r).sum(axis=-1) / 2  # (N,)
    count = xp.maximum(1, counted.sum(dtype=row.dtype))
    loss = xp.where(counted, row, 0).sum() / count
    return loss, SymmetricKLCache(z, w, z_max, z_sum, w_max, w_sum, a, b, counted, count)


def as_rows(z: Array) -> Array:
    """z (N, V), in the type in which sums are taken."""
    return widen(z).reshape(-1, z.shape[-1])


def predictions(
    z: Array, w: Array, z_max: Array, z_sum: Array, w_max: Array, w_sum: Array
) -> tuple[Array, Array, Array]:
    """p, q and r (N, V)."""
    xp, s, t = array_module(z), as_rows(z) - z_max, as_rows(w) - w_max
    return xp.exp(s) / z_sum, xp.exp(t) / w_sum, (s - xp.log(z_sum)) - (t - xp.log(w_sum))


@backward
def symmetric_kl_backward(dloss: Array | float, cache: SymmetricKLCache) -> tuple[Array, Array]:
    """(dz, dw): see `symmetric_kl`. dloss: a number, or a zero-dimensional array."""
    expect_gradient("dloss", dloss, ())
    *predicted, a, b, counted, count = cache
    p, q, r = predictions(*predicted)
    share = counted[:, None] * (dloss / (2 * count))
    dz = share * (p * (r - a) + p - q)
    dw = share * (q * (b - r) + q - p)
    return tuple(dx.reshape(x.shape).astype(x.dtype, copy=False) for dx, x in ((dz, cache.z), (dw, cache.w)))

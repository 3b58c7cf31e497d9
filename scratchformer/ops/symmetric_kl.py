"""How far two predictions of the same token are apart: the symmetric Kullback-Leibler divergence."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, array_module
from ..dispatch import backward, operation
from .checks import expect_columns, expect_floating, expect_gradient
from .cross_entropy import as_rows
from .precision import widen
from .softmax import log_softmax


class SymmetricKLCache(NamedTuple):
    p: Array  # (N, V)
    q: Array  # (N, V)
    r: Array  # (N, V)
    counted: Array  # (N, 1), boolean
    n: Array  # how many rows count, but at least 1
    shape: tuple[int, ...]
    dtypes: tuple[Any, Any]  # of z and w


@operation
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
        count = Σ_n k_n        loss = Σ_n k_n J_n / max(1, count)

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

        share_n := dloss k_n / (2 max(1, count))
        dz_nv = share_n (p_nv (r_nv − a_n) + p_nv − q_nv)
        dw_nv = share_n (q_nv (b_n − r_nv) + q_nv − p_nv)

    In code:

        a, b = ((x * r).sum(axis=-1, keepdims=True) for x in (p, q))
        dz = share * (p * (r - a) + p - q)
        dw = share * (q * (b - r) + q - p)

    The cache keeps p, q and r. Source: Liang et al., "R-Drop: regularized dropout for neural networks", 2021. There one
    model makes both predictions, under two draws of its dropout.
    """
    pair, counted = as_pairs(z, w, targets, ignore_index)
    xp = array_module(z)
    log_p, log_q = (log_softmax(widen(x))[0] for x in pair)
    p, q, r = xp.exp(log_p), xp.exp(log_q), log_p - log_q
    row = ((p - q) * r).sum(axis=-1) / 2  # (N,)
    n = xp.maximum(1, counted.sum(dtype=row.dtype))
    loss = xp.where(counted, row, 0).sum() / n
    return loss, SymmetricKLCache(p, q, r, counted[:, None], n, z.shape, (z.dtype, w.dtype))


def as_pairs(z: Array, w: Array, targets: Array, ignore_index: int | None) -> tuple[tuple[Array, Array], Array]:
    """The arguments of `symmetric_kl`, checked and flattened: z and w (N, V), and which rows count (N,)."""
    expect_floating(z=z, w=w)
    expect_columns("z", z)
    rows, _, counted = as_rows(z, targets, ignore_index, 0.0)
    array_module(z, w, targets)
    if w.shape != z.shape:
        raise ValueError(f"w: expected {tuple(z.shape)}, got {tuple(w.shape)}")
    return (rows, w.reshape(rows.shape)), counted


@backward
def symmetric_kl_backward(dloss: Array | float, cache: SymmetricKLCache) -> tuple[Array, Array]:
    """(dz, dw): see `symmetric_kl`. dloss: a number, or a zero-dimensional array."""
    expect_gradient("dloss", dloss, ())
    p, q, r, counted, n, shape, dtypes = cache
    share = counted * (dloss / (2 * n))
    a, b = ((x * r).sum(axis=-1, keepdims=True) for x in (p, q))
    dz = share * (p * (r - a) + p - q)
    dw = share * (q * (b - r) + q - p)
    return tuple(x.reshape(shape).astype(dtype, copy=False) for x, dtype in zip((dz, dw), dtypes, strict=True))

"""The symmetric Kullback-Leibler divergence in compiled code, row by row; logits may be bfloat16."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_gradient
from ..ops.symmetric_kl import as_pairs
from .numba_code import compiled, plus
from .numba_math import alike, exp, narrow, numbers_like, read, rows
from .numba_rows import maximum_of_row


class FastSymmetricKLCache(NamedTuple):
    z: np.ndarray  # (..., V)
    w: np.ndarray  # (..., V)
    totals: np.ndarray  # (4, N): for z and then for w the maximum m and, of z − m, log Z
    means: np.ndarray  # (2, N): a and b
    counted: np.ndarray  # (N,), boolean
    n: int  # how many rows count


@ops.symmetric_kl.twin(np.ndarray, fast=True)
def symmetric_kl(z: np.ndarray, w: np.ndarray, targets: np.ndarray, ignore_index: int | None = None) -> tuple[Any, Any]:
    """As `ops.symmetric_kl`, row by row.

    Forward, for each row n, with m and M for the maxima of its logits, and k_n = 1 if its target counts, else 0:

        k := counted
        m_n = max_v(z_nv)        M_n = max_v(w_nv)
        x_n = log(Σ_v exp(z_nv − m_n))        y_n = log(Σ_v exp(w_nv − M_n))
        s_nv := z_nv − m_n − x_n        t_nv := w_nv − M_n − y_n
        a_n = Σ_v exp(s_nv) (s_nv − t_nv)        b_n = Σ_v exp(t_nv) (s_nv − t_nv)
        J_n = 1/2 Σ_v (exp(s_nv) − exp(t_nv)) (s_nv − t_nv)
        loss = Σ_n k_n J_n / max(1, Σ_n k_n)

    Backward. As derived in `symmetric_kl`, with p = exp(s) and q = exp(t):

        share_n := dloss k_n / (2 max(1, Σ_n' k_n'))
        dz_nv = share_n (exp(s_nv) (s_nv − t_nv − a_n) + exp(s_nv) − exp(t_nv))
        dw_nv = share_n (exp(t_nv) (b_n − s_nv + t_nv) + exp(t_nv) − exp(s_nv))

    The cache keeps the logits, and six numbers for each row.

        write_gradients(rows(z), rows(w), totals, means, share, rows(dz), rows(dw))
    """
    if not alike(z, w) or not isinstance(targets, np.ndarray):
        return ops.symmetric_kl.reference(z, w, targets, ignore_index)
    (z_rows, w_rows), counted = as_pairs(z, w, targets, ignore_index)
    z_rows, w_rows = rows(z_rows), rows(w_rows)
    N = len(z_rows)
    totals, means, row = (numbers_like(z_rows, shape) for shape in ((4, N), (2, N), N))
    write_means(z_rows, w_rows, totals, means, row)
    n = int(counted.sum())
    loss = np.where(counted, row, 0).sum() / max(1, n)
    return loss, FastSymmetricKLCache(z, w, totals, means, counted, n)


@ops.symmetric_kl_backward.twin(FastSymmetricKLCache)
def symmetric_kl_backward(dloss: np.floating | float, cache: FastSymmetricKLCache) -> tuple[np.ndarray, np.ndarray]:
    """(dz, dw), as `ops.symmetric_kl_backward`."""
    expect_gradient("dloss", dloss, ())
    z, w, totals, means, counted, n = cache
    dz, dw = np.empty(z.shape, z.dtype), np.empty(w.shape, w.dtype)
    share = (counted * (dloss / (2 * max(1, n)))).astype(totals.dtype)  # (N,)
    write_gradients(rows(z), rows(w), totals, means, share, rows(dz), rows(dw))
    return dz, dw


@compiled
def write_means(z: Any, w: Any, totals: Any, means: Any, row: Any) -> None:
    number = totals.dtype.type
    powers, inverse = np.empty((2, z.shape[1]), totals.dtype), np.empty(2, totals.dtype)
    for n in range(z.shape[0]):
        for k in range(2):
            both = z if k == 0 else w
            logits, e, most, total = both[n], powers[k], maximum_of_row(both, n), number(0)
            for v in range(logits.size):
                e[v] = exp(read(logits[v]) - most)
                total = plus(total, e[v])
            totals[2 * k, n], totals[2 * k + 1, n], inverse[k] = most, np.log(total), number(1) / total
        left, right, m, x, big_m, y = z[n], w[n], totals[0, n], totals[1, n], totals[2, n], totals[3, n]
        p_powers, q_powers, p_share, q_share = powers[0], powers[1], inverse[0], inverse[1]
        a, b, j = number(0), number(0), number(0)
        for v in range(left.size):
            p, q = p_powers[v] * p_share, q_powers[v] * q_share
            r = ((read(left[v]) - m) - x) - ((read(right[v]) - big_m) - y)
            a, b, j = plus(a, p * r), plus(b, q * r), plus(j, (p - q) * r)
        means[0, n], means[1, n], row[n] = a, b, j / number(2)


@compiled
def write_gradients(z: Any, w: Any, totals: Any, means: Any, share: Any, dz: Any, dw: Any) -> None:
    for n in range(z.shape[0]):
        left, right, to_left, to_right = z[n], w[n], dz[n], dw[n]
        m, x, big_m, y = totals[0, n], totals[1, n], totals[2, n], totals[3, n]
        a, b, weight = means[0, n], means[1, n], share[n]
        for v in range(left.size):
            s, t = (read(left[v]) - m) - x, (read(right[v]) - big_m) - y
            p, q, r = exp(s), exp(t), s - t
            to_left[v] = narrow(weight * (p * (r - a) + p - q), to_left)
            to_right[v] = narrow(weight * (q * (b - r) + q - p), to_right)

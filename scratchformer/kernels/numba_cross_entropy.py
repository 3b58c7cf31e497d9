"""Softmax with cross-entropy in compiled code, row by row; logits may be bfloat16."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_gradient
from ..ops.cross_entropy import as_rows
from .numba_code import compiled, plus
from .numba_math import alike, constant, exp, narrow, numbers_like, read, rows
from .numba_rows import maximum_of_row


class FastCrossEntropyCache(NamedTuple):
    logits: np.ndarray  # (..., V)
    z_max: np.ndarray  # (N,)
    inverse: np.ndarray  # (N,), 1/Σ_v exp(z_v − z_max)
    targets: np.ndarray  # (N,), 0 where ignored
    counted: np.ndarray  # (N,), boolean
    n: int  # how many targets count
    label_smoothing: float


@ops.cross_entropy.twin(np.ndarray, fast=True)
def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> tuple[Any, Any]:
    """As `ops.cross_entropy`, row by row.

    Forward, for each row n. The target of a row that does not count is 0, and its counted_n is 0:

        z := logits        ε := label_smoothing
        m_n = max_v(z_nv)        r_n := 1/Σ_v exp(z_nv − m_n)        inverse_n = r_n
        ℓ_n = −log(r_n) − (1 − ε) (z_{n,targets_n} − m_n) − ε mean_v(z_nv − m_n)
        loss = (Σ_n counted_n ℓ_n)/(Σ_n counted_n)

    Backward. As derived in `cross_entropy`:

        t_nv := (1 − ε) [v = targets_n] + ε/V
        share_n := dloss counted_n/(Σ_n' counted_n')
        dz_nv = share_n (exp(z_nv − m_n) r_n − t_nv)

    Both directions read each logit from memory once, and compute in float32 for bfloat16 logits. The cache keeps the
    logits, and m and r of each row.

        write_gradient(rows(logits), z_max, inverse, targets, share, label_smoothing, rows(dlogits))
    """
    if not alike(logits) or not isinstance(targets, np.ndarray):
        return ops.cross_entropy.twins[np.ndarray](logits, targets, ignore_index, label_smoothing)
    _, targets, counted = as_rows(logits, targets, ignore_index, label_smoothing)
    z, targets = rows(logits), np.ascontiguousarray(targets, np.intp)
    z_max, inverse, row = (numbers_like(z, len(z)) for _ in range(3))
    write_losses(z, targets, label_smoothing, z_max, inverse, row)
    n = int(counted.sum())
    loss = np.where(counted, row, 0).sum() / max(1, n)
    return loss, FastCrossEntropyCache(logits, z_max, inverse, targets, counted, n, label_smoothing)


@ops.cross_entropy_backward.twin(FastCrossEntropyCache)
def cross_entropy_backward(dloss: np.floating | float, cache: FastCrossEntropyCache) -> np.ndarray:
    """dlogits, as `ops.cross_entropy_backward`."""
    expect_gradient("dloss", dloss, ())
    logits, z_max, inverse, targets, counted, n, label_smoothing = cache
    dlogits = np.empty(logits.shape, logits.dtype)
    share = (counted * (dloss / max(1, n))).astype(inverse.dtype)  # (N,)
    write_gradient(rows(logits), z_max, inverse, targets, share, label_smoothing, rows(dlogits))
    return dlogits


@compiled
def write_losses(z: Any, targets: Any, smoothing: Any, z_max: Any, inverse: Any, row: Any) -> None:
    number = row.dtype.type
    one, share = number(1), number(smoothing)
    for n in range(z.shape[0]):
        logits = z[n]
        most, total, sum_z = maximum_of_row(z, n), number(0), number(0)
        for v in range(logits.size):
            shifted = read(logits[v]) - most
            total = plus(total, exp(shifted))
            sum_z = plus(sum_z, shifted)
        z_max[n], inverse[n] = most, one / total
        row[n] = np.log(total) - (one - share) * (read(logits[targets[n]]) - most)
        if share > 0:
            row[n] -= share * sum_z / number(logits.size)


@compiled
def write_gradient(z: Any, z_max: Any, inverse: Any, targets: Any, share: Any, smoothing: Any, dz: Any) -> None:
    number = share.dtype.type
    for n in range(z.shape[0]):
        logits, to, most, r, weight = z[n], dz[n], z_max[n], inverse[n], share[n]
        least = number(smoothing) / number(logits.size)
        for v in range(logits.size):
            to[v] = narrow(weight * (exp(read(logits[v]) - most) * r - least), to)
        v = targets[n]
        p = exp(read(logits[v]) - most) * r
        to[v] = narrow(weight * (p - least - (constant(1, p) - number(smoothing))), to)

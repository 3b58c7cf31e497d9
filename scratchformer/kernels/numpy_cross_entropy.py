"""Softmax with cross-entropy on NumPy, in pieces of rows that stay in cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_gradient
from ..ops.cross_entropy import as_rows
from .numpy_arrays import one_real_dtype, row_pieces
from .numpy_half import in_half

plain = in_half(ops.cross_entropy, ops.cross_entropy_backward)


class NumpyCrossEntropyCache(NamedTuple):
    logits: np.ndarray  # (N, V)
    z_max: np.ndarray  # (N, 1)
    log_z: np.ndarray  # (N, 1), of z − z_max
    targets: np.ndarray  # (N,), 0 where ignored
    counted: np.ndarray  # (N, 1), boolean
    n: int  # how many targets count
    label_smoothing: float
    shape: tuple[int, ...]


@ops.cross_entropy.twin(np.ndarray)
def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> tuple[np.floating, NumpyCrossEntropyCache]:
    """As `ops.cross_entropy`, a piece of rows at a time.

    Forward, for each row n. The target of a row that does not count is 0, and its counted_n is 0:

        z := logits        m := z_max        ε := label_smoothing
        m_n = max_v(z_nv)        log_z_n = log(Σ_v exp(z_nv − m_n))
        t_nv = (1 − ε) [v = targets_n] + ε/V
        ℓ_n = −Σ_v t_nv (z_nv − m_n − log_z_n)
        loss = (Σ_n counted_n ℓ_n)/(Σ_n counted_n)

    Since Σ_v t_nv = 1, the loss of a row needs three numbers: its log-sum-exp, the logit of its target and the mean of
    its logits. So the exponentials of a piece of rows can be dropped before the next piece is read:

        ℓ_n = log_z_n − (1 − ε) (z_{n,targets_n} − m_n) − ε mean_v(z_nv − m_n)

    Backward. The softmax p takes one exponential, and the gradient of a row's loss is that of `cross_entropy`:

        p_nv := exp(z_nv − m_n − log_z_n) = softmax_v(z_nv)        ∂ℓ_n/∂z_nv = p_nv − t_nv
        share_n := dloss counted_n/(Σ_n' counted_n')               dz_nv = share_n ∂ℓ_n/∂z_nv = share_n (p_nv − t_nv)

    For each piece, dz is computed in place in dlogits: it starts as p, then t is subtracted, then it is multiplied by
    the share.

        share = (counted * (dloss / max(1, n))).astype(z.dtype)
        dz = np.subtract(z[part], z_max[part], out=dlogits[part])
        dz -= log_z[part]
        np.exp(dz, out=dz)
        dz -= label_smoothing / z.shape[1]
        dz[np.arange(len(dz)), targets[part]] -= 1 - label_smoothing
        dz *= share[part]

    Forward allocates no array of the size of the logits, and backward one, the gradient. The cache keeps the logits,
    and m and log Z of each row.
    """
    if not one_real_dtype(logits) or not isinstance(targets, np.ndarray):
        return plain(logits, targets, ignore_index, label_smoothing)
    z, targets, counted = as_rows(logits, targets, ignore_index, label_smoothing)
    z_max, log_z, row = (np.empty((z.shape[0], 1), z.dtype) for _ in range(3))
    for part in row_pieces(z):
        np.max(z[part], axis=-1, keepdims=True, out=z_max[part])
        shifted = z[part] - z_max[part]
        row[part] = np.take_along_axis(shifted, targets[part, None], axis=1)
        row[part] *= label_smoothing - 1
        if label_smoothing:
            row[part] -= label_smoothing * shifted.mean(axis=-1, keepdims=True)
        np.exp(shifted, out=shifted)
        np.sum(shifted, axis=-1, keepdims=True, out=log_z[part])
    np.log(log_z, out=log_z)
    row += log_z
    n = int(counted.sum())
    loss = np.where(counted, row[:, 0], 0).sum() / max(1, n)
    return loss, NumpyCrossEntropyCache(z, z_max, log_z, targets, counted[:, None], n, label_smoothing, logits.shape)


@ops.cross_entropy_backward.twin(NumpyCrossEntropyCache)
def cross_entropy_backward(dloss: np.floating | float, cache: NumpyCrossEntropyCache) -> np.ndarray:
    """dlogits, as `ops.cross_entropy_backward`."""
    expect_gradient("dloss", dloss, ())
    z, z_max, log_z, targets, counted, n, label_smoothing, shape = cache
    dlogits = np.empty_like(z)
    share = (counted * (dloss / max(1, n))).astype(z.dtype)  # (N, 1)
    for part in row_pieces(z):
        dz = np.subtract(z[part], z_max[part], out=dlogits[part])
        dz -= log_z[part]
        np.exp(dz, out=dz)
        if label_smoothing:
            dz -= label_smoothing / z.shape[1]
        dz[np.arange(len(dz)), targets[part]] -= 1 - label_smoothing
        dz *= share[part]
    return dlogits.reshape(shape)

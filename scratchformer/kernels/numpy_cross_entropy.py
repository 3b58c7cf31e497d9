"""Softmax with cross-entropy on NumPy: one exponential in each direction, and no second array of logits in forward.

Rows are processed in pieces that stay in cache. Of each row, forward keeps only the two parts of the log-sum-exp
L = max + log Σ_v exp(z_v − max). Backward computes the softmax, exp(z − L), in the array that becomes dlogits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.cross_entropy import as_rows, check_dloss
from .numpy_arrays import one_real_dtype, row_pieces

plain = ops.cross_entropy.reference


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
    """As `ops.cross_entropy`."""
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
    check_dloss(dloss)
    z, z_max, log_z, targets, counted, n, label_smoothing, shape = cache
    dlogits = np.empty_like(z)
    share = (counted * (dloss / max(1, n))).astype(z.dtype)  # (N, 1)
    for part in row_pieces(z):
        p = np.subtract(z[part], z_max[part], out=dlogits[part])
        p -= log_z[part]
        np.exp(p, out=p)
        if label_smoothing:
            p -= label_smoothing / z.shape[1]
        p[np.arange(len(p)), targets[part]] -= 1 - label_smoothing
        p *= share[part]
    return dlogits.reshape(shape)

"""Softmax with cross-entropy on a GPU: each direction reads the logits from memory once."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array
from ..ops.checks import expect_gradient
from ..ops.cross_entropy import as_rows
from .cupy_code import alike, contiguous, kernel, real, vector
from .cupy_products import padded_empty


class CudaCrossEntropyCache(NamedTuple):
    logits: Array  # (N, V)
    z_max: Array  # (N,)
    log_z: Array  # (N,), of z − z_max
    targets: Array  # (N,), 0 where ignored
    counted: Array  # (N,), boolean
    n: Array  # how many targets count, but at least 1
    label_smoothing: float
    shape: tuple[int, ...]


def sizes(z: Array, *others: Array) -> dict[str, int]:
    """The numbers that a thread reads at once, and the threads for a row of z (N, V)."""
    V = vector(z.dtype, *(a for x in (z, *others) for a in (x.data.ptr, x.strides[0])))
    return dict(V=V, THREADS=min(512, max(32, 32 * (z.shape[1] // (64 * V)))))


def stride(z: Array) -> np.int64:
    """Numbers from one row of z (N, V) to the next."""
    return np.int64(z.strides[0] // z.itemsize)


@ops.cross_entropy.twin(cupy.ndarray, fast=True)
def cross_entropy(
    logits: Array, targets: Array, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> tuple[Array, Any]:
    """As `ops.cross_entropy`, with a block of threads for each row.

    Forward, for each row n. The target of a row that does not count is 0, and its counted_n is 0:

        z := logits        ε := label_smoothing        count := n
        m_n = max_v(z_nv)        log_z_n := log(Σ_v exp(z_nv − m_n))
        ℓ_n = log_z_n − (1 − ε) (z_{n,targets_n} − m_n) − ε mean_v(z_nv − m_n)
        loss = (Σ_n counted_n ℓ_n)/count

    Each thread goes through some of the logits. It keeps their greatest so far, m', and the sum of exp(z − m'). When a
    greater one comes, it multiplies the sum by exp(m' − m). In the end the sums of all threads are made sums of
    exp(z − m_n) in the same way, and added.

    Backward. As derived in `cross_entropy`:

        t_nv := (1 − ε) [v = targets_n] + ε/V
        share_n := dloss counted_n/count
        dz_nv = share_n (exp(z_nv − m_n − log_z_n) − t_nv)

    Both directions compute in float32 for logits in half precision. The cache keeps the logits, and m and log Z of each
    row.
    """
    if not alike(logits) or logits.ndim == 0 or not logits.size or not isinstance(targets, cupy.ndarray):
        return ops.cross_entropy.reference(logits, targets, ignore_index, label_smoothing)
    z, targets, counted = as_rows(logits, targets, ignore_index, label_smoothing)
    z, targets = z if z.strides[1] == z.itemsize else contiguous(z), targets.astype(np.int32)
    N, wide = len(z), real(z.dtype)
    z_max, log_z, row = (cupy.empty(N, wide) for _ in range(3))
    size = sizes(z)
    run = kernel("cross_entropy", "cross_entropy", z.dtype.name, **size)
    numbers = wide.type(label_smoothing), np.int32(z.shape[1])
    run((N,), (size["THREADS"],), (z, stride(z), targets, *numbers, z_max, log_z, row))
    n = cupy.maximum(1, counted.sum(dtype=wide))
    loss = cupy.where(counted, row, 0).sum() / n
    return loss, CudaCrossEntropyCache(z, z_max, log_z, targets, counted, n, label_smoothing, logits.shape)


@ops.cross_entropy_backward.twin(CudaCrossEntropyCache)
def cross_entropy_backward(dloss: Array | float, cache: CudaCrossEntropyCache) -> Array:
    """dlogits, as `ops.cross_entropy_backward`."""
    expect_gradient("dloss", dloss, ())
    z, z_max, log_z, targets, counted, n, label_smoothing, shape = cache
    N, V = z.shape
    dz, wide = padded_empty(N, V, z.dtype), z_max.dtype
    share = (counted * (dloss / n)).astype(wide)
    size = sizes(z, dz)
    run = kernel("cross_entropy", "cross_entropy_backward", z.dtype.name, **size)
    numbers = wide.type(label_smoothing), np.int32(V)
    run((N,), (size["THREADS"],), (z, stride(z), targets, z_max, log_z, share, *numbers, dz, stride(dz)))
    return dz.reshape(shape)

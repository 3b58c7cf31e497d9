"""The gradient of an embedding table on a GPU, summed in a fixed order."""

from __future__ import annotations

import cupy
import numpy as np

from .. import ops
from ..backend import Array
from ..ops.embedding import EmbeddingCache, check_gradient
from .cupy_code import alike, contiguous, kernel, real
from .cupy_products import attempt, available

FEW = 1024  # rows of a table whose gradient is a product with a one-hot matrix


def fits(ids: Array, table: Array) -> bool:
    return alike(table) and type(ids) is cupy.ndarray and ids.dtype.kind in "iu" and ids.size > 0 and table.size > 0


def embedding(ids: Array, table: Array) -> tuple[Array, tuple]:
    """As `ops.embedding`; only the backward differs.

    On a GPU many threads would add to the same row. With atomic additions the order, and so the last bits, would change
    from run to run. For a small table the sum is computed as the product of dy with a one-hot matrix.

    For a large one the ids are sorted first. The place of an id is the number of ids that are smaller, or equal and
    earlier. That is N² comparisons, which are cheap for the N of a batch. The rows of dy with the same id are now
    neighbours, and one block of threads adds them up. Sums are float32 for half precision, and so is a new dtable.
    """
    y, cache = ops.embedding.reference(ids, table)
    return y, tuple(cache)


def embedding_backward(dy: Array, cache: tuple, out: Array | None = None) -> Array:
    """dtable, or `out` with dtable added to it, as `ops.embedding_backward`; in half precision a new one is float32."""
    ids, (V, C) = cache
    check_gradient(dy, EmbeddingCache(*cache), out)
    if out is not None and (out.dtype != real(dy.dtype) or not out.flags.c_contiguous):
        return ops.embedding_backward.reference(dy, EmbeddingCache(*cache), out)
    dtable = cupy.zeros((V, C), real(dy.dtype)) if out is None else out
    rows, ids = contiguous(dy).reshape(-1, C), contiguous(ids).reshape(-1).astype(np.int32)
    if not (V <= FEW and available() and by_product(rows, ids, dtable)):
        by_sorting(rows, ids, dtable)
    return dtable


def by_product(dy: Array, ids: Array, dtable: Array) -> bool:
    """dtable += hᵀ dy, with h one-hot. False if that cannot be computed."""
    N, V = len(ids), len(dtable)
    h, change = cupy.empty((N, V), dy.dtype), cupy.empty_like(dtable)
    run = kernel("embedding", "one_hot", dy.dtype.name)
    run((-(-h.size // 256),), (256,), (ids, h, np.int32(N), np.int32(V)))
    if not attempt(h.T, dy, change):
        return False
    dtable += change
    return True


def by_sorting(dy: Array, ids: Array, dtable: Array) -> None:
    """dtable[v] += Σ dy[n] over the n with ids[n] = v. Rows of one id keep their order."""
    (N, C), kind = dy.shape, dy.dtype.name
    place, order, ordered = cupy.zeros(N, np.int32), cupy.empty(N, np.int32), cupy.empty(N, np.int32)
    tiles = -(-N // 256)
    kernel("embedding", "places", kind)((tiles, tiles), (256,), (ids, place, np.int32(N)))
    kernel("embedding", "order_by_place", kind)((tiles,), (256,), (ids, place, order, ordered, np.int32(N)))
    run = kernel("embedding", "embedding_backward", kind)
    run((N,), (min(256, 32 * -(-C // 32)),), (dy, order, ordered, dtable, np.int32(N), np.int32(C)))


ops.embedding.add_twin(cupy.ndarray, fits, embedding, embedding_backward, fast=True)

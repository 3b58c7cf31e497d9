"""The embedding in compiled code: rows are added to the gradient as they are, one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_ids
from ..ops.embedding import EmbeddingCache
from .numba_code import as_bits, compiled
from .numba_math import alike, numbers_like, read, rows


class FastEmbeddingCache(NamedTuple):
    ids: np.ndarray  # (...)
    shape: tuple[int, int]  # of the table, (V, C)


@ops.embedding.twin(np.ndarray, fast=True)
def embedding(ids: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, Any]:
    """As `ops.embedding`, with the gradient added row by row.

    Forward and backward, as in `embedding`, with all leading axes folded into n:

        y_nc = table_vc with v = ids_n
        dtable_vc = Σ_n [ids_n = v] dy_nc

    For n = 0, 1, ... in this order, the row dy_n is added to row ids_n, so an id may occur any number of times:

        add_rows(np.ascontiguousarray(ids.reshape(-1), np.intp), flat, dtable)

    dtable is float32 for a bfloat16 dy. The cache is that of the reference.
    """
    if not (alike(table) and table.ndim == 2 and isinstance(ids, np.ndarray) and ids.size):
        return ops.embedding.reference(ids, table)
    expect_ids("ids", ids, len(table))
    return as_bits(table)[ids].view(table.dtype), FastEmbeddingCache(ids, table.shape)


@ops.embedding_backward.twin(FastEmbeddingCache)
def embedding_backward(dy: np.ndarray, cache: FastEmbeddingCache, out: np.ndarray | None = None) -> np.ndarray:
    """dtable, as `ops.embedding_backward`."""
    ids, (V, C) = cache
    expect_ids("ids", ids, V)  # again: compiled code would write anywhere if they had changed since
    if not (alike(dy) and dy.shape == (*ids.shape, C)):
        return ops.embedding_backward.reference(dy, EmbeddingCache(*cache), out)
    flat = rows(dy)
    dtable = numbers_like(flat, (V, C)) if out is None else out
    if out is None:
        dtable[...] = 0
    elif not (type(out) is np.ndarray and out.shape == (V, C) and out.flags.c_contiguous) or (
        out.dtype != numbers_like(flat, 0).dtype
    ):
        return ops.embedding_backward.reference(dy, EmbeddingCache(*cache), out)
    add_rows(np.ascontiguousarray(ids.reshape(-1), np.intp), flat, dtable)
    return dtable


@compiled
def add_rows(ids: Any, dy: Any, dtable: Any) -> None:
    for n in range(ids.size):
        row, to = dy[n], dtable[ids[n]]
        for c in range(row.size):
            to[c] += read(row[c])

"""The embedding gradient on NumPy: `np.add.at` is several times faster on a flat array than on rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.embedding import EmbeddingCache, check_gradient
from ..ops.precision import widen

plain, plain_backward = ops.embedding.reference, ops.embedding_backward.reference


class NumpyEmbeddingCache(NamedTuple):
    ids: np.ndarray  # (...)
    shape: tuple[int, int]  # of the table, (V, C)


@ops.embedding.twin(np.ndarray)
def embedding(ids: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, NumpyEmbeddingCache]:
    """As `ops.embedding`, with the gradient summed element by element in the flat table.

    Forward and backward, as in `embedding`, with all leading axes folded into n:

        y_nc = table_vc with v = ids_n
        dtable_vc = Σ_n [ids_n = v] dy_nc

    In memory the rows of the table follow one another, so element (v, c) is at place v C + c. No two elements share a
    place, so an element of dtable is also the sum of all elements of dy that go to its place:

        places_nc := ids_n C + c
        dtable_vc = Σ_{n,c'} [places_nc' = v C + c] dy_nc'

    A place that occurs several times is added to several times:

        places = ids.reshape(-1, 1).astype(np.intp) * C + np.arange(C)
        np.add.at(dtable.reshape(-1), places.reshape(-1), dy.reshape(-1))
        return dtable

    `np.add.at` has a fast path for one-dimensional arrays, which it does not take for whole rows. The cache is that of
    the reference.
    """
    y, cache = plain(ids, table)
    return y, NumpyEmbeddingCache(*cache) if type(table) is np.ndarray else cache


@ops.embedding_backward.twin(NumpyEmbeddingCache)
def embedding_backward(dy: np.ndarray, cache: NumpyEmbeddingCache, out: np.ndarray | None = None) -> np.ndarray:
    """dtable, as `ops.embedding_backward`."""
    ids, (V, C) = cache
    check_gradient(dy, EmbeddingCache(*cache), out)
    dtable = np.zeros((V, C), dy.dtype) if out is None else out
    wide = widen(dy)
    if not dtable.flags.c_contiguous or dtable.dtype != wide.dtype:
        return plain_backward(dy, cache, out)
    dy = wide
    places = ids.reshape(-1, 1).astype(np.intp) * C + np.arange(C)
    np.add.at(dtable.reshape(-1), places.reshape(-1), dy.reshape(-1))
    return dtable

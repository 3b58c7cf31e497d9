"""Rows of a table, chosen by ids."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, scatter_add, widen, zeros_like
from ..checks import expect_columns, expect_floating, expect_ids, expect_like, expect_shape
from ..dispatch import backward, operation


class EmbeddingCache(NamedTuple):
    ids: Array  # (...)
    shape: tuple[int, int]  # of the table, (V, C)


def check_embedding(ids: Array, table: Array) -> None:
    """Raise TypeError, ValueError or IndexError unless these are valid arguments of `embedding`."""
    expect_floating(table=table)
    array_module(ids, table)
    expect_shape("table", table, "V C")
    expect_columns("table", table)
    expect_ids("ids", ids, table.shape[0])


@operation(given=check_embedding)
def embedding(ids: Array, table: Array) -> tuple[Array, EmbeddingCache]:
    """y_n = table[ids_n]: a row of the table for each id.

    ids: (...), integers from 0 to V − 1. table: (V, C). Returns y (..., C) and the cache.
    Raises TypeError if the ids are not integers, IndexError if one is out of range, ValueError if the table is not
    (V, C).

    Forward, with all leading axes folded into n. A lookup is a product with a one-hot matrix:

        y_nc = Σ_v [ids_n = v] table_vc
        y_nc = table_vc with v = ids_n

    Backward. The product is linear in the table, and the ids have no gradient:

        ∂y_nc/∂table_vc = [ids_n = v]
        dtable_vc = Σ_n dy_nc ∂y_nc/∂table_vc = Σ_n [ids_n = v] dy_nc

    Row v collects dy from every occurrence of token v. The gradients of a token that occurs twice are both added, so
    the addition must be unbuffered: `dtable[ids] += dy` would keep only the last occurrence.

        dtable = scatter_add(dtable, ids, dy)

    The cache keeps the ids and the shape of the table. For tables much larger than a batch,
    `embedding_backward(dy, cache, out=grad)` adds into `grad` instead of a new table of zeros.
    """
    check_embedding(ids, table)
    xp = array_module(ids, table)
    rows = xp.take(table, xp.reshape(ids, (-1,)), axis=0)
    return xp.reshape(rows, (*ids.shape, table.shape[1])), EmbeddingCache(ids, table.shape)


def check_gradient(dy: Array, cache: EmbeddingCache, out: Array | None) -> None:
    """Raise TypeError or ValueError unless dy, and `out` if given, fit this cache of `embedding`."""
    expect_like("dy", dy, (*cache.ids.shape, cache.shape[1]))
    if out is not None:
        expect_like("out", out, cache.shape)


@backward
def embedding_backward(dy: Array, cache: EmbeddingCache, out: Array | None = None) -> Array:
    """dtable, or `out` with dtable added to it: see `embedding`."""
    check_gradient(dy, cache, out)
    xp = array_module(dy, cache.ids)
    dtype, dy = dy.dtype, widen(dy)
    # float16 is summed in a separate float32 table
    dtable = zeros_like(dy, cache.shape) if out is None or dy.dtype != dtype else out
    ids, dy = xp.reshape(cache.ids, (-1,)), xp.reshape(dy, (-1, dy.shape[-1]))
    dtable = scatter_add(dtable, ids, dy)
    if out is None:
        return cast(dtable, dtype)
    if dtable is not out:
        out += dtable
    return out

"""Taking vectors out of sequences."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module
from ..dispatch import backward, operation
from .checks import expect_floating, expect_integers, expect_range, expect_shape
from .embedding import EmbeddingCache, embedding, embedding_backward


class GatherCache(NamedTuple):
    rows: EmbeddingCache
    shape: tuple[int, int, int]  # of x, (B, T, C)


@operation
def gather(x: Array, places: Array) -> tuple[Array, GatherCache]:
    """y_bkc = x_btc with t = places_bk: from each sequence the vectors at some of its places.

    x: (B, T, C). places: (B, K), integers from 0 to T − 1; one may occur twice. Returns y (B, K, C) and the cache.
    Raises ValueError for shapes that do not fit, TypeError for places that are not integers, IndexError for one out of
    range.

    Backward. In indices, y_bkc = Σ_t [places_bk = t] x_btc, a product with a matrix of ones and zeros, so that

        ∂y_bkc/∂x_btc = [places_bk = t]        dx_btc = Σ_k [places_bk = t] dy_bkc

    A vector gets the gradients of all the k that took it, and one that nobody took gets 0. The B T vectors under each
    other are a table, in which y looks up the rows T b + places_bk; so it is `embedding` whose gradient this is:

        dx = embedding_backward(dy, cache.rows).reshape(cache.shape)

    The cache keeps the rows and the shape of x; x is not needed.
    """
    expect_floating(x=x)
    xp = array_module(x, places)
    expect_integers("places", places)
    expect_shape("x", x, "B T C")
    B, T, C = x.shape
    expect_shape("places", places, "B K", B=B)
    expect_range("places", places, 0, T - 1, IndexError)
    rows = xp.arange(B)[:, None] * T + places  # (B, K)
    y, rows = embedding(rows, x.reshape(B * T, C))
    return y, GatherCache(rows, x.shape)


@backward
def gather_backward(dy: Array, cache: GatherCache) -> Array:
    """dx: see `gather`."""
    dx = embedding_backward(dy, cache.rows).reshape(cache.shape)
    return dx

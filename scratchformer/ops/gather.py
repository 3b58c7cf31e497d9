"""Vectors of a sequence, chosen by their places."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast
from ..checks import expect_floating, expect_integers, expect_like, expect_range, expect_shape
from ..dispatch import backward, operation
from .embedding import EmbeddingCache, embedding_backward


class GatherCache(NamedTuple):
    places: Array  # (B, K)
    shape: tuple[int, int, int]  # of x, (B, T, C)


def check_gather(x: Array, places: Array) -> None:
    """Raise TypeError, ValueError or IndexError unless these are valid arguments of `gather`."""
    expect_floating(x=x)
    array_module(x, places)
    expect_integers("places", places)
    expect_shape("x", x, "B T C")
    B, T, _ = x.shape
    expect_shape("places", places, "B K", B=B)
    expect_range("places", places, 0, T - 1, IndexError)


@operation(given=check_gather)
def gather(x: Array, places: Array) -> tuple[Array, GatherCache]:
    """y_bkc = x_btc with t = places_bk: the vectors at the given positions of each sequence.

    x: (B, T, C). places: (B, K), integers from 0 to T − 1, which may repeat. Returns y (B, K, C) and the cache.
    Raises ValueError if shapes do not fit, TypeError if `places` are not integers, IndexError if one is out of range.

    Forward. Gathering is a product with a one-hot matrix:

        y_bkc = Σ_t [places_bk = t] x_btc
        y_bkc = x_btc with t = places_bk

    Backward. The product is linear in x:

        ∂y_bkc/∂x_btc = [places_bk = t]
        dx_btc = Σ_k dy_bkc ∂y_bkc/∂x_btc = Σ_k [places_bk = t] dy_bkc

    Each vector gets the sum of the gradients of all k that took it, or 0 if none did. The vectors form a table, and y
    consists of the rows that were taken. Several sequences are stacked, one after another:

        rows_bk = T b + places_bk
        rows = xp.arange(B)[:, None] * T + places

    So the gradient is that of `embedding`:

        dx = xp.reshape(embedding_backward(dy, EmbeddingCache(rows, (B * T, C))), cache.shape)

    The cache keeps the places and the shape of x; x is not needed.
    """
    check_gather(x, places)
    y = array_module(x).take_along_axis(x, places[:, :, None], axis=1)
    return y, GatherCache(places, x.shape)


@backward
def gather_backward(dy: Array, cache: GatherCache) -> Array:
    """dx: see `gather`."""
    B, T, C = cache.shape
    expect_like("dy", dy, (*cache.places.shape, C))
    xp = array_module(dy, cache.places)
    places = cast(cache.places, xp.int64)  # int64 + uint64 would be float64
    rows = xp.arange(B)[:, None] * T + places
    dx = xp.reshape(embedding_backward(dy, EmbeddingCache(rows, (B * T, C))), cache.shape)
    return cast(dx, dy.dtype)  # of a table, a twin gives the gradient in float32

"""Numbers for the n-grams of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backend import Array, array_module
from .checks import expect_integers, expect_positive, expect_shape, shown

LONGEST = 64  # tokens of an n-gram
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)  # odd 64-bit numbers, from splitmix64 and rrmxmx


def ngram_buckets(ids: Array, orders: Sequence[int], buckets: int) -> Array:
    """For each position and each n in `orders`, the bucket of the n ids that end there: int32, (B, T, len(orders)).

    ids: (B, T), integers. A hash of the n-gram, modulo `buckets`, is the number of its bucket among those of its
    order; those of the i-th order follow at i · buckets. Different n-grams may share a bucket. Before the beginning of
    a sequence there is nothing, so the first n − 1 positions have n-grams of their own. An n-gram has the same bucket
    on every machine and device. Raises ValueError for a wrong shape, for no orders, or for numbers below 1; TypeError
    for anything but integers.

    The hash multiplies and mixes in each id in turn, from the last to the first, in 64-bit arithmetic. So the hash of
    an n-gram is one step from that of its last n − 1 ids, and all orders take one pass.
    """
    expect_orders(orders, buckets)
    expect_shape("ids", ids, "B T")
    expect_integers("ids", ids)
    xp = array_module(ids)
    first, second = (xp.uint64(number) for number in MULTIPLIERS)
    (B, T), last = ids.shape, ids.astype(xp.uint64) + xp.uint64(1)  # 0: nothing
    found, state = {}, xp.zeros((B, T), xp.uint64)
    for n in range(1, max(orders) + 1):
        earlier = xp.zeros_like(last)
        earlier[:, n - 1 :] = last[:, : max(0, T - n + 1)]  # the id n − 1 positions before
        state = (state * first + earlier) * second
        state ^= state >> xp.uint64(32)
        found[n] = state % xp.uint64(buckets)
    return xp.stack([found[n].astype(np.int32) + i * buckets for i, n in enumerate(orders)], axis=-1)


def expect_orders(orders: Sequence[int], buckets: int, name: str = "orders") -> None:
    """Raise TypeError or ValueError, with this name, unless `orders` are lengths of n-grams and their buckets can be
    numbered.
    """
    if not isinstance(orders, list | tuple):
        raise TypeError(f"{name}: expected a list of lengths, got {shown(orders)}")
    if not orders:
        raise ValueError(f"{name}: expected at least one length of n-grams, got none")
    for n in orders:
        expect_positive(**{name: n})
        if n > LONGEST:
            raise ValueError(f"{name}: expected lengths up to {LONGEST}, got {n}")
    expect_positive(buckets=buckets)
    if len(orders) * buckets > np.iinfo(np.int32).max:
        raise ValueError(f"buckets: expected at most {np.iinfo(np.int32).max // len(orders):,}, got {buckets}")

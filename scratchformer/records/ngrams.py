"""Numbers for the n-grams of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..backend import Array, array_module
from ..checks import expect_integers, expect_positive, expect_range, expect_shape
from ..shell.text import shown

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
    expect_orders(orders)
    expect_buckets(buckets, len(orders))
    expect_shape("ids", ids, "B T")
    expect_integers("ids", ids)
    xp, columns, buckets = array_module(ids), {}, int(buckets)
    for n, state in _hashes(ids, max(orders)):
        if n in orders:
            columns[n] = (state % xp.uint64(buckets)).astype(np.int32)
    return xp.stack([columns[n] + i * buckets for i, n in enumerate(orders)], axis=-1)


def recall(ids: Array, orders: Sequence[int]) -> Array:
    """For each position and each n in `orders`, the id that followed the previous occurrence of the n ids ending there.

    ids: (B, T), integers. Returns int32 (B, T, len(orders)): 1 + that id, or 0 if the n-gram has not occurred earlier
    in the row. To get older occurrences, repeat n: (4, 4) gives what followed the last two. In "the cat sat on the c",
    the last two ids are a space and a "c"; they occurred once before, and an "a" followed. The result at a position
    depends only on ids up to that position.

    Equal n-grams have equal hashes, and a stable sort by hash puts each after its previous occurrence, in time O(T log
    T) for a row. Hashes have 64 bits, so collisions are very unlikely.

    Raises ValueError for a wrong shape, for no orders, or for an order below 1 or above LONGEST; TypeError for anything
    but integers.

    Source: the match model of compressors: Mahoney, "Adaptive weighing of context models for lossless data
    compression", 2005. As a memory of a neural language model: Grave, Cissé, Joulin, "Unbounded cache model for online
    language modeling with open vocabulary", 2017; Khandelwal et al., "Generalization through memorization", 2020.
    """
    expect_orders(orders)
    expect_shape("ids", ids, "B T")
    tokens = array_module(ids).empty((*ids.shape, len(orders)), np.int32)
    for i, column in recalled(ids, orders):
        tokens[:, :, i] = column
    return tokens


def recalled(ids: Array, orders: Sequence[int]) -> Iterator[tuple[int, Array]]:
    """The columns of `recall`, int32 (B, T), one at a time to save memory, each after its place among `orders`."""
    expect_orders(orders)
    expect_shape("ids", ids, "B T")
    expect_integers("ids", ids)
    expect_range("ids", ids, 0, np.iinfo(np.int32).max - 1)
    xp = array_module(ids)
    rows = xp.arange(len(ids))[:, None]
    for n, state in _hashes(ids, max(orders)):
        if n in orders:
            order = xp.argsort(state, axis=1, kind="stable")
            state = state[rows, order]
            for k, i in enumerate((i for i, m in enumerate(orders) if m == n), 1):
                yield i, _followed(ids, rows, order, state, k)


def _followed(ids: Array, rows: Array, order: Array, state: Array, k: int) -> Array:
    """(B, T): 1 + the id that followed the k-th previous occurrence, or 0.

    order: (B, T), the positions sorted by hash. state: (B, T), the sorted hashes.
    """
    xp = array_module(ids)
    again = state[:, k:] == state[:, :-k]
    before = xp.where(again, order[:, :-k], 0)
    followed = xp.zeros(ids.shape, np.int32)
    followed[rows, order[:, k:]] = xp.where(again, ids[rows, before + 1].astype(np.int32) + 1, 0)
    return followed


def _hashes(ids: Array, longest: int) -> Iterator[tuple[int, Array]]:
    """For n from 1 to `longest`, n and a hash of the n ids that end at each position, uint64 (B, T)."""
    xp = array_module(ids)
    first, second = (xp.uint64(number) for number in MULTIPLIERS)
    (B, T), last = ids.shape, ids.astype(xp.uint64) + xp.uint64(1)  # 0: nothing
    state = xp.zeros((B, T), xp.uint64)
    for n in range(1, longest + 1):
        earlier = xp.zeros_like(last)
        earlier[:, n - 1 :] = last[:, : max(0, T - n + 1)]  # the id n − 1 positions before
        state = (state * first + earlier) * second
        state ^= state >> xp.uint64(32)
        yield n, state


def expect_orders(orders: Sequence[int], name: str = "orders") -> None:
    """Raise TypeError or ValueError, with this name, unless `orders` are lengths of n-grams."""
    if not isinstance(orders, list | tuple):
        raise TypeError(f"{name}: expected a list of lengths, got {shown(orders)}")
    if not orders:
        raise ValueError(f"{name}: expected at least one length of n-grams, got none")
    for n in orders:
        expect_positive(**{name: n})
        if n > LONGEST:
            raise ValueError(f"{name}: expected lengths up to {LONGEST}, got {n}")


def expect_buckets(buckets: int, orders: int) -> None:
    """Raise TypeError or ValueError unless `buckets` is positive and `orders` · `buckets` fits in int32."""
    expect_positive(buckets=buckets)
    if orders * int(buckets) > np.iinfo(np.int32).max:
        raise ValueError(f"buckets: expected at most {np.iinfo(np.int32).max // orders:,}, got {buckets}")

"""Patterns: which pairs (t, s) of a query and a key may interact.

A pattern is a small immutable value. It can say its whole truth table, for the reference operation, and for a tile of
the table whether it is empty, full or mixed, for kernels that visit only what is not empty. Patterns combine with `&`:

    Causal() & Padding(lengths)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ..backend import Array
from .checks import expect_lengths


class Tile(enum.Enum):
    """What a pattern says of a rectangle of its truth table."""

    EMPTY = "no pair may interact"
    FULL = "every pair may interact"
    MIXED = "some pairs may interact"


class Pattern:
    """What all patterns can do. T is the number of queries, S the number of keys."""

    def dense(self, T: int, S: int, xp: Any) -> Array | None:
        """The truth table, boolean, of a shape that broadcasts to (B, H, T, S); None if all of it is true."""
        raise TypeError(f"{type(self).__name__} does not say its truth table")

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        """Whether the tile of queries `rows` and keys `columns` of sequence `b` is empty, full or mixed."""
        raise TypeError(f"{type(self).__name__} does not say its tiles")

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        """The truth table of that tile, boolean, of a shape that broadcasts to (rows, columns)."""
        raise TypeError(f"{type(self).__name__} does not say its tiles")

    def __and__(self, other: Pattern) -> Pattern:
        expect_pattern(other)
        return Both(self, other)


def expect_pattern(pattern: Any) -> None:
    """Raise TypeError unless it is a Pattern or None."""
    if not isinstance(pattern, Pattern | None):
        raise TypeError(
            f"pattern: expected None or a Pattern, such as ops.Causal() or ops.Padding(lengths), "
            f"got {type(pattern).__name__}"
        )


@dataclass(frozen=True)
class Full(Pattern):
    """Every query may attend to every key."""

    def dense(self, T: int, S: int, xp: Any) -> None:
        return None

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        return Tile.FULL

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return xp.ones((1, 1), dtype=bool)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query may attend to the keys up to its own place, not to later ones.

    The last query stands at the last key: query t is at place t + S − T. So with T = S it is the lower triangle, and
    with the keys of the past in a cache (T < S) the new queries see all of them. With T > S the first T − S queries
    see nothing.
    """

    def dense(self, T: int, S: int, xp: Any) -> Array:
        return self.mask(0, slice(0, T), slice(0, S), T, S, xp)

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        first, last = rows.start + S - T, rows.stop - 1 + S - T  # places of the first and the last query
        if columns.start > last:
            return Tile.EMPTY
        return Tile.FULL if columns.stop - 1 <= first else Tile.MIXED

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        t = xp.arange(rows.start, rows.stop)[:, None]
        s = xp.arange(columns.start, columns.stop)[None, :]
        return s <= t + (S - T)


@dataclass(frozen=True, eq=False)
class Padding(Pattern):
    """No query may attend to the padding behind a sequence's end: of sequence b, keys 0 ... lengths[b] − 1 count.

    lengths: (B,), integers, on the device of the arrays that attend. The padding must be finite: its weight in the sum
    over keys is 0, but 0 · NaN is NaN.
    """

    lengths: Array

    def __post_init__(self) -> None:
        expect_lengths(self.lengths)

    def dense(self, T: int, S: int, xp: Any) -> Array:
        return xp.arange(S)[None, None, None, :] < self.lengths[:, None, None, None]

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        length = int(self.lengths[b])
        if columns.start >= length:
            return Tile.EMPTY
        return Tile.FULL if columns.stop <= length else Tile.MIXED

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return xp.arange(columns.start, columns.stop)[None, :] < int(self.lengths[b])


@dataclass(frozen=True, eq=False)
class Both(Pattern):
    """A pair may interact if both patterns let it."""

    first: Pattern
    second: Pattern

    def dense(self, T: int, S: int, xp: Any) -> Array | None:
        a, b = self.first.dense(T, S, xp), self.second.dense(T, S, xp)
        if a is None or b is None:
            return b if a is None else a
        return a & b

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        tiles = {p.tile(b, rows, columns, T, S) for p in (self.first, self.second)}
        if Tile.EMPTY in tiles:
            return Tile.EMPTY
        return Tile.MIXED if Tile.MIXED in tiles else Tile.FULL

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        first, second = (p.mask(b, rows, columns, T, S, xp) for p in (self.first, self.second))
        return first & second

"""Patterns: which queries t may attend to which keys s.

A pattern is a small immutable value. It gives the reference operation its whole truth table over the pairs (t, s). It
tells a kernel whether a tile of that table is empty, full or mixed, and which pieces to visit: for a sparse pattern,
only a few. Patterns combine: with `&` a pair must be allowed by both, with `|` by at least one.

    Causal() & Padding(lengths)
    Causal() & (Local(64) | Strided(64))                # the strided pattern of the sparse transformer
    Causal() & (SameBlock(64) | BlockEnds(64, 4))       # its fixed pattern
    Causal() & Heads(SameBlock(64), BlockEnds(64, 4))   # the same, divided among the heads
    Edges(adjacency)                                    # a graph: units attend along its edges

Queries and keys are aligned at their ends: query t has position t + S − T among the keys. So with T = S each query is
at its own key, and when past keys come from a cache (T < S) the last query is at the last key.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Device, current_device, kept, type_of
from ..checks import (
    MAX_SIZE,
    as_integers,
    describe,
    expect_at_least,
    expect_lengths,
    expect_positive,
    expect_range,
    expect_shape,
)

SIDE = 64  # rows, and columns, of a tile


class Tile(enum.Enum):
    """What is known about a rectangle of the truth table."""

    EMPTY = "no pair is allowed"
    FULL = "every pair is allowed"
    MIXED = "some pairs are allowed"


class Piece(NamedTuple):
    """A tile that is not empty. Its slices may have a step: every k-th row or column of a range."""

    rows: slice
    columns: slice
    allowed: Array | None  # boolean, broadcasts to (rows, columns); None if every pair is allowed

    def where(self, allowed: Array) -> Piece:
        """The same piece, restricted to the pairs that are also in `allowed`."""
        return self._replace(allowed=allowed if self.allowed is None else self.allowed & allowed)


class Pattern:
    """The base class. T is the number of queries, S the number of keys, b the index of a sequence in the batch.

    To write your own pattern, define `mask`; `tile` and `span` make it fast. If the mask depends on b, set `differs`
    and define `dense` as well.
    """

    differs: Any = False  # whether the table depends on the sequence
    by_value = False  # of this class, not of those derived from it: whether equal arguments make equal tables
    tall: Any = 1  # tiles stacked in one piece: more than 1 if all rows are alike

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        """The truth table of one tile: boolean, broadcasts to (rows, columns)."""
        raise TypeError(f"{type(self).__name__} has no mask")

    def dense(self, T: int, S: int, xp: Any) -> Array | None:
        """The whole truth table: boolean, broadcasts to (B, H, T, S); None if every pair is allowed."""
        return self.mask(0, slice(0, T, 1), slice(0, S, 1), T, S, xp)

    def key(self) -> tuple | None:
        """The class and its arguments, by which a GPU keeps the table of a pattern; None if it is made in each call."""
        return (type(self), *vars(self).values()) if vars(type(self)).get("by_value") else None

    def check(self, B: int) -> None:
        """Raise ValueError unless the pattern fits a batch of B sequences."""

    def of_heads(self, H: int) -> list[tuple[slice, Pattern]]:
        """Groups of heads that share a table: slices that cover 0 ... H − 1, each with the pattern of its heads.

        Raises ValueError if the pattern cannot be used with H heads.
        """
        return [(slice(0, H), self)]

    def table(self, H: int, T: int, S: int, xp: Any) -> Array | None:
        """The truth table of all H heads: boolean, broadcasts to (B, H, T, S); None if every pair is allowed.

        On a GPU it may be the one of an earlier call, so do not write to it.
        """
        if xp is not np and (key := self.key()) is not None:
            return _kept_table(key, H, T, S, current_device(xp))
        return self._table(H, T, S, xp)

    def _table(self, H: int, T: int, S: int, xp: Any) -> Array | None:
        groups = [(heads.stop - heads.start, pattern.dense(T, S, xp)) for heads, pattern in self.of_heads(H)]
        if len(groups) == 1:
            return groups[0][1]
        tables = [(count, xp.ones((1, 1, 1, 1), dtype=xp.bool) if t is None else t) for count, t in groups]
        B = max(t.shape[0] if t.ndim == 4 else 1 for _, t in tables)
        return xp.concat([xp.broadcast_to(t, (B, count, T, S)) for count, t in tables], axis=1)

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        """Whether a tile is empty, full or mixed. MIXED is always a safe answer."""
        return Tile.MIXED

    def span(self, b: int, rows: slice, T: int, S: int) -> tuple[int, int]:
        """(start, stop) of the columns that these rows may see. All columns is always a safe answer."""
        return 0, S

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array] | None:
        """(begin, end), which broadcast to (B, T), if each query t may see exactly the keys begin ... end − 1, with
        0 ≤ begin and end ≤ S.

        None if that is not so, or not known.
        """
        return None

    def visits(self, T: int, S: int) -> int:
        """Roughly how many pairs `pieces` covers."""
        return T * S

    def pieces(self, b: int, T: int, S: int, xp: Any) -> Iterator[Piece]:
        """The tiles that are not empty. Every allowed pair lies in exactly one of them.

        A piece has at most SIDE columns and at most SIDE · `tall` rows.
        """
        for rows in cut(0, T, tiles=self.tall):
            for columns in cut(*self.span(b, rows, T, S)):
                kind = self.tile(b, rows, columns, T, S)
                if kind is not Tile.EMPTY:
                    allowed = None if kind is Tile.FULL else self.mask(b, rows, columns, T, S, xp)
                    yield Piece(rows, columns, allowed)

    def __and__(self, other: Pattern) -> Pattern:
        expect_pattern(other)
        return Both(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        expect_pattern(other)
        return Either(self, other)


@kept(4)
def _kept_table(key: tuple, H: int, T: int, S: int, device: Device) -> Array | None:
    """The truth table of the pattern with this key on a GPU, kept for the next call."""
    return from_key(key)._table(H, T, S, device.xp)


def from_key(key: tuple) -> Pattern:
    """A pattern like the one whose `key` this is."""
    kind, *arguments = key
    return kind(*(from_key(x) if isinstance(x, tuple) else x for x in arguments))


def joint_key(kind: type[Pattern], parts: Iterable[Pattern]) -> tuple | None:
    """The key of a combination of patterns, if all of them have one."""
    keys = [part.key() for part in parts]
    return None if None in keys else (kind, *keys)


def expect_pattern(pattern: Any, name: str = "pattern") -> None:
    """Raise TypeError, naming the argument `name`, unless `pattern` is a Pattern or None."""
    if not isinstance(pattern, Pattern | None):
        raise TypeError(
            f"{name}: expected None or a Pattern, such as ops.Causal() or ops.Padding(lengths), "
            f"got {type(pattern).__name__}"
        )


def cut(start: int, stop: int, step: int = 1, tiles: int = 1) -> list[slice]:
    """range(start, stop, step) cut into slices of `tiles` · SIDE numbers; the last may be shorter."""
    size = tiles * SIDE * step
    return [slice(i, min(i + size, stop), step) for i in range(start, stop, size)]


def ends(part: slice) -> tuple[int, int]:
    """The first and the last index of a non-empty slice."""
    step = part.step or 1
    return part.start, part.start + (part.stop - 1 - part.start) // step * step


def places(rows: slice, T: int, S: int, xp: Any) -> Array:
    """(rows, 1): the positions of the queries among the keys."""
    return xp.arange(rows.start, rows.stop, rows.step or 1)[:, None] + (S - T)


def numbers(columns: slice, xp: Any) -> Array:
    """(1, columns): the indices of the keys."""
    return xp.arange(columns.start, columns.stop, columns.step or 1)[None, :]


@dataclass(frozen=True)
class Full(Pattern):
    """Every query may attend to every key."""

    by_value = True
    tall = 4

    def dense(self, T: int, S: int, xp: Any) -> None:
        return None

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        return Tile.FULL

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array]:
        return xp.zeros((1, T), dtype=xp.int64), xp.full((1, T), S)

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return xp.ones((1, 1), dtype=xp.bool)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query may attend to the keys up to its own position, not to later ones.

    With T = S this is the lower triangle. With T > S the first T − S queries see nothing.
    """

    by_value = True

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        (first, last), (left, right) = ends(rows), ends(columns)
        if left > last + S - T:
            return Tile.EMPTY
        return Tile.FULL if right <= first + S - T else Tile.MIXED

    def span(self, b: int, rows: slice, T: int, S: int) -> tuple[int, int]:
        return 0, max(0, ends(rows)[1] + S - T + 1)

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array]:
        return xp.zeros((1, T), dtype=xp.int64), xp.clip(xp.arange(T)[None] + S - T + 1, 0, S)

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return numbers(columns, xp) <= places(rows, T, S, xp)


@dataclass(frozen=True)
class Local(Pattern):
    """A query may attend to the keys at most `radius` away from its own position: restricted self-attention.

    For a sequence of length n it costs O(radius · n) where `Full` costs O(n²). Source: Vaswani et al., "Attention is
    all you need", 2017, section 4 and table 1.
    """

    by_value = True

    radius: int

    def __post_init__(self) -> None:
        expect_at_least(0, radius=self.radius)
        as_integers(self, "radius")

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        (first, last), (left, right) = ends(rows), ends(columns)
        before, after = first + S - T - right, left - last - S + T  # distances between the nearest ends
        if max(before, after) > self.radius:
            return Tile.EMPTY
        farthest = max(last + S - T - left, right - first - S + T)
        return Tile.FULL if farthest <= self.radius else Tile.MIXED

    def span(self, b: int, rows: slice, T: int, S: int) -> tuple[int, int]:
        first, last = ends(rows)
        return max(0, first + S - T - self.radius), max(0, min(S, last + S - T + self.radius + 1))

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array]:
        place = xp.arange(T)[None] + S - T
        return xp.clip(place - self.radius, 0, S), xp.clip(place + self.radius + 1, 0, S)

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return xp.abs(places(rows, T, S, xp) - numbers(columns, xp)) <= self.radius

    def visits(self, T: int, S: int) -> int:
        return T * min(S, 2 * self.radius + 1)


@dataclass(frozen=True)
class Strided(Pattern):
    """A query may attend to every `stride`-th key, counted from its own position: (position − s) mod stride = 0.

    Queries whose positions have the same remainder modulo `stride` see exactly the keys with that remainder. So the
    table splits into `stride` full tables of about T/stride queries and S/stride keys. For a sequence of length n it
    costs O(n²/stride), which is O(n √n) with a stride near √n. Source: Child et al., "Generating long sequences with
    sparse transformers", 2019, section 4.3.
    """

    by_value = True

    stride: int

    def __post_init__(self) -> None:
        expect_positive(stride=self.stride)
        as_integers(self, "stride")

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        apart = rows.start + S - T - columns.start
        steps = [part.step or 1 for part in (rows, columns) if ends(part)[0] != ends(part)[1]]
        if any(step % self.stride for step in steps):
            return Tile.MIXED
        return Tile.EMPTY if apart % self.stride else Tile.FULL

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return (places(rows, T, S, xp) - numbers(columns, xp)) % self.stride == 0

    def visits(self, T: int, S: int) -> int:
        return T * -(-S // self.stride)

    def pieces(self, b: int, T: int, S: int, xp: Any) -> Iterator[Piece]:
        for remainder in range(min(self.stride, S)):
            for rows in cut((remainder + T - S) % self.stride, T, self.stride):
                for columns in cut(remainder, S, self.stride):
                    yield Piece(rows, columns, None)


@dataclass(frozen=True, eq=False)
class Padding(Pattern):
    """No query may attend to padding: in sequence b, only keys 0 ... lengths[b] − 1 are visible.

    lengths: (B,), integers, on the same device as the queries and keys. A length above S hides nothing. The padding
    must be finite: its weight in the sum over keys is 0, but 0 · NaN is NaN. Raises ValueError for a length below 0 or
    above 2³¹ − 1, unless it is on a GPU, which would have to be waited for.
    """

    lengths: Array
    differs = True
    tall = 4

    def __post_init__(self) -> None:
        expect_lengths(self.lengths)
        if isinstance(self.lengths, np.ndarray):
            expect_range("lengths", self.lengths, 0, MAX_SIZE)

    def check(self, B: int) -> None:
        expect_lengths(self.lengths, B=B)

    def dense(self, T: int, S: int, xp: Any) -> Array:
        return xp.arange(S)[None, None, None, :] < self.lengths[:, None, None, None]

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        length, (left, right) = int(self.lengths[b]), ends(columns)
        if left >= length:
            return Tile.EMPTY
        return Tile.FULL if right < length else Tile.MIXED

    def span(self, b: int, rows: slice, T: int, S: int) -> tuple[int, int]:
        return 0, min(S, int(self.lengths[b]))

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array]:
        end = xp.clip(xp.broadcast_to(self.lengths[:, None], (self.lengths.shape[0], T)), 0, S)
        return xp.zeros_like(end), end

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return numbers(columns, xp) < int(self.lengths[b])


@dataclass(frozen=True, eq=False)
class Pair(Pattern):
    """Two patterns combined."""

    first: Pattern
    second: Pattern

    def key(self) -> tuple | None:
        return joint_key(type(self), (self.first, self.second)) if type(self) in (Both, Either) else None

    @property
    def differs(self) -> bool:
        return self.first.differs or self.second.differs

    @property
    def tall(self) -> int:
        return max(self.first.tall, self.second.tall)

    def check(self, B: int) -> None:
        self.first.check(B)
        self.second.check(B)

    def of_heads(self, H: int) -> list[tuple[slice, Pattern]]:
        return [
            (slice(start, stop), type(self)(p, q))
            for one, p in self.first.of_heads(H)
            for other, q in self.second.of_heads(H)
            if (start := max(one.start, other.start)) < (stop := min(one.stop, other.stop))
        ]

    def tiles(self, *tile: Any) -> set[Tile]:
        return {self.first.tile(*tile), self.second.tile(*tile)}


class Both(Pair):
    """A pair is allowed if both patterns allow it."""

    def dense(self, T: int, S: int, xp: Any) -> Array | None:
        a, b = self.first.dense(T, S, xp), self.second.dense(T, S, xp)
        if a is None or b is None:
            return b if a is None else a
        return a & b

    def tile(self, *tile: Any) -> Tile:
        return min(self.tiles(*tile), key=[Tile.EMPTY, Tile.MIXED, Tile.FULL].index)

    def mask(self, *tile: Any) -> Array:
        return self.first.mask(*tile) & self.second.mask(*tile)

    def intervals(self, T: int, S: int, xp: Any) -> tuple[Array, Array] | None:
        first, second = self.first.intervals(T, S, xp), self.second.intervals(T, S, xp)
        if first is None or second is None:
            return None
        return xp.maximum(first[0], second[0]), xp.minimum(first[1], second[1])

    def visits(self, T: int, S: int) -> int:
        return min(self.first.visits(T, S), self.second.visits(T, S))

    def pieces(self, b: int, T: int, S: int, xp: Any) -> Iterator[Piece]:
        """The pieces of the cheaper pattern, restricted to what the other allows."""
        few, other = sorted((self.first, self.second), key=lambda p: (p.visits(T, S), p.tall))
        for piece in few.pieces(b, T, S, xp):
            kind = other.tile(b, piece.rows, piece.columns, T, S)
            if kind is Tile.MIXED:
                yield piece.where(other.mask(b, piece.rows, piece.columns, T, S, xp))
            elif kind is Tile.FULL:
                yield piece


class Either(Pair):
    """A pair is allowed if at least one of the patterns allows it."""

    def dense(self, T: int, S: int, xp: Any) -> Array | None:
        a, b = self.first.dense(T, S, xp), self.second.dense(T, S, xp)
        return None if a is None or b is None else a | b

    def tile(self, *tile: Any) -> Tile:
        return max(self.tiles(*tile), key=[Tile.EMPTY, Tile.MIXED, Tile.FULL].index)

    def mask(self, *tile: Any) -> Array:
        return self.first.mask(*tile) | self.second.mask(*tile)

    def visits(self, T: int, S: int) -> int:
        return self.first.visits(T, S) + self.second.visits(T, S)

    def pieces(self, b: int, T: int, S: int, xp: Any) -> Iterator[Piece]:
        """The pieces of the first pattern, then those of the second without the pairs that the first allows."""
        yield from self.first.pieces(b, T, S, xp)
        for piece in self.second.pieces(b, T, S, xp):
            kind = self.first.tile(b, piece.rows, piece.columns, T, S)
            if kind is Tile.MIXED:
                yield piece.where(~self.first.mask(b, piece.rows, piece.columns, T, S, xp))
            elif kind is Tile.EMPTY:
                yield piece


@dataclass(frozen=True)
class SameBlock(Pattern):
    """A query may attend to the keys of its own block: ⌊position/size⌋ = ⌊s/size⌋. Blocks begin at the first key.

    For a sequence of length n it costs O(size · n). Source: Child et al., "Generating long sequences with sparse
    transformers", 2019, section 4.3, the first half of the fixed pattern.
    """

    by_value = True

    size: int

    def __post_init__(self) -> None:
        expect_positive(size=self.size)
        as_integers(self, "size")

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        first, last = ((t + S - T) // self.size for t in ends(rows))
        left, right = (s // self.size for s in ends(columns))
        if left > last or right < first:
            return Tile.EMPTY
        return Tile.FULL if first == last == left == right else Tile.MIXED

    def span(self, b: int, rows: slice, T: int, S: int) -> tuple[int, int]:
        first, last = ((t + S - T) // self.size for t in ends(rows))
        return max(0, first * self.size), max(0, min(S, (last + 1) * self.size))

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return places(rows, T, S, xp) // self.size == numbers(columns, xp) // self.size

    def visits(self, T: int, S: int) -> int:
        return T * min(S, self.size)


@dataclass(frozen=True)
class BlockEnds(Pattern):
    """A query may attend to the last `width` keys of every block of `stride`: s mod stride ≥ stride − width.

    A model can use these positions to summarise a block. For a sequence of length n it costs O(n² width/stride), which
    is O(n √n width) with a stride near √n. Source: Child et al., "Generating long sequences with sparse transformers",
    2019, section 4.3, the second half of the fixed pattern; width is the paper's c, 8 to 32 for strides of 128 and 256.
    """

    by_value = True
    tall = 4

    stride: int
    width: int = 1

    def __post_init__(self) -> None:
        expect_positive(stride=self.stride, width=self.width)
        if self.width > self.stride:
            raise ValueError(f"width: expected at most the stride, {self.stride}, got {self.width}")
        as_integers(self, "stride", "width")

    def below(self, s: int) -> int:
        """How many of the keys 0 ... s − 1 are at the end of a block."""
        blocks, rest = divmod(s, self.stride)
        return blocks * self.width + max(0, rest - (self.stride - self.width))

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        left, right = ends(columns)
        if (columns.step or 1) % self.stride == 0:  # all have the same remainder
            right = left
        elif (columns.step or 1) != 1:
            return Tile.MIXED
        visible = self.below(right + 1) - self.below(left)
        return Tile.EMPTY if not visible else Tile.FULL if visible == right + 1 - left else Tile.MIXED

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        return numbers(columns, xp) % self.stride >= self.stride - self.width

    def visits(self, T: int, S: int) -> int:
        return T * self.below(S)

    def pieces(self, b: int, T: int, S: int, xp: Any) -> Iterator[Piece]:
        for rows in cut(0, T, tiles=self.tall):
            for remainder in range(self.stride - self.width, self.stride):
                for columns in cut(remainder, S, self.stride):
                    yield Piece(rows, columns, None)


@dataclass(frozen=True, eq=False)
class Edges(Pattern):
    """Query t may attend to key s if allowed[t, s]: any structure, such as the edges of a graph of n units.

    allowed: (n, n), boolean, on the same device as the queries and keys. There must be n keys: another number raises
    ValueError. With T < n queries, they are the last T. The table is stored whole, and only its empty tiles are
    skipped.
    """

    allowed: Array

    def __post_init__(self) -> None:
        if not hasattr(self.allowed, "dtype") or type_of(self.allowed.dtype).kind != "b":
            raise TypeError(f"allowed: expected an array of booleans (n, n), got {describe(self.allowed)}")
        expect_shape("allowed", self.allowed, "n n")
        expect_shape("allowed", self.allowed, "n n", n=self.allowed.shape[0])

    def tile(self, b: int, rows: slice, columns: slice, T: int, S: int) -> Tile:
        part = self.mask(b, rows, columns, T, S, None)
        return Tile.EMPTY if not part.any() else Tile.FULL if part.all() else Tile.MIXED

    def mask(self, b: int, rows: slice, columns: slice, T: int, S: int, xp: Any) -> Array:
        n = self.allowed.shape[0]
        if S != n or T > n:
            raise ValueError(f"allowed: expected a table of the {S} keys and {T} queries, got {self.allowed.shape}")
        step = rows.step or 1
        return self.allowed[rows.start + S - T : rows.stop + S - T : step, columns]


class Heads(Pattern):
    """Each head, or each group of neighbouring heads, has a pattern of its own.

    patterns: one for each group; the H heads are divided into groups of equal size. With two patterns, the first half
    of the heads uses the first. `&` and `|` combine another pattern with each of them. Raises ValueError if the number
    of patterns does not divide H. A kernel computes one group after another, so each group costs what its own pattern
    costs. Source: Child et al., "Generating long sequences with sparse transformers", 2019, section 5.1, the third of
    the paper's ways to use several patterns.
    """

    def __init__(self, *patterns: Pattern | None) -> None:
        if not patterns:
            raise ValueError("patterns: expected at least one, got none")
        for i, pattern in enumerate(patterns):
            expect_pattern(pattern, f"patterns[{i}]")
        self.patterns = tuple(Full() if pattern is None else pattern for pattern in patterns)

    def key(self) -> tuple | None:
        return joint_key(Heads, self.patterns) if type(self) is Heads else None

    def __repr__(self) -> str:
        return f"Heads({', '.join(map(repr, self.patterns))})"

    def check(self, B: int) -> None:
        for pattern in self.patterns:
            pattern.check(B)

    def of_heads(self, H: int) -> list[tuple[slice, Pattern]]:
        if H % len(self.patterns):
            raise ValueError(f"patterns: expected a number that divides {H} heads, got {len(self.patterns)}")
        size = H // len(self.patterns)
        return [
            (slice(i * size + heads.start, i * size + heads.stop), pattern)
            for i, group in enumerate(self.patterns)
            for heads, pattern in group.of_heads(size)
        ]

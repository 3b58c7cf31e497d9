"""Block patterns, patterns that differ from head to head, and arbitrary tables.

    Causal() & (SameBlock(64) | BlockEnds(64, 4))        # the fixed pattern of the sparse transformer
    Causal() & Heads(SameBlock(64), BlockEnds(64, 4))    # the same, divided among the heads
    Edges(adjacency)                                     # a graph: units attend along its edges

See `patterns` for what a pattern is and how queries and keys are aligned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..backend import Array
from ..checks import as_integers, describe, expect_positive, expect_shape
from .patterns import Full, Pattern, Piece, Tile, cut, ends, expect_pattern, joint_key, numbers, places


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
        if not hasattr(self.allowed, "dtype") or self.allowed.dtype != bool:
            raise TypeError(f"allowed: expected an array of booleans (n, n), got {describe(self.allowed)}")
        expect_shape("allowed", self.allowed, "n n")
        expect_shape("allowed", self.allowed, "n n", n=len(self.allowed))

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

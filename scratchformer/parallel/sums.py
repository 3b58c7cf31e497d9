"""A sum of arrays in one fixed order, whoever computes its terms and whenever they are ready."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

from ..backend import Array, array_module

Branch = tuple[int, int]  # a sum's round and place in the tree


class Part(NamedTuple):
    """A term of a sum, or the sum of several."""

    array: Array
    copied: bool  # whether the array is one of the sum's own


class TreeSum:
    """The sum of `count` arrays, added in rounds like those of a tournament. Of eight terms:

        ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

    A part without a neighbour goes on to the next round: the sum of five is ((0 + 1) + (2 + 3)) + 4. The bits of a sum
    of floating-point numbers depend on the order of additions. Here the order depends on `count` alone, so it does not
    matter which thread computes a term, or when it is ready.

    spare: arrays like the terms, for copies; more are made as needed, and all are there again in the end.
    """

    def __init__(self, count: int, spare: list[Array]) -> None:
        self.count, self.spare = count, spare
        self.waiting: dict[Branch, Part] = {}
        self.lock = threading.Lock()

    def add(self, place: int, term: Array, copy: bool = True, round: int = 0) -> None:
        """Add term number `place`: to its neighbour if that waits for it, then their sum to its neighbour, and so on.

        copy: whether the caller will change the array while the sum is not complete. round: how many rounds the array
        has been through already; `place` is its place among the sums of that round.
        """
        part = Part(term, False)
        while (places := math.ceil(self.count / 2**round)) > 1:
            neighbour = place + 1 if place % 2 == 0 else place - 1
            if neighbour < places:
                with self.lock:  # also while copying: of two neighbours that come at once, only one is copied
                    other = self.waiting.pop((round, neighbour), None)
                    if other is None:
                        self.waiting[round, place] = self.copied(term) if copy and part.array is term else part
                        return
                other.array[...] += part.array
                self.release(part)
                part = other
            round, place = round + 1, place // 2
        self.waiting[round, place] = part

    @property
    def total(self) -> Part:
        """The sum of all terms, once they are there."""
        (total,) = self.waiting.values()
        return total

    def room(self, out: Array, size: int) -> Iterator[Array]:
        """Arrays of `size` numbers: pieces of those that hold nothing now, `out` (if no sum is in it) and spare ones;
        then new ones.
        """
        free = [] if any(part.array is out for part in self.waiting.values()) else [out]
        for array in free + self.spare:
            for start in range(0, array.size - size + 1, max(1, size)):
                yield array[start : start + size]
        while True:
            yield array_module(out).empty_like(out[:size])

    def copied(self, term: Array) -> Part:
        try:
            array = self.spare.pop()
        except IndexError:
            array = array_module(term).empty_like(term)
        array[...] = term
        return Part(array, True)

    def release(self, part: Part) -> None:
        """Let the array of a part be used again, if it is one of the sum's own."""
        if part.copied:
            self.spare.append(part.array)

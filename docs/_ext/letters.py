"""Shapes and counts in the letters of the project. In a trace all sizes differ, so that a size tells its letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from scratchformer.catalogue import Draw

# Chosen so that no two letters, and none of the sums and products that `Letters` knows, are equal.
SIZES = {
    "B": 9, "T": 13, "S": 17, "M": 19, "H": 12, "G": 4, "D": 10, "C": 120, "F": 480, "V": 53, "I": 23, "O": 31, "K": 7,
}  # fmt: skip
ORDER = "BTSMRHGDCFVKIO"  # of the letters of a product
Power = tuple[tuple[str, int], ...]  # the letters of a product with their exponents


class LetterSizes(Draw):
    """A `Draw` with the sizes SIZES and float32 arrays. `sizes` has the letters that were used."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.fixed = SIZES | sizes

    def __getattr__(self, letter: str) -> int:
        known = vars(self)
        if letter not in known.get("fixed", {}) | known.get("sizes", {}):
            raise AttributeError(letter)
        return self.sizes.setdefault(letter, self.fixed.get(letter, 0))

    def __call__(self, letters: str) -> np.ndarray:
        return super().__call__(letters).astype(np.float32)


class Letters:
    """The letters of sizes that are all different, and of the sums and products of them that occur in shapes."""

    def __init__(self, sizes: dict[str, int], repeated: str = "") -> None:
        """repeated: a letter that is the length of a list of layers, and so a factor in the number of a term."""
        self.sizes, self.repeated = dict(sizes), repeated
        self.dimensions: dict[int, tuple[str, dict[str, int]]] = {1: ("1", {})}
        H, C = (self.sizes.get(letter, 0) for letter in "HC")
        for letter, implied in {"F": 4 * C, "D": H and C // H}.items():  # unless the case says otherwise
            if implied and letter not in self.sizes:
                self.sizes[letter] = implied
        self.sizes = {letter: self.sizes[letter] for letter in ORDER if letter in self.sizes}
        for letter, n in self.sizes.items():
            self._add(letter, n, {letter: 1})
        B, T, S, M, H, D, G, C, K = (self.sizes.get(letter, 0) for letter in "BTSMHDGCK")
        self.heads_make_width = C == H * D
        self._add("N", B * T, {"B": 1, "T": 1})
        for letter, n in {"S": S, "M": M, "K": K}.items():
            self._add(f"B {letter}", B * n, {"B": 1, letter: 1})
        self._sum("T+1", T and T + 1)
        self._sum("D+1", D and D + 1)
        self._add("R", S and T and S + T - 1, {"R": 1})
        self._sum("M+T", M and T and M + T)
        self._add("B (M+T)", M and T and B * (M + T), {"B": 1, "(M+T)": 1})
        self._add("R", M and T and M + 2 * T - 1, {"R": 1})
        self._add("H D", H * D, {"H": 1, "D": 1})
        self._add("G D", G * D, {"G": 1, "D": 1})
        self._add("D/2", D % 2 == 0 and D // 2, {"D": 1, "½": 1})
        self._add("H/2", H % 2 == 0 and H // 2, {"H": 1, "½": 1})
        self._add("H/G", G and H // G, {"H": 1, "G": -1})
        self._add("H/G T", G and H // G * T, {"H": 1, "G": -1, "T": 1})

    def _add(self, name: str, size: int, powers: dict[str, int]) -> None:
        if not size or (name == "H D" and self.heads_make_width):
            return
        if size in self.dimensions and self.dimensions[size][0] != name:
            raise ValueError(f"{name} and {self.dimensions[size][0]} are both {size}: a size must tell its letter")
        self.dimensions[size] = name, powers

    def _sum(self, name: str, size: int) -> None:
        self._add(name, size, {f"({name})": 1})

    def shape(self, shape: Iterable[int]) -> str:
        """(B T C)"""
        return f"({' '.join(self.dimensions.get(n, (str(n), None))[0] for n in shape)})"

    def unknown(self, shape: Iterable[int]) -> list[int]:
        """The sizes without a letter."""
        return [n for n in shape if n not in self.dimensions]

    def term(self, factor: int, shape: Iterable[int]) -> tuple[Power, int]:
        """factor times the sizes, as powers of letters and a number."""
        powers: Counter[str] = Counter()
        for n in shape:
            if n in self.dimensions:
                powers.update(self.dimensions[n][1])
            else:
                factor *= n
        return self._simple(powers), factor

    def _simple(self, powers: Counter[str]) -> Power:
        """The powers in order, with C in place of H D."""
        for _ in range(min(powers["H"], powers["D"]) if self.heads_make_width else 0):
            powers.update({"H": -1, "D": -1, "C": 1})
        return tuple(sorted((letter, n) for letter, n in powers.items() if n))

    def terms(self, terms: Iterable[tuple[int, Iterable[int]]]) -> Counter[Power]:
        """The sum of terms (factor, sizes), by their letters."""
        counts: Counter[Power] = Counter()
        for factor, shape in terms:
            powers, number = self.term(factor, shape)
            counts[powers] += number
        for powers, number in list(counts.items()) if self.repeated else []:
            times, rest = divmod(number, self.sizes[self.repeated])
            if not rest:
                del counts[powers]
                counts[self._simple(Counter(dict(powers)) + Counter([self.repeated]))] += times
        return counts

    def formula(self, terms: Iterable[tuple[int, Iterable[int]]]) -> str:
        """The sum of terms (factor, sizes): "8 B T C² + 4 B T² C", with no-break spaces in a term."""
        return written(self.terms(terms))

    def flop(self, products: Iterable[tuple[tuple[int, ...], int]]) -> str:
        return self.formula((2, (*shape, k)) for shape, k in products)

    def bytes(self, blocks: Iterable[np.ndarray]) -> str:
        return self.formula((x.itemsize, x.shape) for x in blocks)

    def numbers(self, params: Iterable[Any]) -> str:
        return self.formula((1, p.data.shape) for p in params)


def written(terms: Counter[Power]) -> str:
    """A sum of terms, those with more letters first: "4 B T² H − 4 B T C"."""
    order = sorted(terms.items(), key=lambda item: (-sum(n for _, n in item[0]), [_place(x) for x, _ in item[0]]))
    text = "".join(f" {'+' if n > 0 else '−'} {_term(powers, abs(n))}" for powers, n in order if n)
    return text.removeprefix(" + ").replace(" − ", "−", 1) if text.startswith(" −") else text.removeprefix(" + ") or "0"


def _place(letter: str) -> int:
    return ORDER.find(letter.strip("(")[0])


def _term(powers: Power, factor: int) -> str:
    below = "".join(f"/{x}" for x, n in powers if n < 0)
    letters = [x + _superscript(n) for x, n in sorted(powers, key=lambda item: _place(item[0])) if n > 0 and x != "½"]
    halves = dict(powers).get("½", 0)
    number = factor // 2**halves if factor % 2**halves == 0 else factor / 2**halves
    return "\u00a0".join([*([str(number)] if number != 1 or not letters else []), *letters]) + below


def _superscript(n: int) -> str:
    return "" if n == 1 else str(n).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))

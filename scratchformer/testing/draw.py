"""Sizes and arrays for the cases of checks, drawn from a seed: `draw("B T C")` is a normal array of that shape.

A letter has the same size throughout a case.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import CPU, Array, Device, to_device
from ..rng import Key


class Draw:
    """Sizes and arrays drawn from `seed`: each letter is between 2 and `largest`, except C = H D; arrays are standard
    normal, times `scale`.

    All parameters of a layer, gamma and beta included, are drawn too, with the scale `parameter_scale`.
    """

    def __init__(
        self,
        seed: int = 0,
        scale: float = 1.0,
        device: Device = CPU,
        parameter_scale: float = 1.0,
        largest: int = 5,
    ) -> None:
        self.seed, self.scale, self.device, self.parameter_scale = seed, scale, device, parameter_scale
        self.largest = largest
        self.generator = Key(seed).fold("case").generator()
        self.sizes: dict[str, int] = {}

    def __getattr__(self, letter: str) -> int:
        """The size of a letter: `draw.B`."""
        if len(letter) != 1:
            raise AttributeError(letter)
        if letter not in self.sizes:
            self.sizes[letter] = (
                self.H * self.D if letter == "C" else int(self.generator.integers(2, self.largest, endpoint=True))
            )
        return self.sizes[letter]

    def shape(self, letters: str) -> tuple[int, ...]:
        """A size for each word: that of a letter, or the product of several ("GR")."""
        return tuple(math.prod(getattr(self, letter) for letter in word) for word in letters.split())

    def __call__(self, letters: str) -> np.ndarray:
        """A standard normal float64 array, times the scale."""
        return np.asarray(self.scale * self.values(self.shape(letters)))

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        """The numbers of an array, before the scale."""
        return self.generator.standard_normal(shape)

    def integers(self, letters: str, high: int, low: int = 0) -> Array:
        """Integers from low to high − 1, on the device."""
        return to_device(self.generator.integers(low, high, self.shape(letters)), self.device)

    def lengths(self, letter: str = "T") -> Array:
        """(B,), integers from 1 to T, or to the size of `letter`; at least one is the maximum."""
        longest = getattr(self, letter)
        lengths = self.generator.integers(1, longest, self.B, endpoint=True)
        lengths[-1] = longest
        return to_device(lengths, self.device)

    @property
    def key(self) -> Key:
        return Key(self.seed).fold("dropout")


class Sizes(Draw):
    """A `Draw` whose sizes are all different and larger than 1, so that an exchanged index of an equation shows."""

    def __init__(self, seed: int = 0, scale: float = 1.0, **options: Any) -> None:
        super().__init__(seed, scale, **options)
        shuffle = self.generator.permutation
        self.left = [int(size) for size in (*shuffle([3, 4, 5, 6]), 2)]

    def __getattr__(self, letter: str) -> int:
        if len(letter) == 1 and letter not in self.sizes:
            preferred = (*self.left, *range(7, 20))
            self.sizes[letter] = next(size for size in preferred if size not in self.sizes.values())
        return super().__getattr__(letter)


def some_exact(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`x` with about a third of its elements rounded, and a third replaced by other elements; not the first."""
    flat = x.ravel()
    kind = rng.integers(3, size=flat.shape)
    kind[:1] = 0
    return np.choose(kind, [flat, np.round(flat), rng.permutation(flat)]).reshape(x.shape)

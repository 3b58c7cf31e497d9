"""Counter-based random keys: the same key always gives the same numbers, on every backend.

There is no generator with a state that advances. A `Key` is a tuple of words, (seed, step, micro-batch, layer, ...),
and `fold` derives new keys from it. So a recomputed dropout mask is the same mask, replicas need no lock, and a resumed
run needs no saved state beyond its step number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np

LIMIT = 2**128  # the words of a key are smaller than this; Philox has as many counters


@dataclass(frozen=True)
class Key:
    """A random key, a tuple of non-negative integers: start with `Key(seed)` and derive others with `fold`."""

    words: tuple[int, ...]

    def __init__(self, *words: int) -> None:
        _expect_words("seed", words)
        object.__setattr__(self, "words", tuple(int(w) for w in words))

    def fold(self, *parts: int | str) -> Key:
        """A new key that depends on this one and on `parts` (step numbers, layer names)."""
        words = [zlib.crc32(p.encode()) if isinstance(p, str) else p for p in parts]
        for word in words:
            if type(word) is not int or not 0 <= word < LIMIT:
                _expect_words("parts", words)
        key: Key = object.__new__(Key)
        object.__setattr__(key, "words", (*self.words, *map(int, words)))
        return key

    def generator(self) -> np.random.Generator:
        """NumPy's generator on the counter-based Philox bits of this key (Salmon et al. 2011), on the CPU."""
        return np.random.Generator(np.random.Philox(self.seed_sequence()))

    def start(self) -> Any:
        """Where the random integers of this key start, 64 bits: see `Bits`."""
        return start_of(self)

    def seed_sequence(self) -> np.random.SeedSequence:
        """NumPy's hash of the words and of their number, since NumPy pads short tuples with zeros."""
        return np.random.SeedSequence((len(self.words), *self.words))


def _expect_words(name: str, words: Sequence[int]) -> None:
    for word in words:
        if type(word) is not int and (not isinstance(word, Integral) or isinstance(word, bool)):
            got = "None" if word is None else type(word).__name__
            raise TypeError(f"{name}: expected non-negative integers, got {got}")
        if not -LIMIT < int(word) < LIMIT:
            raise ValueError(f"{name}: expected integers below 2**128, got a larger one")
        if word < 0:
            raise ValueError(f"{name}: expected non-negative integers, got {tuple(words)}")


def expect_key(key: Any, none: bool = False) -> None:
    """Raise TypeError unless `key` is a Key, or None if `none`."""
    if not (isinstance(key, Key) or (none and key is None)):
        got = "None" if key is None else f"the {type(key).__name__} {key}" if type(key) is int else type(key).__name__
        raise TypeError(f"key: expected a Key, such as Key(0){' or None' if none else ''}, got {got}")


@overload
def fold(key: Key, *parts: int | str) -> Key: ...
@overload
def fold(key: Key | None, *parts: int | str) -> Key | None: ...
def fold(key: Key | None, *parts: int | str) -> Key | None:
    """`key.fold(*parts)`, or None for None: a layer that drops nothing out has no keys for its parts either."""
    if key is not None and not isinstance(key, Key):
        expect_key(key, none=True)
    return None if key is None else key.fold(*parts)


class Zeros(Key):
    """A key that gives zeros instead of random numbers, for a model whose weights will be loaded.

    Its generator has all methods of NumPy's. Only the two that the layers here use give zeros, which is faster; a layer
    of a user's own may call any other.
    """

    def fold(self, *parts: int | str) -> Zeros:
        return self

    def generator(self) -> np.random.Generator:
        return ZeroGenerator(np.random.Philox(0))


class ZeroGenerator(np.random.Generator):
    """NumPy's generator, with zeros for `standard_normal` and for `uniform`."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return np.zeros(() if size is None else size, dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return self.standard_normal(size, np.float32)


# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
GAMMA, MIX_1, MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@lru_cache(maxsize=4096)  # keys are used again when activations are recomputed, and in every gradient check
def start_of(key: Key) -> np.uint64:
    """Where the words of `random_uint16` start."""
    return key.seed_sequence().generate_state(1, np.uint64)[0]


class Bits(NamedTuple):
    """Independent uniform 16-bit integers that are not drawn yet; each is a function of its place.

    Word i is the SplitMix64 mix of start + i·γ and gives four 16-bit integers. Only addition, multiplication, shift and
    exclusive-or are needed, so every array library gives the same bits, and a loop can draw them where it uses them.
    start: a number, or in a step that is recorded on a GPU an array () there, so that it can be another one each time.
    """

    start: Any

    def draw(self, size: int, xp: Any = np) -> Any:
        """The first `size` integers, in an array of the library `xp`."""
        words = xp.arange(math.ceil(size / 4), dtype=np.uint64)
        words *= GAMMA
        words += self.start
        words ^= words >> np.uint64(30)
        words *= MIX_1
        words ^= words >> np.uint64(27)
        words *= MIX_2
        words ^= words >> np.uint64(31)
        return words.view(np.uint16)[:size]


def random_uint16(key: Key, size: int, xp: Any = np) -> Any:
    """`size` independent uniform 16-bit integers, in an array of the library `xp`, see `Bits`."""
    return Bits(key.start()).draw(size, xp)

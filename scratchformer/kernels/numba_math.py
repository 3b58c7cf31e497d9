"""The arithmetic of compiled loops: numbers of any floating-point type, read and rounded, and functions in vectors.

The loops compute in float32, or in float64 for float64 arrays. bfloat16 is stored as its 16 bits, see `numba_code`.
These functions exist in compiled code only: Numba chooses their implementation by type.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from .. import portable
from ..rng import GAMMA, MIX_1, MIX_2
from .numba_code import as_bits, compiled, rounded, widened

BITS = numba.uint16
DTYPES = {np.dtype(np.float32), np.dtype(np.float64)}  # and bfloat16, which `alike` adds when it meets it


def alike(*arrays: Any) -> bool:
    """Whether all are NumPy arrays of one type that the loops know, with axes, and none is empty."""
    dtype: Any = getattr(arrays[0], "dtype", None)
    for x in arrays:
        if type(x) is not np.ndarray or x.dtype != dtype or not x.size or not x.ndim:
            return False
    if dtype not in DTYPES and dtype.name == "bfloat16":
        DTYPES.add(dtype)
    return dtype in DTYPES


def rows(x: np.ndarray) -> np.ndarray:
    """x as compiled code takes it, (N, C), contiguous; bfloat16 as bits."""
    x = as_bits(x).reshape(-1, x.shape[-1])
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def read(x: Any) -> Any:
    """The number x, an element of an array, as the loops compute with it."""


def narrow(x: Any, y: Any) -> Any:
    """The number x as an element of the array y, rounded to its type."""


def wide_empty(shape: Any, like: Any) -> Any:
    """An array of the type in which the loops compute with elements of `like`."""


def wide_buffer(y: Any, size: int) -> Any:
    """Room for `size` of the loops' numbers, which will be rounded to the array y: y itself if they need not be."""


def constant(c: float, like: Any) -> Any:
    """The constant c in the type of the number `like`."""


def exp(x: Any) -> Any:
    """exp(x)"""


def log(x: Any) -> Any:
    """log(x)"""


def log1p(x: Any) -> Any:
    """log(1 + x)"""


def tanh(x: Any) -> Any:
    """tanh(x)"""


def erf(x: Any) -> Any:
    """The error function, 2/√π ∫₀ˣ exp(−t²) dt."""


@overload(read, strict=False)
def _read(x: Any) -> Any:
    return (lambda x: widened(x)) if x == BITS else (lambda x: x)


@overload(narrow, strict=False)
def _narrow(x: Any, y: Any) -> Any:
    return (lambda x, y: rounded(x)) if y.dtype == BITS else (lambda x, y: x)


@overload(wide_empty, strict=False)
def _wide_empty(shape: Any, like: Any) -> Any:
    dtype = numba.float32 if like.dtype == BITS else like.dtype
    return lambda shape, like: np.empty(shape, dtype)


@overload(wide_buffer, strict=False)
def _wide_buffer(y: Any, size: int) -> Any:
    if y.dtype == BITS:
        return lambda y, size: np.empty(size, np.float32)
    return lambda y, size: y.reshape(-1)


@overload(constant, strict=False)
def _constant(c: Any, like: Any) -> Any:
    return (lambda c, like: np.float32(c)) if like == numba.float32 else (lambda c, like: np.float64(c))


# What `portable` has for arrays, for numbers. Whole numbers have 64 bits after an operation in compiled code.


@overload(portable.where, strict=False)
def _where(condition: Any, a: Any, b: Any) -> Any:
    return lambda condition, a, b: a if condition else b


@overload(portable.bits_of, strict=False)
def _bits_of(x: Any) -> Any:
    return lambda x: np.float32(x).view(np.int32)


@overload(portable.with_bits, strict=False)
def _with_bits(bits: Any) -> Any:
    return lambda bits: np.int32(bits).view(np.float32)


@overload(portable.number, strict=False)
def _number(x: Any) -> Any:
    return lambda x: np.float32(np.int32(x))


# As in `portable.exp32`, with the series. Results are right to one unit in the last place.
LOG2_HIGH_64, LOG2_LOW_64 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
SERIES = tuple(1 / math.factorial(k) for k in range(13, 1, -1))
LOWEST_64, HIGHEST_64, SHIFT_64 = -709.0, 710.0, 1.5 * 2.0**52 + 1023


@overload(exp, strict=False, jit_options={"fastmath": {"contract"}})  # the order of the differences counts
def _exp(x: Any) -> Any:
    return portable.exp32 if x == numba.float32 else exp64


def exp64(x: Any) -> Any:
    c11, c10, c9, c8, c7, c6, c5, c4, c3, c2, c1, c0 = SERIES
    inside = LOWEST_64 if x < LOWEST_64 else x
    inside = HIGHEST_64 if inside > HIGHEST_64 else inside
    shifted = inside * math.log2(math.e) + SHIFT_64
    n = shifted - SHIFT_64
    r = (inside - n * LOG2_HIGH_64) - n * LOG2_LOW_64
    p = (((((c11 * r + c10) * r + c9) * r + c8) * r + c7) * r + c6) * r + c5
    p = ((((p * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
    power = np.int64(np.float64(shifted).view(np.int64) << np.int64(52)).view(np.float64)
    return (p * r * r + r + 1.0) * power


@compiled
def draw(words: Any, start: Any, first: Any) -> None:
    """The words of `rng.Bits` from the one numbered `first` on."""
    for i in range(words.size):
        words[i] = mixed(start + np.uint64(first + i) * GAMMA)


@compiled
def drawn_at(start: Any, place: Any) -> Any:
    """One of the integers of `rng.Bits`."""
    return mixed(start + np.uint64(place // 4) * GAMMA) >> np.uint64(16 * (place % 4)) & np.uint64(0xFFFF)


@compiled
def mixed(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * MIX_1
    word = (word ^ (word >> np.uint64(27))) * MIX_2
    return word ^ (word >> np.uint64(31))


@partial(compiled, inline=True)
def greater(a: Any, b: Any) -> Any:
    """The greater of two numbers, NaN if one is NaN."""
    return a if a > b or a != a else b


@partial(compiled, inline=True)
def lesser(a: Any, b: Any) -> Any:
    """The lesser of two numbers, NaN if one is NaN."""
    return a if a < b or a != a else b


@compiled
def column_of(place: Any, columns: Any) -> Any:
    """A place in 32 bits, with which a loop in vectors can compare columns; −1 if there is no such column."""
    return np.int32(place) if 0 <= place < columns else np.int32(-1)


# The following are in vectors too, with errors of a few units in the last place. Where there are two cases, both are
# computed, and one is chosen.


@overload(log, strict=False, jit_options={"fastmath": {"contract"}})
def _log(x: Any) -> Any:
    return portable.log32 if x == numba.float32 else lambda x: math.log(x)


@overload(log1p, strict=False)
def _log1p(x: Any) -> Any:
    return lambda x: math.log1p(x)  # once for each row


@overload(tanh, strict=False, jit_options={"fastmath": {"contract"}})
def _tanh(x: Any) -> Any:
    return portable.tanh32 if x == numba.float32 else tanh64


def tanh64(x: Any) -> Any:
    """With the quotient for small x of Cephes (Moshier's tanh)."""
    z = x * x
    above = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    below = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    small = x + x * z * (above / below)
    large = 1.0 - 2.0 / (exp(2.0 * abs(x)) + 1.0)
    large = -large if x < 0 else large
    return small if abs(x) < 0.625 else large


@overload(erf, strict=False, jit_options={"fastmath": {"contract"}})
def _erf(x: Any) -> Any:
    return portable.erf32 if x == numba.float32 else lambda x: math.erf(x)

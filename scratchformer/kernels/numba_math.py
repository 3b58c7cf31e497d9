"""What compiled loops are written with: numbers of any floating-point type, read and rounded, and exp in vectors.

The loops compute in float32, or in float64 for float64 arrays. bfloat16 is stored as its 16 bits, see `numba_code`.
These functions exist in compiled code only: Numba chooses their implementation by type.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

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


def numbers_like(x: np.ndarray, shape: Any) -> np.ndarray:
    """An array of the type in which the loops compute with elements of x, which may be bits."""
    return np.empty(shape, np.float32 if x.dtype == np.uint16 else x.dtype)


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


# float32: x = n log 2 + r with |r| ≤ ½ log 2, so exp(x) = 2ⁿ exp(r). log 2 is the sum of a number with few digits,
# whose product with n is exact, and a small one. The polynomial is that of Cephes (Moshier's expf). The result is right
# to one unit in the last place.
LOG2_E, LOG2_HIGH, LOG2_LOW = (np.float32(x) for x in (math.log2(math.e), 0.693359375, math.log(2) - 0.693359375))
EXP_POLYNOMIAL = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
LEAST, MOST = np.float32(-87.3), np.float32(88.37)  # outside, exp is 0 or infinite


@overload(exp, strict=False, jit_options={"fastmath": {"contract"}})  # the order of the differences counts
def _exp(x: Any) -> Any:
    if x != numba.float32:
        return lambda x: math.exp(x)
    c5, c4, c3, c2, c1, c0 = EXP_POLYNOMIAL

    def exp32(x):  # type: ignore[no-untyped-def]
        inside = min(max(x, LEAST), MOST)
        n = np.rint(inside * LOG2_E)
        r = (inside - n * LOG2_HIGH) - n * LOG2_LOW
        p = ((((c5 * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
        p = p * r * r + r + np.float32(1)
        y = p * np.uint32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        y = np.float32(0) if x < LEAST else y
        y = np.float32(np.inf) if x > MOST else y
        return x if x != x else y

    return exp32


@compiled
def draw(words: Any, start: Any, first: Any) -> None:
    """The words of `rng.Bits` from the one numbered `first` on."""
    for i in range(words.size):
        word = start + np.uint64(first + i) * GAMMA
        word = (word ^ (word >> np.uint64(30))) * MIX_1
        word = (word ^ (word >> np.uint64(27))) * MIX_2
        words[i] = word ^ (word >> np.uint64(31))

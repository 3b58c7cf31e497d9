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


def log(x: Any) -> Any:
    """log(x)"""


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


@compiled
def column_of(place: Any, columns: Any) -> Any:
    """A place as an integer of 32 bits, with which a loop in vectors can compare columns; −1 if there is no such column."""
    return np.int32(place) if 0 <= place < columns else np.int32(-1)


# The following are in vectors for float32: both cases of each are computed, and one is chosen. Errors are of one or two
# units in the last place.

LOG_POLYNOMIAL = tuple(  # of (log(1 + r) − r + r²/2)/r³ for √½ ≤ 1 + r < √2: Cephes, Moshier's logf
    np.float32(c)
    for c in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
)  # fmt: skip
TANH_POLYNOMIAL = tuple(  # of (tanh(x) − x)/x³ in x², for |x| < 0.625: Cephes, Moshier's tanhf
    np.float32(c)
    for c in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)  # fmt: skip
ERF_SMALL = tuple(  # of erf(x)/x − 1 in x², for |x| ≤ 0.927734375
    np.float32(c)
    for c in (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
)  # fmt: skip
ERF_LARGE = tuple(  # of (log(1 − erf(x)) + x)/x in x, above
    np.float32(c)
    for c in (-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2, -1.06777877e-1, -6.34846687e-1,
              -1.28717512e-1)
)  # fmt: skip


@overload(log, strict=False, jit_options={"fastmath": {"contract"}})
def _log(x: Any) -> Any:
    if x != numba.float32:
        return lambda x: math.log(x)
    c8, c7, c6, c5, c4, c3, c2, c1, c0 = LOG_POLYNOMIAL
    tiny, root = np.float32(np.finfo(np.float32).tiny), np.float32(math.sqrt(0.5))
    half, one, large, zero = np.float32(0.5), np.float32(1), np.float32(2.0**24), np.float32(0)

    def log32(x):  # type: ignore[no-untyped-def]
        small = x < tiny
        scaled = x * large if small else x
        bits = np.float32(scaled).view(np.int32)
        e = np.float32(np.int32(bits >> np.int32(23)) - np.int32(126)) - (np.float32(24) if small else zero)
        m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)).view(np.float32)  # from ½ to 1
        low = m < root
        r, e = (m + m if low else m) - one, e - (one if low else zero)
        p = (((((((c8 * r + c7) * r + c6) * r + c5) * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
        y = (r + ((p * r * r * r + e * LOG2_LOW) - half * r * r)) + e * LOG2_HIGH
        y = y if x < np.float32(np.inf) else x  # ∞ and NaN
        y = np.float32(-np.inf) if x == zero else y
        return np.float32(np.nan) if x < zero else y

    return log32


@overload(tanh, strict=False, jit_options={"fastmath": {"contract"}})
def _tanh(x: Any) -> Any:
    if x != numba.float32:
        return lambda x: math.tanh(x)
    c4, c3, c2, c1, c0 = TANH_POLYNOMIAL
    bound, one, two = np.float32(0.625), np.float32(1), np.float32(2)

    def tanh32(x):  # type: ignore[no-untyped-def]
        square = x * x
        small = ((((c4 * square + c3) * square + c2) * square + c1) * square + c0) * square * x + x
        large = one - two / (exp(two * abs(x)) + one)
        large = -large if x < 0 else large
        return small if abs(x) < bound else large

    return tanh32


@overload(erf, strict=False, jit_options={"fastmath": {"contract"}})
def _erf(x: Any) -> Any:
    if x != numba.float32:
        return lambda x: math.erf(x)
    s5, s4, s3, s2, s1, s0 = ERF_SMALL
    c6, c5, c4, c3, c2, c1, c0 = ERF_LARGE
    bound, one, most = np.float32(0.927734375), np.float32(1), np.float32(4)

    def erf32(x):  # type: ignore[no-untyped-def]
        square = x * x
        small = (((((s5 * square + s4) * square + s3) * square + s2) * square + s1) * square + s0) * x + x
        t = abs(x)
        t = most if t > most else t  # erf(4) is 1
        p = (((((c6 * t + c5) * t + c4) * t + c3) * t + c2) * t + c1) * t + c0
        large = one - exp(p * t - t)
        large = -large if x < 0 else large
        return small if abs(x) <= bound else large

    return erf32

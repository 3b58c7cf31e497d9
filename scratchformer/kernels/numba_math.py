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

from ..backend import ERF_ABOVE, ERF_BELOW, ERF_BOUND
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


# x = n log 2 + r with |r| ≤ ½ log 2, so exp(x) = 2ⁿ exp(r). log 2 is the sum of a number with few digits, whose product
# with n is exact, and a small one. The sum of x/log 2 and 1.5 · 2²³ (in float64 1.5 · 2⁵²) is rounded to a whole
# number, which is then in its last bits. With the bias of an exponent added too, these bits are moved to where a number
# has its exponent: n = −127 gives 0, and n = 128 infinity. The bounds keep n in this range. In float32 the polynomial
# is that of Cephes (Moshier's expf), in float64 the series. Results are right to one unit in the last place.
LOG2_E, LOG2_HIGH, LOG2_LOW = (np.float32(x) for x in (math.log2(math.e), 0.693359375, math.log(2) - 0.693359375))
EXP_POLYNOMIAL = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
LOWEST, HIGHEST, SHIFT = np.float32(-88), np.float32(88.8), np.float32(1.5 * 2**23 + 127)

LOG2_HIGH_64, LOG2_LOW_64 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
SERIES = tuple(1 / math.factorial(k) for k in range(13, 1, -1))
LOWEST_64, HIGHEST_64, SHIFT_64 = -709.0, 710.0, 1.5 * 2.0**52 + 1023


@overload(exp, strict=False, jit_options={"fastmath": {"contract"}})  # the order of the differences counts
def _exp(x: Any) -> Any:
    return exp32 if x == numba.float32 else exp64


def exp32(x: Any) -> Any:
    c5, c4, c3, c2, c1, c0 = EXP_POLYNOMIAL
    inside = LOWEST if x < LOWEST else x  # NaN stays
    inside = HIGHEST if inside > HIGHEST else inside
    shifted = inside * LOG2_E + SHIFT
    n = shifted - SHIFT
    r = (inside - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((((c5 * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
    power = np.int32(np.float32(shifted).view(np.int32) << np.int32(23)).view(np.float32)  # 2ⁿ
    return (p * r * r + r + np.float32(1)) * power


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

LOG_POLYNOMIAL = tuple(  # of (log(1 + r) − r + r²/2)/r³ for √½ ≤ 1 + r < √2: Cephes, Moshier's logf
    np.float32(c)
    for c in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
)  # fmt: skip
# Quotients of polynomials in x², as in Eigen and XLA. From a bound on these functions are ±1; there the quotient may be
# off by some units in the last place, depending on whether the processor rounds a product and a sum once or twice, and
# slopes such as 1 − tanh² would not vanish.
TANH_ABOVE = tuple(  # tanh(x)/x
    np.float32(c)
    for c in (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8,
              1.48572235717979e-5, 6.37261928875436e-4, 4.89352455891786e-3)
)  # fmt: skip
TANH_BELOW = tuple(
    np.float32(c) for c in (1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3)
)
TANH_BOUND, LIMIT, ONE = np.float32(7.99881172180175781), np.float32(ERF_BOUND), np.float32(1)


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
        return tanh64
    a6, a5, a4, a3, a2, a1, a0 = TANH_ABOVE
    b3, b2, b1, b0 = TANH_BELOW

    def tanh32(x):  # type: ignore[no-untyped-def]
        z = x * x
        above = (((((a6 * z + a5) * z + a4) * z + a3) * z + a2) * z + a1) * z + a0
        y = x * above / (((b3 * z + b2) * z + b1) * z + b0)
        y = ONE if x > TANH_BOUND else y  # NaN stays
        return -ONE if x < -TANH_BOUND else y

    return tanh32


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
    if x != numba.float32:
        return lambda x: math.erf(x)
    a6, a5, a4, a3, a2, a1, a0 = map(np.float32, ERF_ABOVE)
    b4, b3, b2, b1, b0 = map(np.float32, ERF_BELOW)

    def erf32(x):  # type: ignore[no-untyped-def]
        z = x * x
        above = (((((a6 * z + a5) * z + a4) * z + a3) * z + a2) * z + a1) * z + a0
        y = x * above / ((((b4 * z + b3) * z + b2) * z + b1) * z + b0)
        y = ONE if x > LIMIT else y  # NaN stays
        return -ONE if x < -LIMIT else y

    return erf32

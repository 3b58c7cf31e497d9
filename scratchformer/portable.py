"""Arithmetic with the same bits on every processor.

IEEE 754 defines, bit by bit, the results of + − × ÷ and of the square root. It says nothing about the order in which a
sum is added, whether a product and a sum are rounded once or twice, or the value of exp. So libraries differ, and so
does one library on two processors. This module defines them:

- `product`: each element is a chain of fused multiply-adds, from the first term to the last.
- `total`: the upper half of the terms is added to the lower half, and so on.
- `exp`, `log`, `tanh`, `erf`: polynomials and their quotients, by separate multiplications and additions.

These functions take NumPy arrays and are operations, so that twins can compute the same bits in less time. A
`PortableArray` is an array that computes with them: if the parameters are of this kind, the references of all
operations are portable. `kernels.cupy_portable` has the same for a GPU. A `PortableKey` draws the weights, and
`sine`, `cosine`, `power` and `logarithm` are for tables of positions and for schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .backend import ERF_ABOVE, ERF_BELOW, ERF_BOUND
from .backend import cosine as cosine
from .backend import logarithm as logarithm
from .backend import power as power
from .backend import sine as sine
from .dispatch import operation
from .rng import BoundedGenerator, Key, take_room

Axes = int | tuple[int, ...] | None
DEFINITION = 1  # to be raised when any of the bits defined here change


def _numbers(*values: float) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, values))


@operation
def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c = a b, the matrix product of two arrays of float32 or of float64, of at least two axes; those before the last
    two are broadcast.

    In float32 an element is the chain c = fma(a_ik, b_kj, c) for k = 0, 1, ..., K − 1, from c = 0, where fma rounds
    once. A chain has the same bits for any size of blocks, vectors and threads. In float64 it is the `total` of its
    terms.
    """
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"b: expected {a.shape[-1]} rows, one for each column of a, got shape {b.shape}")
    if a.dtype == np.float64:
        return total(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    a, b = a.astype(np.float64), b.astype(np.float64)  # the product of two numbers of 24 bits is then exact
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    c = np.zeros_like(a, np.float32, shape=(*shape, a.shape[-2], b.shape[-1]))
    for k in range(a.shape[-1]):
        c = _sum_rounded_once(a[..., :, k, None] * b[..., None, k, :], c)
    return c


def _sum_rounded_once(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y, an array of float64 and one of float32, as float32.

    The sum in float64 is rounded again. That changes the result only where it lies half-way between two numbers of
    float32, or is too small for 24 bits. There a sum that is not exact is moved so that its last bit is 1 ("rounded to
    odd"), and is then rounded to the right side.
    """
    z = x + y
    bits = z.view(np.int64)
    doubtful = (bits & 0x1FFFFFFF) == 0x10000000
    doubtful |= (abs(z) < np.finfo(np.float32).tiny) & (z != 0)
    if doubtful.any():
        x, y, s = np.broadcast_to(x, z.shape)[doubtful], y[doubtful].astype(np.float64), z[doubtful]
        of_y = s - x
        error = (x - (s - of_y)) + (y - of_y)  # s + error = x + y: Knuth's TwoSum
        toward = np.where((error > 0) == (s > 0), 1, -1)  # in the bits of s, to the neighbour on the error's side
        inexact = (error != 0) & (bits[doubtful] % 2 == 0)
        bits[doubtful] += np.where(inexact, toward, 0)
    return z.astype(np.float32)


@operation
def total(x: np.ndarray, axis: Axes = None, keepdims: bool = False) -> np.ndarray:
    """The sum of a floating-point array over an axis, several, or all, as an array.

    The n terms, in the order of C if there are several axes, are added in one tree: while n > 1, the last h = ⌊n/2⌋ of
    them are added to the first h, and n − h are left. The sum of no terms is 0.
    """
    axes = axes_of(x, axis)
    others = [a for a in range(x.ndim) if a not in axes]
    shape = tuple(x.shape[a] for a in others)
    n = math.prod(x.shape[a] for a in axes)
    terms = x.transpose(*axes, *others).reshape(n, *shape)
    if n == 0:
        terms = np.zeros_like(x, shape=(1, *shape))
    while n > 1:
        h = n // 2
        upper = terms[n - h : n]
        terms = np.concatenate([terms[:h] + upper, terms[h : n - h]])
        n -= h
    y = terms[0, ...].copy()
    return y.reshape([1 if a in axes else size for a, size in enumerate(x.shape)]) if keepdims else y


def axes_of(x: Any, axis: Axes) -> list[int]:
    """The axes of x that are added, from the first to the last."""
    return sorted(a % x.ndim for a in (range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)))


# What the twins are for.
def is_float32(x: Any) -> bool:
    return x.dtype == np.float32


def are_matrices(a: Any, b: Any) -> bool:
    return is_float32(a) and is_float32(b) and min(a.ndim, b.ndim) > 1 and a.shape[-1] == b.shape[-2]


def is_floating(x: Any, axis: Axes = None, keepdims: bool = False) -> bool:
    return x.dtype in (np.float32, np.float64)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, b elsewhere."""
    return np.where(condition, a, b)


def bits_of(x: Any) -> Any:
    """The bits of float32 numbers, as int32."""
    return x.view(np.int32)


def with_bits(bits: Any) -> Any:
    """The float32 numbers with these bits."""
    return bits.view(np.float32)


# The following functions also run in compiled loops, a number at a time.
# x = n log 2 + r with |r| ≤ ½ log 2, so exp(x) = 2ⁿ exp(r). log 2 is the sum of a number with few digits, whose product
# with n is exact, and a small one. The sum of x/log 2 and 1.5 · 2²³ is rounded to a whole number, which is then in its
# last bits. With the bias of an exponent added too, these bits are moved to where a number has its exponent: n = −127
# gives 0, and n = 128 infinity. The polynomial is that of Cephes (Moshier's expf).
LOG2_E, LOG2_HIGH, LOG2_LOW = _numbers(math.log2(math.e), 0.693359375, math.log(2) - 0.693359375)
EXP_POLYNOMIAL = _numbers(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
LOWEST, HIGHEST, SHIFT = _numbers(-88, 88.8, 1.5 * 2**23 + 127)
LOG_POLYNOMIAL = _numbers(  # of (log(1 + r) − r + r²/2)/r³ for √½ ≤ 1 + r < √2: Cephes, Moshier's logf
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# Quotients of polynomials in x², as in Eigen and XLA. From a bound on these functions are ±1; there the quotient may be
# off by some units in the last place, depending on whether the processor rounds a product and a sum once or twice, and
# slopes such as 1 − tanh² would not vanish.
TANH_ABOVE = _numbers(  # tanh(x)/x
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8, 1.48572235717979e-5,
    6.37261928875436e-4, 4.89352455891786e-3,
)  # fmt: skip
TANH_BELOW = _numbers(1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3)
A6, A5, A4, A3, A2, A1, A0 = _numbers(*ERF_ABOVE)
B4, B3, B2, B1, B0 = _numbers(*ERF_BELOW)
TANH_BOUND, ERF_LIMIT = _numbers(7.99881172180175781, ERF_BOUND)
ZERO, HALF, ONE, TWENTY_FOUR, LARGE = _numbers(0, 0.5, 1, 24, 2**24)
TINY, ROOT, INFINITY, NAN = _numbers(2.0**-126, math.sqrt(0.5), math.inf, math.nan)


def exp32(x: Any) -> Any:
    c5, c4, c3, c2, c1, c0 = EXP_POLYNOMIAL
    inside = where(x < LOWEST, LOWEST, x)  # NaN stays
    inside = where(inside > HIGHEST, HIGHEST, inside)
    shifted = inside * LOG2_E + SHIFT
    n = shifted - SHIFT
    r = (inside - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((((c5 * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
    return (p * r * r + r + ONE) * with_bits(bits_of(shifted) << np.int32(23))


def log32(x: Any) -> Any:
    c8, c7, c6, c5, c4, c3, c2, c1, c0 = LOG_POLYNOMIAL
    small = x < TINY
    bits = bits_of(where(small, x * LARGE, x))
    e = number((bits >> np.int32(23)) - np.int32(126)) - where(small, TWENTY_FOUR, ZERO)
    m = with_bits((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000))  # from ½ to 1
    low = m < ROOT
    r, e = where(low, m + m, m) - ONE, e - where(low, ONE, ZERO)
    p = (((((((c8 * r + c7) * r + c6) * r + c5) * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
    y = (r + ((p * r * r * r + e * LOG2_LOW) - HALF * r * r)) + e * LOG2_HIGH
    y = where(x < INFINITY, y, x)  # ∞ and NaN
    y = where(x == ZERO, -INFINITY, y)
    return where(x < ZERO, NAN, y)


def tanh32(x: Any) -> Any:
    a6, a5, a4, a3, a2, a1, a0 = TANH_ABOVE
    b3, b2, b1, b0 = TANH_BELOW
    z = x * x
    above = (((((a6 * z + a5) * z + a4) * z + a3) * z + a2) * z + a1) * z + a0
    y = x * above / (((b3 * z + b2) * z + b1) * z + b0)
    y = where(x > TANH_BOUND, ONE, y)  # NaN stays
    return where(x < -TANH_BOUND, -ONE, y)


def erf32(x: Any) -> Any:
    z = x * x
    above = (((((A6 * z + A5) * z + A4) * z + A3) * z + A2) * z + A1) * z + A0
    y = x * above / ((((B4 * z + B3) * z + B2) * z + B1) * z + B0)
    y = where(x > ERF_LIMIT, ONE, y)
    return where(x < -ERF_LIMIT, -ONE, y)


def number(x: Any) -> Any:
    """Whole numbers, int32, as float32."""
    return x.astype(np.float32)


def elementwise(formula: Callable, name: str, docstring: str) -> Any:
    """An operation with this name and docstring, which applies `formula` to each element of an array."""

    def function(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return formula(x)

    function.__name__, function.__doc__ = name, docstring
    return operation(function)


exp = elementwise(
    exp32, "exp", "exp(x), float32, right to about one unit in the last place; 0 below −87.7, infinity above 88.7."
)
log = elementwise(log32, "log", "log(x), float32.")
tanh = elementwise(tanh32, "tanh", "tanh(x), float32.")
erf = elementwise(erf32, "erf", "The error function 2/√π ∫₀ˣ exp(−t²) dt, float32.")


def log1p(x: np.ndarray) -> np.ndarray:
    """log(1 + x), float32: the rounding of u = 1 + x is made up for by the quotient of x and u − 1 (Kahan)."""
    u = 1 + x
    same = (u == 1) | np.isinf(u)
    return np.where(same, x, log(u) * (x / np.where(same, 1, u - 1)))


class PortableKey(Key):
    """A key whose generator draws normal and uniform numbers with the same bits on every machine.

    NumPy's own generator calls the system's logarithm for some of them, and its compiler may fuse a product and a sum.
    """

    def fold(self, *parts: int | str) -> PortableKey:
        return PortableKey(*super().fold(*parts).words)

    def generator(self) -> np.random.Generator:
        return PortableGenerator(np.random.Philox(self.seed_sequence()))


class PortableGenerator(BoundedGenerator):
    """NumPy's generator with the two methods that the layers use, computed from its exact uniform numbers."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """√(−2 log u) cos(2π v) for uniform u and v (Box and Muller), with the precision of float32."""
        take_room(size)
        u, v = 1 - self.random(size, np.float32), self.random(size)
        return (np.sqrt(-2 * log(np.asarray(u))) * cosine(2 * math.pi * v)).astype(dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        take_room(size)
        return low + (high - low) * self.random(size)


# IEEE 754 defines the results of these, or they only compare numbers.
EXACT = {
    *(np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive, np.absolute, np.sqrt, np.square),
    *(np.reciprocal, np.sign, np.signbit, np.copysign, np.floor, np.ceil, np.rint, np.trunc),
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    *(np.isnan, np.isinf, np.isfinite, np.logical_and, np.logical_or, np.logical_xor, np.logical_not),
}
PRINTING = np.array_repr, np.array_str, np.array2string
MOVING = {  # these move numbers, or call the other functions
    *(np.all, np.any, np.argmax, np.argmin, np.array_equal, *PRINTING),
    *(np.array_split, np.broadcast_to, np.clip, np.concatenate, np.copy, np.copyto, np.count_nonzero, np.cumsum),
    *(np.empty_like, np.expand_dims, np.full_like, np.matrix_transpose, np.max, np.mean, np.min, np.moveaxis),
    *(np.ndim, np.nonzero, np.ones_like, np.repeat, np.reshape, np.result_type, np.shape, np.size, np.split),
    *(np.squeeze, np.stack, np.sum, np.swapaxes, np.take, np.take_along_axis, np.transpose, np.where, np.zeros_like),
}
REFUSED = {  # also as methods
    *(np.argpartition, np.argsort, np.cumprod, np.dot, np.partition, np.round, np.sort, np.std, np.trace, np.var),
}
# The options of each way to call a ufunc, and of the functions that move numbers. NumPy's own calls have some of them.
OPTIONS = {"__call__": {"where", "casting", "subok"}, "reduce": {"axis", "dtype", "keepdims"}}
OPTIONS |= {"accumulate": {"axis", "dtype"}, "at": set()}
KEYWORDS = {"axis", "axes", "keepdims", "shape", "fill_value", "indices", "order", "subok", "device", "casting"}


def options_of(ufunc: Any, method: str, out: Any, options: dict) -> dict:
    """The options, without those that are as if not given. Raises TypeError for a call that a GPU does not know."""
    empty = {"dtype": None, "where": True}
    options = {name: x for name, x in options.items() if name not in empty or x is not empty[name]}
    wrong = options.keys() - OPTIONS.get(method, set())
    if "where" in options and (out is None or ufunc not in EXACT):
        wrong = {"where"}
    if wrong or method not in OPTIONS or (method == "at" and ufunc is not np.add):
        raise undefined(ufunc, *sorted(wrong))
    return options


def expect_function(function: Any, options: dict) -> None:
    """Raise TypeError for a function, or an option, that a GPU does not know."""
    if function not in MOVING:
        raise undefined(function)
    known = KEYWORDS | {"dtype"} if function in (np.sum, np.mean) or "_like" in function.__name__ else KEYWORDS
    wrong = {name for name, x in options.items() if x is not None} - known
    if wrong and function not in PRINTING:
        raise undefined(function, *sorted(wrong))


class PortableArray(np.ndarray):
    """A NumPy array whose functions have the same bits on every processor.

    These are the functions that IEEE 754 defines, those that only move or compare numbers, and those of this module.
    Any other function raises TypeError. Their results are such arrays too, also together with ordinary arrays. But a
    number that an index takes out is an ordinary one, and so is the result of an ordinary array's method `dot`.
    """

    __pow__: Any
    __pow__, __ipow__ = NDArrayOperatorsMixin.__pow__, NDArrayOperatorsMixin.__ipow__  # ndarray's have shortcuts

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        given = [x.view(np.ndarray) if isinstance(x, PortableArray) else x for x in inputs]
        options = options_of(ufunc, method, out, options)
        if isinstance(options.get("where"), PortableArray):
            options["where"] = options["where"].view(np.ndarray)
        exact = ufunc in EXACT if method in ("__call__", "at") else ufunc in (np.logical_and, np.logical_or)
        if exact and out is not None:
            getattr(ufunc, method)(*given, out=tuple(x.view(np.ndarray) for x in out), **options)
            return out[0]
        if exact:
            result = getattr(ufunc, method)(*given, **options)
        elif "dtype" not in options and all(map(is_whole, given)):
            result = getattr(ufunc, method)(*given, **options)
            if result.dtype.kind not in "biu":
                raise undefined(ufunc)
        elif (ufunc, method) in DEFINED:
            result = DEFINED[ufunc, method](*given, **options)
        else:
            raise undefined(ufunc)
        if out is None:
            return portable(result)
        out[0][...] = result
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        expect_function(function, kwargs)
        if function is np.cumsum:  # NumPy would go on with an ordinary array after the method's TypeError
            return args[0].cumsum(*args[1:], **kwargs)
        return portable(super().__array_function__(function, types, args, kwargs))

    def clip(self, low: Any = None, high: Any = None, out: Any = None) -> Any:
        x = self if low is None else np.maximum(self, low)
        x = x if high is None else np.minimum(x, high)
        return x if out is None else np.positive(x, out=out)

    def cumsum(self, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        if not is_whole(self) or not (dtype is out is None):
            raise undefined(np.cumsum)
        return portable(self.view(np.ndarray).cumsum(axis))

    def erf(self) -> Any:
        """The error function, for `backend.erf`."""
        return portable(erf(self.view(np.ndarray)))


def refuse_methods(kind: type) -> None:
    """Make the methods of a class that have no portable definition raise TypeError."""
    for function in REFUSED:

        def method(*_: Any, function: Any = function, **__: Any) -> Any:
            raise undefined(function)

        setattr(kind, function.__name__, method)


PORTABLE_CLASSES: dict[type, type] = {}  # for the array class of another library, its portable counterpart


def is_portable(x: Any) -> bool:
    """Whether x is a `PortableArray`, or its counterpart on a GPU."""
    return isinstance(x, (PortableArray, *PORTABLE_CLASSES.values()))


def portable(x: Any) -> Any:
    """x as a `PortableArray` if it is an array or a number of NumPy; a list or tuple of these item by item. An
    array on a GPU becomes the counterpart there, an array of another class with the same functions.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x).view(PortableArray)
    if type(x) in PORTABLE_CLASSES:
        return PORTABLE_CLASSES[type(x)](x)
    return type(x)(map(portable, x)) if type(x) in (list, tuple) else x


def is_whole(x: Any) -> bool:
    """Whether x is an integer, or an array of integers or of truth values."""
    return isinstance(x, int) or getattr(x, "dtype", np.dtype(float)).kind in "biu"


def undefined(function: Any, *options: str) -> TypeError:
    """The error for a function, with these options, that has no portable definition."""
    name = function.__name__ + (f" with {', '.join(options)}" if options else "")
    return TypeError(f"{name}: not one of the functions of real numbers that have the same bits on every processor")


def _sum(x: np.ndarray, axis: Axes = 0, dtype: Any = None, keepdims: bool = False) -> np.ndarray:
    return total(x if dtype is None else x.astype(dtype), axis, keepdims)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dtype = np.result_type(a, b)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"portable product: expected float32 or float64, got {dtype}")
    c = product(*(x.astype(dtype, copy=False) for x in (a if a.ndim > 1 else a[None], b if b.ndim > 1 else b[:, None])))
    c = c if b.ndim > 1 else c[..., 0]
    return c if a.ndim > 1 else c[..., 0, :] if b.ndim > 1 else c[..., 0]


def _elementwise(function: Any) -> Callable:
    def of_float32(x: np.ndarray) -> np.ndarray:
        if x.dtype != np.float32:
            raise TypeError(f"portable {function.__name__}: expected float32, got {x.dtype}")
        return function(x)

    return of_float32


# NumPy does not say which of two zeros is the greater one, so that is the second; the greatest of a row is never −0.
DEFINED: dict[tuple[Any, str], Callable] = {
    (np.add, "reduce"): _sum,
    (np.matmul, "__call__"): _product,
    (np.maximum, "__call__"): lambda a, b: np.where((a > b) | np.isnan(a), a, b),
    (np.minimum, "__call__"): lambda a, b: np.where((a < b) | np.isnan(a), a, b),
    (np.maximum, "reduce"): lambda x, **options: np.maximum.reduce(x, **options) + 0,
    (np.minimum, "reduce"): lambda x, **options: np.minimum.reduce(x, **options) + 0,
    (np.exp, "__call__"): _elementwise(exp),
    (np.log, "__call__"): _elementwise(log),
    (np.log1p, "__call__"): _elementwise(log1p),
    (np.tanh, "__call__"): _elementwise(tanh),
}
refuse_methods(PortableArray)

"""Arithmetic with the same bits on every processor.

IEEE 754 defines, bit by bit, the results of + − × ÷ and of the square root. It says nothing about the order in which a
sum is added, whether a product and a sum are rounded once or twice, or the value of exp. So libraries differ, and so
does one library on two processors. This module defines them:

- `product`: each element is a chain of fused multiply-adds, from the first term to the last.
- `total`: the upper half of the terms is added to the lower half, and so on.
- `exp`, `log`, `tanh`, `erf`: polynomials and their quotients, by separate multiplications and additions.

These functions take NumPy arrays and are operations, so that twins can compute the same bits in less time. A
`PortableArray` is an array that computes with them: if the parameters are of this kind (`make_portable`), the
references of all operations are portable. A `PortableKey` draws the weights. The rest of the package needs to know
nothing of this: a run with portable bits takes such a key and such parameters, and the micro-batches of `CUT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .backend import ERF_ABOVE, ERF_BELOW, ERF_BOUND, cosine
from .dispatch import operation
from .rng import Key

Axes = int | tuple[int, ...] | None
DEFINITION = 2  # to be raised when any of the bits defined here change
CUT = {"micro_batch": None, "micro_batches": 8}  # how a batch is cut, whatever is asked for: bits depend on it


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
E5, E4, E3, E2, E1, E0 = _numbers(
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5
)
LOWEST, HIGHEST, SHIFT = _numbers(-88, 88.8, 1.5 * 2**23 + 127)
L8, L7, L6, L5, L4, L3, L2, L1, L0 = _numbers(  # of (log(1 + r) − r + r²/2)/r³ for √½ ≤ 1 + r < √2: Moshier's logf
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# Quotients of polynomials in x², as in Eigen and XLA. From a bound on these functions are ±1; there the quotient may be
# off by some units in the last place, depending on whether the processor rounds a product and a sum once or twice, and
# slopes such as 1 − tanh² would not vanish.
T6, T5, T4, T3, T2, T1, T0 = _numbers(  # tanh(x)/x
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8, 1.48572235717979e-5,
    6.37261928875436e-4, 4.89352455891786e-3,
)  # fmt: skip
U3, U2, U1, U0 = _numbers(1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3)
A6, A5, A4, A3, A2, A1, A0 = _numbers(*ERF_ABOVE)
B4, B3, B2, B1, B0 = _numbers(*ERF_BELOW)
TANH_BOUND, ERF_LIMIT = _numbers(7.99881172180175781, ERF_BOUND)
ZERO, HALF, ONE, TWENTY_FOUR, LARGE = _numbers(0, 0.5, 1, 24, 2**24)
TINY, ROOT, INFINITY, NAN = _numbers(2.0**-126, math.sqrt(0.5), math.inf, math.nan)


def exp32(x: Any) -> Any:
    """exp(x), right to about one unit in the last place; 0 below −87.7, infinity above 88.7."""
    inside = where(x < LOWEST, LOWEST, x)  # NaN stays
    inside = where(inside > HIGHEST, HIGHEST, inside)
    shifted = inside * LOG2_E + SHIFT
    n = shifted - SHIFT
    r = (inside - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((((E5 * r + E4) * r + E3) * r + E2) * r + E1) * r + E0
    return (p * r * r + r + ONE) * with_bits(bits_of(shifted) << np.int32(23))


def log32(x: Any) -> Any:
    """log(x)"""
    small = x < TINY
    bits = bits_of(where(small, x * LARGE, x))
    e = number((bits >> np.int32(23)) - np.int32(126)) - where(small, TWENTY_FOUR, ZERO)
    m = with_bits((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000))  # from ½ to 1
    low = m < ROOT
    r, e = where(low, m + m, m) - ONE, e - where(low, ONE, ZERO)
    p = (((((((L8 * r + L7) * r + L6) * r + L5) * r + L4) * r + L3) * r + L2) * r + L1) * r + L0
    y = (r + ((p * r * r * r + e * LOG2_LOW) - HALF * r * r)) + e * LOG2_HIGH
    y = where(x < INFINITY, y, x)  # ∞ and NaN
    y = where(x == ZERO, -INFINITY, y)
    return where(x < ZERO, NAN, y)


def tanh32(x: Any) -> Any:
    """tanh(x)"""
    z = x * x
    above = (((((T6 * z + T5) * z + T4) * z + T3) * z + T2) * z + T1) * z + T0
    y = x * above / (((U3 * z + U2) * z + U1) * z + U0)
    y = where(x > TANH_BOUND, ONE, y)  # NaN stays
    return where(x < -TANH_BOUND, -ONE, y)


def erf32(x: Any) -> Any:
    """The error function 2/√π ∫₀ˣ exp(−t²) dt."""
    z = x * x
    above = (((((A6 * z + A5) * z + A4) * z + A3) * z + A2) * z + A1) * z + A0
    y = x * above / ((((B4 * z + B3) * z + B2) * z + B1) * z + B0)
    y = where(x > ERF_LIMIT, ONE, y)
    return where(x < -ERF_LIMIT, -ONE, y)


def number(x: Any) -> Any:
    """Whole numbers, int32, as float32."""
    return x.astype(np.float32)


def elementwise(formula: Callable) -> Any:
    """An operation that applies a function of one number to each number of a float32 array."""
    name = formula.__name__.removesuffix("32")

    def function(x: np.ndarray) -> np.ndarray:
        if x.dtype != np.float32:
            raise TypeError(f"portable {name}: expected float32, got {x.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            return formula(x)

    function.__name__ = name
    return operation(function)


exp, log, tanh, erf = map(elementwise, (exp32, log32, tanh32, erf32))


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


class PortableGenerator(np.random.Generator):
    """NumPy's generator with the two methods that the layers use, computed from its exact uniform numbers."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        """√(−2 log u) cos(2π v) for uniform u and v (Box and Muller), with the precision of float32."""
        u, v = 1 - self.random(size, np.float32), self.random(size)
        return (np.sqrt(-2 * log(np.asarray(u))) * cosine(2 * math.pi * v)).astype(dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * self.random(size)


def named(names: str) -> set[Any]:
    """NumPy's functions of these names."""
    return {getattr(np, name) for name in names.split()}


# IEEE 754 defines the results of these, or they only compare numbers.
EXACT = named("""
    add subtract multiply divide negative positive absolute sqrt square reciprocal sign signbit copysign floor ceil rint
    trunc equal not_equal less less_equal greater greater_equal isnan isinf isfinite logical_and logical_or logical_xor
    logical_not
""")
EXACT_CALLS = {(ufunc, "__call__") for ufunc in EXACT}
EXACT_CALLS |= {(np.add, "at"), (np.logical_and, "reduce"), (np.logical_or, "reduce")}
MOVING = named("""
    all any argmax argmin array_equal array_repr array_str array2string array_split broadcast_to clip concatenate copy
    copyto count_nonzero cumsum empty_like expand_dims full_like matrix_transpose max mean min moveaxis ndim nonzero
    ones_like repeat reshape result_type shape size split squeeze stack sum swapaxes take take_along_axis transpose
    where zeros_like
""")  # these move numbers, or call the other functions
REFUSED = named("argpartition argsort cumprod dot partition round sort std trace var")  # also as methods
# The options of a ufunc that NumPy's own functions give, and `where` for a result that exists already.
OPTIONS = {"__call__": {"where", "casting", "subok"}, "reduce": {"axis", "dtype", "keepdims"}}


class PortableArray(np.ndarray):
    """A NumPy array whose functions have the same bits on every processor.

    These are the functions that IEEE 754 defines, those that only move or compare numbers, and those of this module.
    Any other function raises TypeError. Their results are such arrays too, also together with ordinary arrays. But a
    number that an index takes out is an ordinary one, and so is the result of an ordinary array's method `dot`.
    """

    __pow__: Any
    __pow__, __ipow__ = NDArrayOperatorsMixin.__pow__, NDArrayOperatorsMixin.__ipow__  # ndarray's have shortcuts

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        given, call = ordinary(inputs), getattr(ufunc, method)
        as_if_not_given = {"dtype": None, "where": True}
        options = {name: x for name, x in options.items() if x is not as_if_not_given.get(name, self)}
        exact = (ufunc, method) in EXACT_CALLS
        wrong = options.keys() - OPTIONS.get(method, set())
        if "where" in options and (out is None or not exact):
            wrong = {"where"}
        if exact and not wrong:
            if out is None:
                return portable(call(*given, **options))
            call(*given, out=ordinary(out), **dict(zip(options, ordinary(options.values()), strict=True)))
            return out[0]
        if not wrong and "dtype" not in options and all(map(is_whole, given)):
            result = call(*given, **options)
            if not is_whole(result):
                raise undefined(ufunc)
        elif not wrong and (ufunc, method) in DEFINED:
            result = DEFINED[ufunc, method](*given, **options)
        else:
            raise undefined(ufunc, *sorted(wrong))
        if out is None:
            return portable(result)
        out[0][...] = result
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in MOVING:
            raise undefined(function)
        if function is np.cumsum:  # NumPy would go on with an ordinary array after the method's TypeError
            return args[0].cumsum(*args[1:], **kwargs)
        return portable(super().__array_function__(function, types, args, kwargs))

    def clip(self, low: Any, high: Any, out: Any = None) -> Any:
        return np.minimum(np.maximum(self, low), high, out=out)

    def cumsum(self, axis: int | None = None) -> Any:
        if not is_whole(self):
            raise undefined(np.cumsum)
        return portable(self.view(np.ndarray).cumsum(axis))

    def erf(self) -> Any:
        """The error function, for `backend.erf`."""
        return portable(erf(self.view(np.ndarray)))


for function in REFUSED:

    def refuse(self: Any, *args: Any, function: Any = function, **options: Any) -> Any:
        raise undefined(function)

    setattr(PortableArray, function.__name__, refuse)


def make_portable(model: Any) -> Any:
    """Let a model compute the same bits on every processor, and return it: its parameters become `PortableArray`s. Make
    optimizers and replicas afterwards.

    Raises ValueError unless the parameters are float32 on a CPU; RuntimeError if the processor replaces subnormal
    numbers by 0, which another library may have switched on.
    """
    if np.float32(1e-39) * np.float32(0.5) == 0:
        reason = "another library has made the processor replace subnormal numbers by 0"
        raise RuntimeError(f"bits: {reason}; turn that off (in PyTorch: torch.set_flush_denormal(False))")
    flat = model.flat
    if not isinstance(flat.data, np.ndarray) or flat.data.dtype != np.float32:
        raise ValueError(f"bits: portable bits need float32 on a CPU, got {flat.data.dtype} on {model.device}")
    type(flat)(flat.params, portable(flat.data), portable(flat.grad))
    return model


def portable(x: Any) -> Any:
    """x as a `PortableArray` if it is an array or a number of NumPy; a list or tuple of these item by item."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).view(PortableArray)
    return type(x)(map(portable, x)) if type(x) in (list, tuple) else x


def ordinary(arrays: Any) -> tuple:
    """These, with an ordinary array for each `PortableArray`."""
    return tuple(x.view(np.ndarray) if isinstance(x, PortableArray) else x for x in arrays)


def is_whole(x: Any) -> bool:
    """Whether x is an integer, or an array of integers or of truth values."""
    return isinstance(x, int) or getattr(x, "dtype", np.dtype(float)).kind in "biu"


def undefined(function: Any, *options: str) -> TypeError:
    """The error for a function, with these options, that has no portable definition."""
    name = function.__name__ + (f" with {', '.join(options)}" if options else "")
    return TypeError(f"{name}: not one of the functions of real numbers that have the same bits on every processor")


def _sum(x: np.ndarray, axis: Axes = 0, dtype: Any = None, keepdims: bool = False) -> np.ndarray:
    return total(x.astype(dtype or x.dtype, copy=False), axis, keepdims)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dtype = np.result_type(a, b)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"portable product: expected float32 or float64, got {dtype}")
    c = product(*(x.astype(dtype, copy=False) for x in (np.atleast_2d(a), b if b.ndim > 1 else b[:, None])))
    return c.squeeze((-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1))


# NumPy does not say which of two zeros is the greater one, so that is the second; the greatest of a row is never −0.
DEFINED: dict[tuple[Any, str], Callable] = {
    (np.add, "reduce"): _sum,
    (np.matmul, "__call__"): _product,
    (np.maximum, "__call__"): lambda a, b: np.where((a > b) | np.isnan(a), a, b),
    (np.minimum, "__call__"): lambda a, b: np.where((a < b) | np.isnan(a), a, b),
    (np.maximum, "reduce"): lambda x, **options: np.maximum.reduce(x, **options) + 0,
    (np.minimum, "reduce"): lambda x, **options: np.minimum.reduce(x, **options) + 0,
} | {(getattr(np, each.__name__), "__call__"): each for each in (exp, log, log1p, tanh)}

"""Arrays that carry a bound on the rounding error that a computation in a narrower type may make.

`Arithmetic` says in which types a computation is to be carried out. A `Bounded` array behaves like a NumPy array of the
type `dtype`, but holds the exact values (in float64) and, for each, a bound on the error of a computation in that type.
NumPy's functions run on it, and so does the package's own code through `array_module`.

With u the unit round-off of the type of the arithmetic and γ_n = n u/(1 − n u), the bound grows by

    u |z|             z = f(x), elementwise, where f is rounded correctly; the arguments' bounds are propagated
    9 u |z|           exp, tanh and others, which libraries compute to four units in the last place
    γ_n Σ |x|         a sum of n terms, in any order
    γ_K |A| |B|       a matrix product of inner length K
    u_d |z|           a value z that is stored in the type d: by a cast, or as an operand or result of a matrix product

and not at all for indexing, max, where and casts to a wider type. A rounding is at least half the smallest number of
its type, for numbers that underflow. Where a comparison could go either way, both outcomes are allowed.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 2.2, 3.1, 3.3 (running error analysis)
and 3.5; for long sums Higham, Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 2.4.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..backend import is_floating_type

_NO_BOUNDS = (
    "an array with error bounds cannot become a NumPy array, nor be written into one: replace np.zeros(shape) with "
    "np.zeros_like(x), or with xp.zeros(shape) where xp = scratchformer.backend.array_module(x)"
)
_LAMBDA = 8.0
_LIBRARY_ULPS = 4  # the accuracy that libraries keep for exp, tanh, ...: 8 u before the last rounding


class Limits(NamedTuple):
    """The unit round-off of a floating-point type, its smallest and its largest number.

    `smallest` is subnormal for float16. Elsewhere it is normal, since processors may replace subnormal numbers by zero.
    """

    u: float
    smallest: float
    largest: float


@lru_cache
def limits(dtype: Any) -> Limits:
    """The limits of a floating-point type, bfloat16 included."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        info: Any = np.finfo(dtype)
    else:
        import ml_dtypes

        info = ml_dtypes.finfo(dtype)
    smallest = info.smallest_subnormal if dtype == np.float16 else info.smallest_normal
    return Limits(float(info.eps) / 2, float(smallest), float(info.max))


def widest(*dtypes: Any) -> np.dtype:
    """The type with the smallest unit round-off."""
    return min(map(np.dtype, dtypes), key=lambda dtype: limits(dtype).u)


class Steps(NamedTuple):
    """The steps on one line of code whose results have the type that is watched."""

    times: int
    terms: int  # the length of the longest sum; 1 for elementwise functions
    largest: float  # the largest absolute value of a result


@dataclass(eq=False)
class Arithmetic:
    """The types in which sums and products, and elementwise functions, are carried out, unless a wider one is used.

    `likely`: bound the error of a long sum by what it practically never exceeds (see `gamma`), not by the worst case.
    `library` is what `array_module` returns for the arrays.

    To explain an error: with a type in `watched`, the steps whose results have that type are collected in `steps`, by
    the line of code, and the lines for which `narrow` is true are carried out in that type itself.
    """

    accumulate: Any = np.float32
    elementwise: Any = np.float32
    likely: bool = False
    watched: Any = None
    narrow: Callable[[str], bool] = lambda _: False
    steps: dict[str, Steps] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.library = _BoundedLibrary(self)

    def array(self, x: Any, dtype: Any = None) -> Bounded:
        """The numbers `x`, exact, as an array of the type `dtype`, by default that of `x`."""
        x = np.asarray(x)
        dtype = np.dtype(dtype or x.dtype)
        return Bounded(self, _held(x, dtype), None, dtype, stored=True)

    def array_of(self, x: Any) -> Bounded:
        """`x` itself if it has bounds, otherwise the numbers, exact."""
        return x if isinstance(x, Bounded) else self.array(x)

    def cast(self, x: Bounded, dtype: np.dtype) -> Bounded:
        """A copy of `x` in the type `dtype`, rounded if that is narrower."""
        if not is_floating_type(dtype):
            return Bounded(self, x.value.astype(dtype), x.bound.copy(), dtype, x.terms)
        if not x.floating:
            bound = x.bound + np.abs(x.value - x.value.astype(dtype).astype(np.float64))
            return Bounded(self, x.value.astype(np.float64), bound, dtype, x.terms)
        old, new = limits(x.dtype), limits(dtype)
        narrower = new.u > old.u or new.smallest > old.smallest
        return self.stored(x, dtype) if narrower else Bounded(self, x.value.copy(), x.bound.copy(), dtype, x.terms)

    def stored(self, x: Bounded, dtype: np.dtype) -> Bounded:
        """`x` rounded to `dtype`."""
        bound = x.bound + _rounding(x.value, x.bound, limits(dtype))
        return Bounded(self, x.value.copy(), bound, dtype, x.terms, stored=True)

    def elementwise_result(
        self, value: Any, bound: Any, dtype: np.dtype, terms: int, ulps: int, small: bool
    ) -> Bounded:
        """The result of an elementwise function, with the rounding of its last step. `ulps`: the error of a library's
        function before that. `small`: whether it can underflow.
        """
        if ulps:
            bound = bound + 2 * ulps * limits(widest(dtype, np.float32)).u * np.abs(value)
        limit = limits(dtype if self.step(1, value, dtype) else widest(dtype, self.elementwise))
        return Bounded(self, value, bound + _rounding(value, bound, limit, small), dtype, terms)

    def sum_result(
        self, value: Any, bound: Any, magnitude: Any, n: int, dtype: np.dtype, terms: int, roundings: Any
    ) -> Bounded:
        """A sum of n terms, with `magnitude` the sum of their absolute values. `roundings`: the most for each
        term, n − 1 for a sum of numbers and n for a sum of products.
        """
        u = limits(dtype if self.step(n, value, dtype) else widest(dtype, self.accumulate)).u
        bound = bound + gamma(roundings, u, self.likely) * magnitude
        return Bounded(self, value, bound, dtype, max(n, terms))

    def step(self, terms: int, value: np.ndarray, dtype: np.dtype) -> bool:
        """Collect a step. Returns whether it is to be carried out in the narrow type."""
        if self.watched is None or dtype != self.watched:
            return False
        largest = float(np.max(np.abs(value), initial=0, where=np.isfinite(value)))
        line = _line()
        before = self.steps.get(line, Steps(0, 1, 0.0))
        self.steps[line] = Steps(before.times + 1, max(before.terms, terms), max(before.largest, largest))
        return self.narrow(line)


def gamma(n: Any, u: float, likely: bool = False) -> Any:
    """γ_n = n u/(1 − n u); if `likely`, and smaller, exp(λ √n u + n u²/(1 − u)) − 1 with λ = 8.

    If rounding errors are independent with mean 0, a sum of n terms exceeds the latter with a probability of at most
    2 n exp(−λ²(1 − u)²/2), which is 1e-10 for n = 4096.
    """
    n = np.asarray(n, dtype=np.float64)
    possible = np.where(n * u < 1, n * u / np.maximum(1 - n * u, u), np.inf)
    return np.minimum(possible, np.expm1(_LAMBDA * np.sqrt(n) * u + n * u * u / (1 - u))) if likely else possible


def _rounding(value: np.ndarray, bound: np.ndarray, limit: Limits, small: bool = True) -> np.ndarray:
    """The largest error of one rounding of a number that is within `bound` of `value`."""
    size = np.abs(value) + bound
    error = limit.u * size
    return np.where(size > 0, np.maximum(error, limit.smallest / 2), 0) if small else error


def _held(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` in the type in which a Bounded array of `dtype` holds its values."""
    return x.astype(np.float64) if is_floating_type(dtype) else x.astype(dtype)


def _line() -> str:
    """The line of code that called, outside of this module and of NumPy."""
    frame: Any = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "numpy" in frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_name}, line {frame.f_lineno}" + f": {code}" * bool(code)


class Bounded(NDArrayOperatorsMixin):
    """An array of the type `dtype`: the exact values, the bounds on their errors, and the length of the longest sum
    that they come from. Integers and truth values have bounds only where a comparison could go either way.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, arithmetic: Arithmetic, value: Any, bound: Any, dtype: Any, terms: int = 1, stored: bool = False
    ) -> None:
        self.arithmetic, self.value, self.dtype, self.terms = arithmetic, np.asarray(value), np.dtype(dtype), terms
        self.stored = stored  # whether the values have been rounded to `dtype`
        if bound is None:
            bound = np.zeros(self.value.shape)
        elif not np.isfinite(self.value).all() or np.isnan(bound).any():
            bound = np.where(np.isfinite(self.value), np.where(np.isnan(bound), np.inf, bound), 0)
        self.bound = np.asarray(bound, dtype=np.float64)

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.itemsize)
    T = property(lambda self: np.transpose(self))
    mT = property(lambda self: np.swapaxes(self, -1, -2))
    floating = property(lambda self: is_floating_type(self.dtype))

    def __array_namespace__(self, api_version: str | None = None) -> ModuleType:
        return self.arithmetic.library

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(_NO_BOUNDS)

    def get(self) -> np.ndarray:
        """The exact values."""
        return self.value

    def __repr__(self) -> str:
        return f"Bounded({self.value!r}, bound={self.bound!r}, dtype={self.dtype})"

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def item(self) -> Any:
        """The only element, as a Python number. Raises TypeError if it has an error bound, which would be lost."""
        if self.bound.any():
            raise TypeError("a number taken out of an array loses its error bound: keep the array")
        return self.value.item()

    def tolist(self) -> Any:
        return self.value.tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Bounded:
        key = _values(key)
        return self.like(self.value[key], self.bound[key])

    def __setitem__(self, key: Any, x: Any) -> None:
        key, x = _values(key), self.arithmetic.cast(self.arithmetic.array_of(x), self.dtype)
        self.value[key], self.bound[key] = x.value, x.bound
        self.terms, self.stored = max(self.terms, x.terms), self.stored and x.stored

    def like(self, value: Any, bound: Any) -> Bounded:
        """An array of the same type and history with other values."""
        return Bounded(self.arithmetic, value, bound, self.dtype, self.terms, self.stored)

    def astype(self, dtype: Any, copy: bool = True) -> Bounded:
        if np.dtype(dtype) == self.dtype and not copy:
            return self
        return self.arithmetic.cast(self, np.dtype(dtype))

    def view(self, dtype: Any) -> Bounded:
        if self.floating:
            raise TypeError("the bits of an array with error bounds cannot be viewed as another type")
        return self.arithmetic.array(self.value.view(dtype))

    def reshape(self, *shape: Any, **keywords: Any) -> Any:
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, **keywords)

    def transpose(self, *axes: Any) -> Any:
        return np.transpose(self, (axes[0] if len(axes) == 1 else axes) or None)

    def flatten(self) -> Any:
        return np.ravel(self).copy()

    def fill(self, x: Any) -> None:
        self[...] = x

    # What NumPy calls.

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        return _ufunc(self.arithmetic, ufunc, method, inputs, keywords)

    def __array_function__(self, function: Callable, _types: Any, args: tuple, keywords: dict) -> Any:
        name = function.__name__
        with np.errstate(all="ignore"):
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](self.arithmetic, *args, **keywords)
            if name in _STRUCTURE:
                return _rearranged(self.arithmetic, function, args, keywords)
            if name in _ANSWERS:
                return function(*_values(args), **{key: _values(x) for key, x in keywords.items()})
        raise TypeError(f"np.{name}: there is no rule for its rounding errors; write it with simpler functions")


def _method(name: str) -> Callable:
    return lambda self, *args, **keywords: getattr(np, name)(self, *args, **keywords)


for _name in """
    all any argmax argmin argsort clip copy diagonal dot max mean min nonzero ravel repeat squeeze std sum
    swapaxes take var
    """.split():
    setattr(Bounded, _name, _method(_name))


def _values(x: Any) -> Any:
    """`x` with the values of each Bounded array, also in tuples, lists and slices."""
    if isinstance(x, Bounded):
        return x.value
    if isinstance(x, slice):
        return slice(*(_values(part) for part in (x.start, x.stop, x.step)))
    return type(x)(_values(part) for part in x) if isinstance(x, tuple | list) else x


# Elementwise functions: how the bounds of the arguments propagate. A rule gets the values and bounds of all arguments.


def _of_monotone(f: Callable) -> Callable:
    """The rule of a monotone function: the larger of its changes towards both ends."""

    def propagate(a: Any, ea: Any) -> Any:
        change = np.maximum(np.abs(f(a + ea) - f(a)), np.abs(f(a) - f(a - ea)))
        return np.where(ea > 0, np.where(np.isnan(change), np.inf, change), 0)

    return propagate


def _of_quotient(a: Any, ea: Any, b: Any, eb: Any) -> Any:
    away = np.abs(b) - eb  # the denominator is at least this far from zero
    error = (ea + np.abs(a / b) * eb) / away
    return np.where((ea > 0) | (eb > 0), np.where(away > 0, error, np.inf), 0)


def _of_power(a: Any, ea: Any, b: Any, eb: Any) -> Any:
    """The largest change at the four corners, between which a power is monotone unless its base passes zero."""
    value = np.power(a, b)
    corners = [np.abs(np.power(a + i * ea, b + j * eb) - value) for i in (-1, 1) for j in (-1, 1)]
    error = np.maximum.reduce(corners)
    over_zero = (ea >= np.abs(a)) & (ea > 0)
    error = np.where(over_zero, np.where(b < 0, np.inf, np.maximum(error, np.abs(value))), error)
    return np.where((ea > 0) | (eb > 0), np.where(np.isnan(error), np.inf, error), 0)


def _of_larger(sign: int) -> Callable:
    def propagate(a: Any, ea: Any, b: Any, eb: Any) -> Any:
        a, b = sign * a, sign * b
        return np.where(a - ea > b + eb, ea, np.where(b - eb > a + ea, eb, np.maximum(ea, eb)))

    return propagate


_SUM = lambda a, ea, b, eb: ea + eb  # noqa: E731
_PRODUCT = lambda a, ea, b, eb: np.abs(a) * eb + ea * np.abs(b) + ea * eb  # noqa: E731
_EXACT: dict[str, Callable] = {
    **dict.fromkeys("negative positive absolute fabs conjugate".split(), lambda a, ea: ea),
    **dict.fromkeys("rint floor ceil trunc".split(), lambda a, ea: np.where(ea > 0, ea + 1, 0)),
    **dict.fromkeys(("maximum", "fmax"), _of_larger(1)),
    **dict.fromkeys(("minimum", "fmin"), _of_larger(-1)),
    "sign": lambda a, ea: np.where(np.abs(a) < ea, 2, 0),
    "copysign": lambda a, ea, b, eb: ea + np.where(np.abs(b) < eb, 2 * np.abs(a), 0),
}
_ROUNDED: dict[str, Callable] = {  # correctly, once
    "add": _SUM,
    "subtract": _SUM,
    "multiply": _PRODUCT,
    "divide": _of_quotient,
    "sqrt": _of_monotone(lambda a: np.sqrt(np.maximum(a, 0))),
    "square": lambda a, ea: 2 * np.abs(a) * ea + ea * ea,
    "reciprocal": lambda a, ea: _of_quotient(1.0, 0.0, a, ea),
}
_LIBRARY: dict[str, Callable] = {
    **{f.__name__: _of_monotone(f) for f in (np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p, np.cbrt)},
    **{f.__name__: _of_monotone(f) for f in (np.tanh, np.sinh, np.arctan, np.arcsinh, np.arctanh)},
    "erf": lambda a, ea: np.minimum(2 / np.sqrt(np.pi) * ea, 2),
    "erfc": lambda a, ea: np.minimum(2 / np.sqrt(np.pi) * ea, 2),
    "expit": lambda a, ea: np.minimum(ea / 4, 1),
    **dict.fromkeys(("sin", "cos"), lambda a, ea: np.minimum(ea, 2)),
    "cosh": lambda a, ea: np.cosh(np.abs(a) + ea) - np.cosh(a),
    **dict.fromkeys(("power", "float_power"), _of_power),
    **dict.fromkeys(("logaddexp", "logaddexp2"), lambda a, ea, b, eb: np.maximum(ea, eb)),
    "hypot": _SUM,
}
PROPAGATION = _EXACT | _ROUNDED | _LIBRARY
_COMPARISONS = "less less_equal greater greater_equal equal not_equal".split()
_LOGICAL = "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor invert".split()
_QUESTIONS = "isfinite isinf isnan signbit".split()


@lru_cache(maxsize=4096)
def _result_type(function: Callable, kinds: tuple) -> np.dtype:
    """The type that NumPy gives the result; `kinds` are dtypes, or Python types of numbers."""
    ones = [np.ones((1, 1), kind) if isinstance(kind, np.dtype) else kind(1) for kind in kinds]
    return function(*ones).dtype


def _ufunc(arithmetic: Arithmetic, ufunc: np.ufunc, method: str, inputs: tuple, keywords: dict) -> Any:
    out = keywords.pop("out", (None,))[0]
    keywords.pop("casting", None)
    where = _values(keywords.pop("where", True))
    if out is not None and not isinstance(out, Bounded):
        raise TypeError(_NO_BOUNDS)
    with np.errstate(all="ignore"):
        if method == "at":
            return _add_at(arithmetic, ufunc, *inputs)
        if method != "__call__":
            raise TypeError(f"np.{ufunc.__name__}.{method}: there is no rule for its rounding errors")
        result = _called(arithmetic, ufunc, inputs, keywords.get("dtype"))
        if out is None:
            return result
        if where is True:
            out[...] = result
        else:
            out[where] = np.broadcast_to(result, out.shape)[where]
    return out


def _called(arithmetic: Arithmetic, ufunc: np.ufunc, inputs: tuple, dtype: Any = None) -> Bounded:
    """An elementwise function, or a product of matrices."""
    name = ufunc.__name__
    kinds = tuple(x.dtype if hasattr(x, "dtype") else type(x) for x in inputs)
    result_type = np.dtype(dtype) if dtype is not None else _result_type(ufunc, kinds)
    if name in ("matmul", "vecdot"):
        return _product(arithmetic, ufunc, *inputs)
    arrays = [_operand(arithmetic, x, result_type) for x in inputs]
    terms = max(x.terms for x in arrays)
    value = ufunc(*(x.value for x in arrays))
    if name in _COMPARISONS:
        (a, ea), (b, eb) = ((x.value, x.bound) for x in arrays)
        return Bounded(arithmetic, value, (ea + eb > 0) & (np.abs(a - b) <= ea + eb), bool, terms)
    if name in _QUESTIONS or not any(x.floating or x.bound.any() for x in arrays):
        return arithmetic.array(value, result_type)
    if name in _LOGICAL:
        bound = np.maximum.reduce(np.broadcast_arrays(*(x.bound for x in arrays)))
        return Bounded(arithmetic, value, bound, bool, terms)
    pairs = [part for x in arrays for part in (_held(x.value, np.dtype(float)), x.bound)]
    value = _held(value, result_type)
    rule = PROPAGATION.get(name)
    if rule is None:
        raise TypeError(f"np.{name}: there is no rule for its rounding errors; write it with simpler functions")
    bound = np.broadcast_to(rule(*pairs), value.shape)
    if name in _EXACT or (name == "multiply" and any(x.dtype == bool for x in arrays)):
        return Bounded(arithmetic, value, bound.copy(), result_type, terms, stored=all(x.stored for x in arrays))
    ulps = 0 if name in _ROUNDED else _LIBRARY_ULPS
    return arithmetic.elementwise_result(value, bound, result_type, terms, ulps, small=name not in ("add", "subtract"))


def _operand(arithmetic: Arithmetic, x: Any, result_type: np.dtype) -> Bounded:
    """An argument as a Bounded array. A Python number is rounded to the type of the result."""
    if hasattr(x, "dtype") or not is_floating_type(result_type):
        return arithmetic.array_of(x)
    loop = widest(result_type, arithmetic.elementwise)
    return Bounded(arithmetic, float(x), np.abs(x - np.asarray(x).astype(loop).astype(np.float64)), np.float64)


def _product(arithmetic: Arithmetic, function: Callable, a: Any, b: Any) -> Bounded:
    """A bilinear function, such as a product of matrices. Every element is a sum of as many products as ones give."""
    a, b = (arithmetic.array_of(x) for x in (a, b))
    a, b = (x if x.stored or not x.floating else arithmetic.stored(x, x.dtype) for x in (a, b))
    value, dtype = function(a.value, b.value), np.result_type(a.dtype, b.dtype)
    if not is_floating_type(dtype):
        return arithmetic.array(value, dtype)
    n = _terms(function, a, b)
    size_a, size_b = np.abs(a.value), np.abs(b.value)
    bound = function(size_a, b.bound) + function(a.bound, size_b + b.bound)
    magnitude = function(size_a + a.bound, size_b + b.bound)
    result = arithmetic.sum_result(value, bound, magnitude, n, dtype, max(a.terms, b.terms), n)
    return arithmetic.stored(result, dtype)


def _terms(function: Callable, *arrays: Bounded) -> int:
    """How many numbers, or products, a sum adds up for an element of its result."""
    return int(np.max(function(*(np.ones(x.shape) for x in arrays)), initial=0))


def _add_at(arithmetic: Arithmetic, ufunc: np.ufunc, target: Any, index: Any, x: Any) -> None:
    """target[index] += x, unbuffered: each element of the target is a sum of its own value and what is added to it."""
    if ufunc.__name__ not in ("add", "subtract"):
        raise TypeError(f"np.{ufunc.__name__}.at: there is no rule for its rounding errors")
    if not isinstance(target, Bounded):
        raise TypeError(_NO_BOUNDS)
    index, x = _values(index), arithmetic.array_of(x)
    magnitude, count = np.abs(target.value) + target.bound, (target.value != 0).astype(float)
    np.add.at(magnitude, index, np.abs(x.value) + x.bound)
    np.add.at(count, index, np.broadcast_to(1.0, x.shape))
    np.add.at(target.bound, index, x.bound)
    ufunc.at(target.value, index, x.value)
    n = int(count.max(initial=0))
    sums = arithmetic.sum_result(target.value, target.bound, magnitude, n, target.dtype, 1, np.maximum(count - 1, 0))
    target.bound[...] = sums.bound
    target.terms, target.stored = max(target.terms, x.terms, n), n < 2 and target.stored and x.stored


# Functions of whole arrays.


def _total(arithmetic: Arithmetic, add: Callable, a: Bounded, n: int, dtype: np.dtype, roundings: int) -> Bounded:
    """A sum of n numbers, or their mean."""
    value, bound, magnitude = add(a.value), add(a.bound), add(np.abs(a.value) + a.bound)
    return arithmetic.sum_result(value, bound, magnitude, n, dtype, a.terms, roundings)


def _sum(arithmetic: Arithmetic, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
    a = arithmetic.array_of(a)
    dtype = np.dtype(dtype) if dtype is not None else np.ones(1, a.dtype).sum().dtype
    add = partial(np.sum, axis=axis, keepdims=keepdims)
    if not is_floating_type(dtype):
        return Bounded(arithmetic, add(a.value).astype(dtype), add(a.bound), dtype, a.terms)
    n = _terms(add, a)
    return _total(arithmetic, add, arithmetic.cast(a, dtype), n, dtype, max(0, n - 1))


def _mean(arithmetic: Arithmetic, a: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
    a = arithmetic.array_of(a)
    dtype = np.dtype(dtype or (a.dtype if a.floating else np.float64))
    n = _terms(partial(np.sum, axis=axis), a)
    return _total(arithmetic, partial(np.mean, axis=axis, keepdims=keepdims), a, n, dtype, n)


def _var(
    arithmetic: Arithmetic,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    ddof: int = 0,
    keepdims: bool = False,
) -> Any:
    centred = a - _mean(arithmetic, a, axis, dtype, keepdims=True)
    mean = _mean(arithmetic, centred * centred, axis, keepdims=keepdims)
    n = a.size // max(1, mean.size)
    return mean * (n / (n - ddof)) if ddof else mean


def _extreme(sign: int, name: str) -> Callable:
    def extreme(arithmetic: Arithmetic, a: Any, axis: Any = None, keepdims: bool = False) -> Any:
        """The bound is the largest among the elements that could be the maximum."""
        value = getattr(a.value, name)(axis=axis, keepdims=keepdims)
        lower = (sign * a.value - a.bound).max(axis=axis, keepdims=True)
        possible = sign * a.value + a.bound >= lower
        bound = np.where(possible, a.bound, 0).max(axis=axis, keepdims=keepdims)
        return a.like(value, bound)

    return extreme


def _where(arithmetic: Arithmetic, condition: Any, a: Any = None, b: Any = None) -> Any:
    if a is None:
        return np.where(_values(condition))
    dtype = np.result_type(*(x.dtype if hasattr(x, "dtype") else x for x in (a, b)))
    condition, (a, b) = arithmetic.array_of(condition), (_operand(arithmetic, x, dtype) for x in (a, b))
    value = np.where(condition.value, a.value, b.value)
    bound = np.where(condition.value, a.bound, b.bound)
    if condition.bound.any():
        either = np.maximum(a.bound, b.bound) + np.abs(np.subtract(a.value, b.value, dtype=np.float64))
        bound = np.where(condition.bound > 0, either, bound)
    return Bounded(arithmetic, _held(value, dtype), bound, dtype, max(a.terms, b.terms), stored=a.stored and b.stored)


def _einsum(arithmetic: Arithmetic, subscripts: str, *operands: Any, **_options: Any) -> Any:
    if len(operands) > 2:
        raise TypeError("np.einsum: expected at most two arrays; more are multiplied in an unknown order")
    function = partial(np.einsum, subscripts)
    if len(operands) == 2:
        return _product(arithmetic, function, *operands)
    (a,) = map(arithmetic.array_of, operands)
    n = _terms(function, a)
    return _total(arithmetic, function, a, n, a.dtype, n)


def _full_like(arithmetic: Arithmetic, a: Any, fill: Any, dtype: Any = None, shape: Any = None, **_options: Any) -> Any:
    return _made(arithmetic, np.full(a.shape if shape is None else shape, fill), dtype or a.dtype)


def _filled(fill: int) -> Callable:
    return lambda arithmetic, a, *args, **keywords: _full_like(arithmetic, a, fill, *args, **keywords)


def _made(arithmetic: Arithmetic, x: Any, dtype: Any = None) -> Bounded:
    """The numbers `x` as an array of the type `dtype`, and the error of their rounding."""
    if isinstance(x, Bounded):
        return x if dtype is None else x.astype(dtype)
    x = np.asarray(x)
    made = arithmetic.array(x, dtype or x.dtype)
    if made.floating:
        made.bound = np.nan_to_num(np.abs(made.value - made.value.astype(made.dtype).astype(np.float64)))
    return made


_STRUCTURE = set(
    """
    reshape transpose swapaxes moveaxis rollaxis expand_dims squeeze ravel broadcast_to broadcast_arrays concatenate
    concat stack vstack hstack dstack column_stack take take_along_axis repeat tile flip fliplr flipud roll rot90 split
    array_split vsplit hsplit diagonal diag tril triu pad copy atleast_1d atleast_2d atleast_3d delete insert append
    nan_to_num compress extract resize matrix_transpose permute_dims trim_zeros sliding_window_view
    """.split()
)
_ANSWERS = set(
    """
    shape ndim size argmax argmin argsort nonzero flatnonzero array_equal allclose may_share_memory shares_memory
    result_type iscomplexobj isrealobj isscalar count_nonzero searchsorted unique bincount
    """.split()
)


def _rearranged(arithmetic: Arithmetic, function: Callable, args: tuple, keywords: dict) -> Any:
    """A function that only moves elements: it moves the bounds too. Integers among its arguments are indices."""
    leaves = [x for x in _leaves((args, tuple(keywords.values()))) if hasattr(x, "dtype")]
    carriers = [x for x in leaves if is_floating_type(x.dtype)] or leaves[:1]
    first = next(x for x in leaves if isinstance(x, Bounded))
    dtype = np.result_type(*{x.dtype for x in carriers})
    terms = max(getattr(x, "terms", 1) for x in leaves)
    stored = all(getattr(x, "stored", True) for x in carriers)

    def bounds(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(bounds(part) for part in x)
        if any(x is carrier for carrier in carriers):
            return x.bound if isinstance(x, Bounded) else np.zeros(x.shape)
        return _values(x)

    value = function(*_values(args), **{key: _values(x) for key, x in keywords.items()})
    bound = function(*bounds(args), **{key: bounds(x) for key, x in keywords.items()})
    if isinstance(value, tuple | list):
        return type(value)(Bounded(arithmetic, v, b, dtype, terms, stored) for v, b in zip(value, bound, strict=True))
    return Bounded(arithmetic, value, bound, first.dtype if len(carriers) < 2 else dtype, terms, stored)


def _leaves(x: Any) -> list:
    return [leaf for part in x for leaf in _leaves(part)] if isinstance(x, tuple | list) else [x]


def _truth(name: str) -> Callable:
    def truth(arithmetic: Arithmetic, a: Any, **axes: Any) -> Any:
        return Bounded(arithmetic, getattr(a.value, name)(**axes), a.bound.any(**axes), bool)

    return truth


_FUNCTIONS: dict[str, Callable] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda arithmetic, a, *args, **keywords: np.sqrt(_var(arithmetic, a, *args, **keywords)),
    **dict.fromkeys(("max", "amax"), _extreme(1, "max")),
    **dict.fromkeys(("min", "amin"), _extreme(-1, "min")),
    "any": _truth("any"),
    "all": _truth("all"),
    "where": _where,
    "einsum": _einsum,
    "dot": lambda arithmetic, a, b: _product(arithmetic, np.dot, a, b),
    "tensordot": lambda arithmetic, a, b, axes=2: _product(arithmetic, partial(np.tensordot, axes=axes), a, b),
    "outer": lambda arithmetic, a, b: np.ravel(a)[:, None] * np.ravel(b)[None, :],
    "clip": lambda arithmetic, a, low=None, high=None, **_: np.minimum(
        np.maximum(a, -np.inf if low is None else low), np.inf if high is None else high
    ),
    **dict.fromkeys(("zeros_like", "empty_like"), _filled(0)),
    "ones_like": _filled(1),
    "full_like": _full_like,
    "copyto": lambda arithmetic, a, b, casting=None, where=True: a.__setitem__(
        ... if where is True else _values(where), b if where is True else np.broadcast_to(b, a.shape)[_values(where)]
    ),
}
_MAKERS = set("zeros ones empty full eye identity arange linspace tri asarray array ascontiguousarray".split())


class _BoundedLibrary(ModuleType):
    """NumPy, with functions that make arrays with bounds."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__("numpy with error bounds")
        self.arithmetic = arithmetic

    def __getattr__(self, name: str) -> Any:
        if name == "erf":
            from scipy import special  # slow to import

            return special.erf
        return self._maker(name) if name in _MAKERS else getattr(np, name)

    def _maker(self, name: str) -> Callable:
        def make(*args: Any, dtype: Any = None, **keywords: Any) -> Bounded:
            if isinstance(args[0], Bounded):
                x, kind = args[0], dtype or next(iter(args[1:]), args[0].dtype)
                return x.astype(kind, copy=not name.startswith("as"))
            f = "zeros" if name == "empty" else name
            return _made(self.arithmetic, getattr(np, f)(*_values(args), **keywords), dtype)

        return make

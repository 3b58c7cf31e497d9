"""A strict stand-in for a device's array library: it reveals, without a GPU, mistakes that would only show on one.

`DeviceArray` wraps a NumPy array and behaves like cupy.ndarray, or more strictly. It becomes a NumPy array only on
request (`x.get()`), it refuses NumPy arrays in operators, indices, assignments and calls, and its reductions are 0-d
arrays, never NumPy scalars. Python numbers and NumPy scalars are accepted, as in CuPy.

`library` is the matching array library, for code that writes `xp.exp(x)`. It has exactly the functions in the lists
below; CuPy has each of them too, with the keywords accepted here. NumPy arrays enter only through `library.asarray`
(or `array`, `ascontiguousarray`), which copies. `STRICT` is the device:

    x = to_device(np.ones((2, 3)), STRICT)
    y, cache = my_operation(x)              # TypeError if it calls np.exp(x), or adds a NumPy mask
    y = to_cpu(y)

It imitates behaviour, not speed or memory. But it counts transfers, and calls for which the host waits: see `traffic`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from .. import backend
from ..backend import Device

_NAME = __name__

# Every name below was compared with CuPy 14; `tests/testing/test_strict.py` repeats this where CuPy is installed.

# Elementwise functions, of arrays and numbers, with out=.
_UFUNCS = """
abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_not bitwise_or bitwise_xor
cbrt ceil conj conjugate copysign cos cosh divide divmod equal exp exp2 expm1 fabs float_power floor floor_divide fmax
fmin fmod greater greater_equal heaviside hypot invert isfinite isinf isnan ldexp left_shift less less_equal log log10
log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor matmul maximum minimum mod modf multiply
negative nextafter not_equal positive power reciprocal remainder right_shift rint sign signbit sin sinh sqrt square
subtract tan tanh true_divide trunc
"""
# The methods that CuPy's ufuncs have; in NumPy every ufunc has all of them.
_UFUNC_METHODS = {
    "at": "add subtract maximum minimum bitwise_and bitwise_or bitwise_xor",
    "reduce": "add multiply",
    "accumulate": "add multiply",
    "reduceat": "add",
}
# The only types for CuPy's add.at: no int64, no int16.
_SCATTER_TYPES = "float16 float32 float64 complex64 complex128 int32 uint32 uint64"

# Functions whose first argument must be an array: numbers and lists, which NumPy would convert, are refused.
_OF_AN_ARRAY = """
all allclose amax amin angle any argmax argmin argpartition argsort argwhere around array_equal array_split astype
atleast_1d atleast_2d atleast_3d average bincount broadcast_arrays broadcast_to clip compress copy copyto count_nonzero
cross cumprod cumsum diag diagonal diff digitize dot dsplit empty_like expand_dims extract fill_diagonal flatnonzero
flip fliplr flipud full_like histogram hsplit imag inner interp isclose isin isneginf isposinf kron lexsort
matrix_transpose max mean median meshgrid min moveaxis nan_to_num nanmax nanmean nanmin nansum nonzero ones_like outer
pad partition percentile permute_dims prod put put_along_axis quantile ravel real repeat reshape roll rollaxis rot90
round searchsorted sinc sort split squeeze std sum swapaxes take take_along_axis tensordot tile trace transpose
tril triu unique unravel_index var vdot vsplit where zeros_like
"""
# Functions of a list of arrays.
_OF_ARRAYS = "column_stack concat concatenate dstack hstack stack vstack"
# Functions that make an array from numbers.
_MAKERS = """
arange diag_indices empty eye full identity indices linspace logspace ones tri tril_indices
triu_indices zeros
"""
# Functions that return something other than an array.
_ANSWERS = """
broadcast_shapes can_cast finfo iinfo iscomplexobj isdtype isrealobj isscalar issubdtype may_share_memory
min_scalar_type ndim promote_types result_type shape shares_memory size
"""
_LINALG = "cholesky det eigh inv norm pinv qr slogdet solve svd"
_CONSTANTS = """
bool bool_ complex64 complex128 complexfloating dtype e euler_gamma float16 float32 float64 floating generic inexact
inf int8 int16 int32 int64 int_ integer intp nan newaxis number pi signedinteger uint8 uint16 uint32 uint64
unsignedinteger
"""
# Keywords that NumPy accepts and CuPy does not, for all functions; and those that CuPy accepts, for single functions.
_REFUSED_KEYWORDS = {"initial", "like", "subok", "device", "where"}
_KEYWORDS = {"einsum": {"dtype", "optimize"}, "copyto": {"casting", "where"}, "clip": {"a_min", "a_max", "out"}}


# What CuPy waits for: results whose shape depends on values, and factorisations, of which it asks if they succeeded.
_WAITING = {
    *"argwhere bincount compress extract flatnonzero nonzero tobytes unique".split(),
    *(f"linalg.{name}" for name in _LINALG.split() if name != "norm"),
}

_traffic: ContextVar[list[str] | None] = ContextVar("traffic", default=None)


@contextmanager
def traffic() -> Iterator[list[str]]:
    """Collects what would cost time on a GPU without computing anything: an entry for each, with the line that did it.

    Transfers of numbers or NumPy arrays to the device, and of device arrays to the host; and calls for which CuPy waits
    until the device has finished, such as `nonzero`, or an index of booleans, whose result has an unknown shape.

        with traffic() as copies:
            y, cache = my_operation(x)
        assert copies == []
    """
    copies: list[str] = []
    token = _traffic.set(copies)
    try:
        yield copies
    finally:
        _traffic.reset(token)


def _count(what: str) -> None:
    """Add an entry to `traffic`, with the innermost line outside this module and `backend`."""
    if (copies := _traffic.get()) is None:
        return
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, backend.__file__):
        frame = frame.f_back
    copies.append(f"{what} in {frame.f_code.co_filename}:{frame.f_lineno}")


class Flags(NamedTuple):
    """What CuPy reveals of the memory layout of a DeviceArray."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


class DeviceArray:
    """An array of the strict stand-in. Make one with `library.asarray(x)` or `to_device(x, STRICT)`."""

    __slots__ = ("_host",)
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy's functions refuse it, and NumPy's operators defer to the methods here

    def __init__(self, host: np.ndarray) -> None:
        if not isinstance(host, np.ndarray):
            raise TypeError(f"DeviceArray: expected a numpy.ndarray to hold, got {type(host).__name__}")
        if host.dtype.kind not in "biufc" or host.dtype.itemsize > np.dtype(np.complex128).itemsize:
            raise TypeError(f"a device array cannot hold {host.dtype}")
        self._host = host

    # Conversions, only on request.

    def get(self) -> np.ndarray:
        """A copy as a NumPy array."""
        _count("to the host")
        return self._host.copy()

    def set(self, values: np.ndarray) -> None:
        """Overwrite the contents from a NumPy array of the same shape and type."""
        _count("to the device")
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype} {self.shape}, got {values.dtype} {values.shape}")
        self._host[...] = values

    def item(self) -> Any:
        """The only element, as a Python number. Raises ValueError if there are more."""
        _count("to the host")
        return self._host.item()

    def tolist(self) -> Any:
        """The contents as nested lists of Python numbers."""
        _count("to the host")
        return self._host.tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        _count("to the host")
        return bool(self._host)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion of a DeviceArray to a numpy.ndarray is not allowed; "
            "call x.get(), or scratchformer.backend.to_cpu(x)"
        )

    def __array_function__(self, function: Callable, *_arguments: Any) -> Any:
        raise TypeError(
            f"numpy.{function.__name__} was called with a DeviceArray; call the function of the array's own library, "
            "scratchformer.backend.array_module(x), or move the array with to_cpu(x)"
        )

    def __array_namespace__(self, api_version: str | None = None) -> ModuleType:
        return library

    # Attributes.

    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    dtype = property(lambda self: self._host.dtype)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    T = property(lambda self: DeviceArray(self._host.T))
    mT = property(lambda self: DeviceArray(self._host.mT))
    real = property(lambda self: DeviceArray(self._host.real))
    imag = property(lambda self: DeviceArray(self._host.imag))

    @property
    def flags(self) -> Flags:
        flags = self._host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, flags.owndata)

    def __repr__(self) -> str:
        _count("to the host")
        return repr(self._host).replace("array", "DeviceArray", 1)

    def __str__(self) -> str:
        _count("to the host")
        return str(self._host)

    def __format__(self, spec: str) -> str:
        _count("to the host")
        return format(self._host, spec)

    # Indexing, copying.

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> DeviceArray:
        key = _index("an index", key)
        part = self._host[key]
        if isinstance(part, np.generic):  # CuPy gives a 0-d view here
            part = self._host[(*key, ...) if isinstance(key, tuple) else (key, ...)]
        return DeviceArray(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not _is_operand(value):
            raise TypeError(f"an assignment: expected a DeviceArray or a number, got {type(value).__name__}")
        waiting = "an index" if isinstance(value, DeviceArray) else None  # a number is put wherever the index is true
        self._host[_index(waiting, key)] = _unwrap("an assignment", value)

    def __copy__(self) -> DeviceArray:
        return DeviceArray(self._host.copy())

    def __reduce__(self) -> tuple:
        return DeviceArray, (self._host,)


_ARRAYS_AND_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)
_OPERANDS = (DeviceArray, *_ARRAYS_AND_NUMBERS)


def _is_operand(x: Any) -> bool:
    """Whether an operator handles `x` itself. NumPy arrays are among these only so that `_unwrap` can refuse them."""
    return isinstance(x, _OPERANDS)


def _unwrap(call: str, x: Any) -> Any:
    """`x` with each DeviceArray replaced by the NumPy array inside it, also in tuples, lists and slices.

    Raises TypeError if `x` is, or contains, a NumPy array.
    """
    if isinstance(x, DeviceArray):
        return x._host
    if isinstance(x, np.ndarray):
        raise TypeError(
            f"{call}: numpy.ndarray {x.shape} and {_NAME}.DeviceArray do not mix; "
            "move one with scratchformer.backend.to_device(x, device)"
        )
    if isinstance(x, slice):
        if any(isinstance(part, DeviceArray) for part in (x.start, x.stop, x.step)):
            raise TypeError(f"{call}: an array cannot be the end of a slice; call .item(), for which the host waits")
        return slice(*(_unwrap(call, part) for part in (x.start, x.stop, x.step)))
    if isinstance(x, (tuple, list)):
        return type(x)(_unwrap(call, part) for part in x)
    return x


def _index(booleans: str | None, key: Any) -> Any:
    """An index, unwrapped; a list in it is sent to the device. booleans: what CuPy waits for if it has any."""
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, list):
            _count("to the device: a list as an index")
        if booleans and isinstance(part, DeviceArray) and part.dtype == bool:
            _count(f"waits: {booleans} of booleans")
    return _unwrap("an index", key)


def _wrap(result: Any, like: tuple = ()) -> Any:
    """`result` as a DeviceArray, 0-d for a number. If it is the array inside one of `like`, that one is returned."""
    for x in like:
        if isinstance(x, DeviceArray) and x._host is result:
            return x
    if isinstance(result, (tuple, list)):
        parts = [_wrap(part, like) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if isinstance(result, _ARRAYS_AND_NUMBERS):
        return DeviceArray(np.asarray(result))
    return result


def _check_keywords(name: str, keywords: dict, allowed: tuple = ()) -> None:
    """Raise TypeError for a keyword that NumPy accepts and CuPy does not."""
    if not keywords:
        return
    wrong = keywords.keys() - _KEYWORDS[name] if name in _KEYWORDS else keywords.keys() & _REFUSED_KEYWORDS
    if wrong := wrong - set(allowed):
        raise TypeError(f"{name}: CuPy has no keyword {', '.join(sorted(wrong))} here")


def _call(name: str, function: Callable, args: tuple, keywords: dict) -> Any:
    if name in _WAITING or (name == "where" and len(args) == 1) or _repeats_by_array(name, args):
        _count(f"waits: {name}")
    unwrapped = [_unwrap(name, a) for a in args]
    if not keywords:
        return _wrap(function(*unwrapped), args)
    result = function(*unwrapped, **{key: _unwrap(name, value) for key, value in keywords.items()})
    return _wrap(result, (*args, *keywords.values()))


def _repeats_by_array(name: str, args: tuple) -> bool:
    return name == "repeat" and isinstance(args[-1], DeviceArray) and args[-1].ndim > 0


# The operators and methods of DeviceArray, generated from lists.


def _binary(name: str, apply: Callable, reflected: bool = False) -> Callable:
    def method(self: DeviceArray, other: Any) -> Any:
        if not _is_operand(other):
            return NotImplemented
        pair = (self._host, _unwrap(name, other))
        return _wrap(apply(*reversed(pair)) if reflected else apply(*pair), (self,))

    return method


def _method(name: str) -> Callable:
    def method(self: DeviceArray, *args: Any, **keywords: Any) -> Any:
        _check_keywords(f"DeviceArray.{name}", keywords)
        result = _call(name, getattr(self._host, name), args, keywords)
        return self if isinstance(result, DeviceArray) and result._host is self._host else result

    method.__name__ = name
    return method


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    _apply = getattr(operator, f"__{_name}__")
    setattr(DeviceArray, f"__{_name}__", _binary(_name, _apply))
    setattr(DeviceArray, f"__r{_name}__", _binary(_name, _apply, reflected=True))
    if _name != "matmul":  # CuPy has no @=
        setattr(DeviceArray, f"__i{_name}__", _binary(_name, getattr(operator, f"__i{_name}__")))
for _name, _reflected in (("__divmod__", False), ("__rdivmod__", True)):
    setattr(DeviceArray, _name, _binary("divmod", divmod, reflected=_reflected))
for _name in "eq ne lt le gt ge".split():
    setattr(DeviceArray, f"__{_name}__", _binary(_name, getattr(operator, _name)))
for _name in "neg pos abs invert".split():
    _apply = getattr(operator, _name)
    setattr(DeviceArray, f"__{_name}__", lambda self, apply=_apply: _wrap(apply(self._host)))
for _name in """
    all any argmax argmin argpartition argsort astype clip compress conj conjugate copy cumprod cumsum diagonal dot
    fill flatten max mean min nonzero partition prod put ravel repeat reshape round searchsorted sort squeeze std sum
    swapaxes take tobytes trace transpose var view
    """.split():
    setattr(DeviceArray, _name, _method(_name))


# The library.


class _DeviceLibrary(ModuleType):
    """An array library with an explicit list of names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__name__} has no {name!r}: either CuPy lacks it, or it is missing from the lists in {_NAME} "
            "(add it there once you have seen that CuPy has it and does the same)"
        )


class _Ufunc:
    """An elementwise function; of the methods at, reduce, accumulate and reduceat it has the ones that CuPy's has."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._ufunc = getattr(np, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        wrong = [a for a in args if not _is_operand(a)]
        if wrong:
            raise TypeError(
                f"{_NAME}.{self.__name__}: expected DeviceArrays and numbers, got {type(wrong[0]).__name__}"
            )
        _check_keywords(self.__name__, keywords, allowed=("where",))
        return _call(self.__name__, self._ufunc, args, keywords)

    def __getattr__(self, method: str) -> Callable:
        name = f"{self.__dict__.get('__name__')}.{method}"
        if self.__dict__.get("__name__") not in _UFUNC_METHODS.get(method, "").split():
            raise AttributeError(f"{_NAME}.{name}: CuPy does not have it")

        def call(x: Any, *args: Any, **keywords: Any) -> Any:
            _expect_array(name, x)
            _check_keywords(name, keywords)
            if method == "at" and x.dtype.name not in _SCATTER_TYPES.split():
                raise TypeError(f"{_NAME}.{name}: CuPy has it for {_SCATTER_TYPES}, not for {x.dtype}")
            return _call(name, getattr(self._ufunc, method), (x, *args), keywords)

        return call


def _expect_array(name: str, x: Any) -> None:
    if not isinstance(x, DeviceArray):
        _unwrap(name, x)  # has a better message for a NumPy array
        raise TypeError(f"{_NAME}.{name}: expected a DeviceArray, got {type(x).__name__}")


def _function(name: str, function: Callable, arrays: Callable = lambda args: args[:1]) -> Callable:
    """A function of the library. arrays: those of its arguments that must be arrays, by default the first."""

    def call(*args: Any, **keywords: Any) -> Any:
        for x in arrays(args):
            _expect_array(name, x)
        _check_keywords(name, keywords)
        return _call(name, function, args, keywords)

    return call


def _answer(name: str) -> Callable:
    def call(*args: Any) -> Any:
        return getattr(np, name)(*(_unwrap(name, a) for a in args))

    return call


def _array(x: Any, dtype: Any = None, copy: bool = True, order: Any = "K", ndmin: int = 0) -> DeviceArray:
    """A DeviceArray with the contents of `x`: numbers, lists, NumPy arrays (always copied) or a DeviceArray."""
    if isinstance(x, DeviceArray):
        return _wrap(np.array(x._host, dtype, copy=True if copy else None, order=order, ndmin=ndmin), (x,))
    if isinstance(x, tuple | list) and any(isinstance(part, DeviceArray) for part in x):
        x = _unwrap("array", x)
    _count("to the device")
    return DeviceArray(np.array(x, dtype, order=order, ndmin=ndmin))


def _build() -> _DeviceLibrary:
    """Build the library from the lists at the top."""
    xp = _DeviceLibrary(_NAME, __doc__)
    names = vars(xp)
    names.update({name: _Ufunc(name) for name in _UFUNCS.split()})
    names.update({name: _function(name, getattr(np, name)) for name in _OF_AN_ARRAY.split()})
    names.update({name: _function(name, getattr(np, name), lambda args: args[0]) for name in _OF_ARRAYS.split()})
    names.update({name: _function(name, getattr(np, name), lambda _: ()) for name in _MAKERS.split()})
    names.update({name: _answer(name) for name in _ANSWERS.split()})
    names.update({name: getattr(np, name) for name in _CONSTANTS.split()})
    names.update(array=_array, asarray=partial(_array, copy=False), ndarray=DeviceArray)
    names["ascontiguousarray"] = partial(_array, copy=False, order="C", ndmin=1)
    names["einsum"] = _function("einsum", np.einsum, lambda args: args[1:])
    names["erf"] = _function("erf", special.erf)  # CuPy's is in cupyx.scipy.special; `backend.erf` finds either
    names["linalg"] = _DeviceLibrary(f"{_NAME}.linalg")
    vars(xp.linalg).update({n: _function(f"linalg.{n}", getattr(np.linalg, n)) for n in _LINALG.split()})
    names["lib"] = _DeviceLibrary(f"{_NAME}.lib")
    xp.lib.stride_tricks = _DeviceLibrary(f"{_NAME}.lib.stride_tricks")
    for name in ("as_strided", "sliding_window_view"):
        function = getattr(np.lib.stride_tricks, name)
        setattr(xp.lib.stride_tricks, name, _function(f"lib.stride_tricks.{name}", function))
    return xp


library = _build()
STRICT = Device("strict", library)

"""Portable arrays on a GPU: NumPy's functions of a `PortableGPUArray` have the bits of those of a `PortableArray`.

CuPy compiles all kernels with -ftz=true (`_compile_with_cache_cuda` in cupy/cuda/compiler.py of CuPy 14 adds it to the
options of the caller, and the last one counts). Then a float32 number below 2⁻¹²⁶ in magnitude (a subnormal one) counts
as 0 wherever it is computed with, compared or converted. Integers, float64 and copies are not affected. So CuPy is used
only to move float32 numbers. Kernels of this module compute sums, differences, products and quotients. CuPy computes
all other functions in float64, where these numbers are not subnormal, and the results are then rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import cupy
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .. import portable
from ..portable import (
    DEFINED,
    EXACT,
    PRINTING,
    Axes,
    PortableArray,
    are_matrices,
    axes_of,
    expect_function,
    is_float32,
    is_floating,
    options_of,
)
from .cuda_trace import code_of
from .cupy_code import PORTABLE, contiguous, header, kernel
from .cupy_embedding import sum_rows

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
STACKS = 65_535  # the most blocks along the second axis of a grid
portable_kernel = partial(kernel, "portable", **PORTABLE)


def elementwise(name: str, code: str, given: str = "float32 x", result: str = "float32 z") -> Any:
    """A kernel of arrays and numbers, which are broadcast: see `cupy.ElementwiseKernel`."""
    return cupy.ElementwiseKernel(given, result, code, f"portable_{name}", preamble=header("float32"))


WIDEN = elementwise("widen", "z = ieee::widen(x)", result="float64 z")
ROUND = elementwise("round", "z = ieee::round(x)", "float64 x")
ARITHMETIC = {
    ufunc: elementwise(ufunc.__name__, f"z = ieee::{ufunc.__name__}(x, y)", "float32 x, float32 y")
    for ufunc in (np.add, np.subtract, np.multiply, np.divide)
}


def wide(x: Any) -> Any:
    """x, converted to float64 if it is a float32 array."""
    return WIDEN(x) if isinstance(x, cupy.ndarray) and x.dtype == FLOAT32 else x


def cast(x: Any, dtype: Any) -> Any:
    """A CuPy array in another type."""
    if x.dtype == dtype:
        return x
    return ROUND(x) if x.dtype == FLOAT64 and dtype == FLOAT32 else wide(x).astype(dtype)


def computed(ufunc: Any, inputs: list) -> Any:
    """The result of an exact function of CuPy arrays and numbers, at least one of which is of floating-point type."""
    kind = np.result_type(*(x.dtype if isinstance(x, cupy.ndarray) else x for x in inputs))
    if kind not in (FLOAT32, FLOAT64):
        raise TypeError(f"portable {ufunc.__name__}: expected float32 or float64, got {kind}")
    if kind == FLOAT32:
        inputs = [cast(x, kind) if isinstance(x, cupy.ndarray) else np.float32(x) for x in inputs]
        if ufunc in ARITHMETIC:
            return ARITHMETIC[ufunc](*inputs)
    result = getattr(cupy, ufunc.__name__)(*map(wide, inputs))
    return ROUND(result) if kind == FLOAT32 and result.dtype == FLOAT64 else result


class PortableGPUArray(NDArrayOperatorsMixin):
    """A CuPy array `x` whose functions have the bits of those of a `PortableArray`; all others raise TypeError.

    Its operators call NumPy's functions, and so does its namespace, `LIBRARY`. It does not mix with CuPy's arrays.
    """

    dtype: np.dtype
    size: int
    copy: Callable
    get: Callable  # these four, and other members of CuPy's arrays, are set below

    def __init__(self, x: Any) -> None:
        self.x = x

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return LIBRARY

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this array is on a GPU: call x.get(), or scratchformer.backend.to_cpu(x)")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        options = options_of(ufunc, method, out, options)
        whole = all(map(portable.is_whole, inputs))
        if (ufunc, method) in ALONG_AN_AXIS:
            result = getattr(inputs[0], ALONG_AN_AXIS[ufunc, method])(**{"axis": 0, **options})
        elif method == "at" and not whole:
            return add_at(*unwrapped(inputs))
        elif method == "__call__" and whole:
            result = wrapped(getattr(cupy, ufunc.__name__)(*unwrapped(inputs)))
            if ufunc not in EXACT and not portable.is_whole(result):
                raise portable.undefined(ufunc)
        elif method == "__call__" and ufunc in EXACT:
            result = wrapped(computed(ufunc, list(unwrapped(inputs))))
        elif (ufunc, method) in DEFINED:
            result = DEFINED[ufunc, method](*inputs)
        else:
            raise portable.undefined(ufunc)
        if out is None:
            return result
        if "where" in options:
            result = np.where(options["where"], result, out[0])
        out[0][...] = result
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = function.__name__
        expect_function(function, kwargs)
        if function in (np.ndim, np.shape, np.size):
            return getattr(self, name)
        if function is np.result_type:
            return np.result_type(*(x.dtype if isinstance(x, PortableGPUArray) else x for x in args))
        if function in PRINTING:
            return function(self.get(), *args[1:], **kwargs)
        if hasattr(PortableGPUArray, name):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if function is np.copyto:
            raise portable.undefined(function)  # it converts numbers
        if function is np.where and isinstance(args[0], PortableGPUArray):  # CuPy would compare it with 0
            args = args[0].astype(bool, copy=False), *args[1:]
        as_float64 = function in (np.array_equal, np.count_nonzero, np.nonzero)  # these look at the numbers
        as_float64 |= any(x.dtype == FLOAT64 for x in arrays_in((args, kwargs)))
        as_float64 |= function is np.where and np.float64 in map(type, args)
        return wrapped(getattr(cupy, name)(*unwrapped(args, as_float64), **unwrapped(kwargs, as_float64)))

    def __getitem__(self, key: Any) -> Any:
        return PortableGPUArray(self.x[unwrapped(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        value = unwrapped(value)
        self.x[unwrapped(key)] = cast(value, self.dtype) if isinstance(value, cupy.ndarray) else self.dtype.type(value)

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def set(self, values: np.ndarray) -> None:
        """Overwrite the contents from a NumPy array of the same shape and type."""
        self.x.set(values)

    def __deepcopy__(self, _memo: dict) -> Any:
        return self.copy()

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        y = cast(self.x, np.dtype(dtype))
        return PortableGPUArray(y.copy() if copy and y is self.x else y)

    def sum(self, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
        if portable.is_whole(self) and dtype is None:
            return PortableGPUArray(self.x.sum(axis, keepdims=keepdims))
        return DEFINED[np.add, "reduce"](self, axis, dtype, keepdims)

    def mean(self, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
        total = self.sum(axis, FLOAT64 if portable.is_whole(self) else dtype, keepdims=keepdims)
        return (total / np.int64(self.size // max(1, total.size))).astype(total.dtype)

    def cumsum(self, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        if not portable.is_whole(self) or not (dtype is out is None):
            raise portable.undefined(np.cumsum)
        return PortableGPUArray(self.x.cumsum(axis))

    @property
    def T(self) -> Any:
        return PortableGPUArray(self.x.T)

    @property
    def mT(self) -> Any:
        return PortableGPUArray(self.x.mT)

    clip = PortableArray.clip

    def erf(self) -> Any:
        return portable.erf(self)


def moving(name: str) -> Callable:
    """The method of CuPy's arrays with this name, which only moves numbers."""
    return lambda self, *args, **options: wrapped(getattr(self.x, name)(*unwrapped(args), **unwrapped(options)))


def comparing(name: str) -> Callable:
    """The method of CuPy's arrays with this name, which compares the numbers along an axis."""

    def method(self: Any, axis: Axes = None, keepdims: bool = False) -> Any:
        y = PortableGPUArray(getattr(wide(self.x), name)(axis, keepdims=keepdims))
        return y.astype(self.dtype) + 0 if name in ("max", "min") and not portable.is_whole(self) else y

    return method


def fetching(name: str) -> Callable:
    """The method of CuPy's arrays with this name, which brings numbers to the CPU."""
    return lambda self: getattr(self.x, name)()


for _name in "copy ravel flatten reshape swapaxes transpose squeeze repeat take view".split():
    setattr(PortableGPUArray, _name, moving(_name))
for _name in "all any argmax argmin max min".split():
    setattr(PortableGPUArray, _name, comparing(_name))
for _name in "shape ndim size dtype nbytes itemsize flags device".split():
    setattr(PortableGPUArray, _name, property(attrgetter(f"x.{_name}")))
for _name in "get item tolist tobytes __float__ __int__ __bool__ __repr__".split():
    setattr(PortableGPUArray, _name, fetching(_name))
portable.refuse_methods(PortableGPUArray)
ALONG_AN_AXIS: dict[tuple[Any, str], str] = {
    (np.add, "reduce"): "sum",
    (np.add, "accumulate"): "cumsum",
    (np.maximum, "reduce"): "max",
    (np.minimum, "reduce"): "min",
    (np.logical_and, "reduce"): "all",
    (np.logical_or, "reduce"): "any",
}


def unwrapped(x: Any, as_float64: bool = False) -> Any:
    """x with CuPy arrays in place of portable ones, also in lists, tuples and dicts. as_float64: float32 as float64."""
    if isinstance(x, PortableGPUArray):
        return wide(x.x) if as_float64 else x.x
    if isinstance(x, np.ndarray):
        raise TypeError(f"an array {x.shape} on the CPU, and one on a GPU: move one with scratchformer.to_device")
    if isinstance(x, list | tuple):
        return type(x)(unwrapped(each, as_float64) for each in x)
    return {name: unwrapped(value, as_float64) for name, value in x.items()} if isinstance(x, dict) else x


def wrapped(x: Any) -> Any:
    """The inverse of `unwrapped`."""
    if isinstance(x, list | tuple):
        return type(x)(map(wrapped, x))
    return PortableGPUArray(x) if isinstance(x, cupy.ndarray) else x


def arrays_in(x: Any) -> Iterator[Any]:
    """The arrays in nested lists, tuples and dicts."""
    if isinstance(x, PortableGPUArray):
        yield x
    elif isinstance(x, list | tuple | dict):
        for each in x.values() if isinstance(x, dict) else x:
            yield from arrays_in(each)


class Library:
    """The array namespace of a `PortableGPUArray`: functions of arrays are NumPy's, and CuPy makes new arrays."""

    __name__ = cupy.__name__

    def __getattr__(self, name: str) -> Any:
        if name in ("arange", "empty", "eye", "full", "ones", "tri", "zeros"):
            return lambda *args, **options: PortableGPUArray(getattr(cupy, name)(*args, **options))
        return getattr(np, name) if hasattr(np, name) else getattr(cupy, name)

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        if not isinstance(x, PortableGPUArray):
            x = PortableGPUArray(x if isinstance(x, cupy.ndarray) else cupy.asarray(np.asarray(x, dtype)))
        return x if dtype is None else x.astype(dtype, copy=False)


LIBRARY = Library()
portable.PORTABLE_CLASSES[cupy.ndarray] = PortableGPUArray


def product(a: Any, b: Any) -> Any:
    """c = a b, float32, for stacks of matrices a (..., M, K) and b (..., K, N) of any strides."""
    a, b = a.x, b.x
    if b.ndim == 2:
        shape = *a.shape[:-1], b.shape[1]
        a, b = a.reshape(1, math.prod(shape[:-1]), a.shape[-1]), b[None]
    else:
        stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = *stack, a.shape[-2], b.shape[-1]
        a, b = (cupy.broadcast_to(x, (*stack, *x.shape[-2:])) for x in (a, b))
        a, b = (x.reshape(math.prod(stack), *x.shape[-2:]) for x in (a, b))
    (count, M, K), N = a.shape, b.shape[2]
    c = cupy.empty((count, M, N), np.float32)
    if c.size:
        tiles = math.prod(-(-size // PORTABLE["SIDE"]) for size in (M, N))
        numbers = *(count, M, K, N), *(step // FLOAT32.itemsize for x in (a, b) for step in x.strides)
        run = portable_kernel("product", "float32")
        run((tiles, min(count, STACKS)), (256,), (a, b, c, *map(np.int64, numbers)))
    return PortableGPUArray(c.reshape(shape))


def total(x: Any, axis: Axes = None, keepdims: bool = False) -> Any:
    """As `portable.total`. The axes of the sum are joined into one, and so are those before it and those after it."""
    x = x.x
    axes = axes_of(x, axis)
    others = [a for a in range(x.ndim) if a not in axes]
    shape = [1 if a in axes else size for a, size in enumerate(x.shape)] if keepdims else [x.shape[a] for a in others]
    first = axes[0] if axes else 0
    if axes != [*range(first, first + len(axes))]:
        x, first = x.transpose(*axes, *others), 0
    before, after = math.prod(x.shape[:first]), math.prod(x.shape[first + len(axes) :])
    n = math.prod(x.shape[first : first + len(axes)])
    y = cupy.ascontiguousarray(x) if n > 1 else x.copy() if n else cupy.zeros(shape, x.dtype)
    run = portable_kernel("halve", x.dtype.name)
    while n > 1 and before * after:
        m = n
        for _ in range(PORTABLE["LEVELS"]):
            m -= m // 2
        terms, y = y, cupy.empty((before, m, after), x.dtype)
        run((-(-y.size // 256),), (256,), (terms, y, *map(np.int64, (before, n, after, m))))
        n = m
    return PortableGPUArray(y.reshape(shape))


def add_at(table: Any, ids: Any, rows: Any) -> None:
    """table[ids[n]] += rows[n] for CuPy arrays table (V, ...), ids (N,) and rows (N, ...), in the order of n. As in all
    indices of CuPy, those outside the table go around it. TypeError for other shapes, and for ids that are no integers.
    """
    ids_fit = isinstance(ids, cupy.ndarray) and ids.dtype.kind in "iu" and ids.ndim == 1
    if not (ids_fit and isinstance(rows, cupy.ndarray) and rows.shape == (len(ids), *table.shape[1:])):
        raise portable.undefined(np.add)
    if rows.size:
        sums = contiguous(table)
        ids = (contiguous(ids) % len(table)).astype(np.int32)
        rows = contiguous(cast(rows, table.dtype)).reshape(len(ids), -1)
        sum_rows(portable_kernel("add_rows", table.dtype.name), rows, ids, sums)
        if sums is not table:
            table[...] = sums


def twin_of(run: Any) -> Callable:
    return lambda x: PortableGPUArray(run(x.x))


portable.product.add_twin(PortableGPUArray, are_matrices, product)
portable.total.add_twin(PortableGPUArray, is_floating, total)
for _function, _formula in (
    (portable.exp, portable.exp32),
    (portable.log, portable.log32),
    (portable.tanh, portable.tanh32),
    (portable.erf, portable.erf32),
):
    _run = elementwise(_function.__name__, code_of(_formula, "x", "z"))
    _function.add_twin(PortableGPUArray, is_float32, twin_of(_run))

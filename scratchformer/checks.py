"""Checks of arguments, with messages that name the argument, what was expected and what was passed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from .backend import Array, array_module, is_floating_type, library_of, memory, type_of
from .shell.text import shown, with_article

MAX_SIZE = 2**31 - 1  # the largest size; ids are 32-bit integers, and an axis of this length takes 8 GB in float32
UNLIKE_ARRAYS = (np.matrix, np.ma.MaskedArray)


def expect_shape(name: str, x: Array, letters: str, **sizes: int) -> None:
    """Raise ValueError unless `x` has one axis for each word of `letters`, of the size given in `sizes`, if any;
    TypeError if `x` is not an array.

    `expect_shape("x", x, "B T C", C=512)` fails with: x: expected (B, T, 512), got (4, 7, 256).
    """
    words = _words(letters)
    shape = getattr(x, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: expected an array ({', '.join(words)}), got {describe(x)}")
    if len(words) == len(shape):
        if not sizes:
            return
        for word, size in zip(words, shape, strict=True):
            if sizes.get(word, size) != size:
                break
        else:
            return
    expected = ", ".join(str(sizes.get(word, word)) for word in words)
    raise ValueError(f"{name}: expected ({expected}), got {tuple(x.shape)}")


@lru_cache
def _words(letters: str) -> list[str]:
    return letters.split()


def expect_columns(name: str, x: Array) -> None:
    """Raise ValueError if the rows of `x` are empty: they have no maximum."""
    if not x.shape or not x.shape[-1]:
        raise ValueError(f"{name}: expected at least one column, got {tuple(x.shape)}")


def expect_floating(**arrays: Array) -> None:
    """Raise TypeError naming the first of `arrays` that is not an array of floating-point (or complex) numbers. NumPy's
    matrices and masked arrays are refused too, since their `*` and `+` mean something else; so are long doubles, and
    complex numbers where the first array is real, since the result would be real.

    `expect_floating(z=z)` fails with: z: expected a floating-point array, got int64; convert it with
    z.astype(np.float32). A NumPy scalar passes, since it has a dtype too.
    """
    for name, x in arrays.items():
        if type(x) is np.ndarray and x.dtype.char in "efd":
            continue
        if not is_inexact(x):
            raise TypeError(f"{name}: expected a floating-point array, got {describe(x)}{_advice(name, x)}")
        if type_of(x.dtype).itemsize > (16 if _kind(x) == "c" else 8):
            raise TypeError(f"{name}: expected float64 or a smaller type, got {x.dtype}")
        first, like = next(iter(arrays.items()))
        if _kind(x) == "c" and _kind(like) != "c":
            raise TypeError(f"{name}: expected real numbers, like those of {first}, got {x.dtype}")


def expect_real(name: str, x: Array) -> None:
    """Raise TypeError unless `x` is an array of real floating-point numbers."""
    if type(x) is np.ndarray and x.dtype.char in "efd":
        return
    expect_floating(**{name: x})
    if _kind(x) == "c":
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")


def _kind(x: Any) -> str | None:
    """The kind of an array's dtype, in NumPy's one letter: "f", "i", ...; None if `x` is not an array."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype):
        return dtype.kind
    return None if dtype is None or library_of(x) is None else type_of(dtype).kind


def is_inexact(x: Any) -> bool:
    """Whether `x` is an array of floating-point or complex numbers."""
    if isinstance(x, UNLIKE_ARRAYS):
        return False
    return _kind(x) in ("f", "c") or (_kind(x) == "V" and is_floating_type(x.dtype))


def describe(x: Any) -> Any:
    """What `x` is: the dtype of an array, otherwise its class."""
    if x is None:
        return "None"
    return type(x).__name__ if _kind(x) is None or isinstance(x, UNLIKE_ARRAYS) else x.dtype


def _advice(name: str, x: Any) -> str:
    """How to convert `x` to floating point, if there is a way."""
    if isinstance(x, UNLIKE_ARRAYS):
        return f"; convert it with np.asarray({name})"
    if _kind(x) is not None:
        return f"; convert it with {name}.astype(np.float32)"
    return "" if x is None or isinstance(x, str) else f"; convert it with np.asarray({name}, np.float32)"


def expect_like(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise TypeError unless `x` is a real floating-point array, ValueError unless its shape is exactly `shape`."""
    expect_real(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(x.shape)}")


def expect_gradient(name: str, dy: Array | float, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless `dy` is a gradient of an array of this shape. That of a scalar may also be a
    number, which must be finite. (The value of an array is not looked at, since it may be on a GPU.)
    """
    if not shape and type(dy) is int:
        expect_at_least(-MAX_SIZE, **{name: dy})
    elif shape or type(dy) is not float:
        expect_like(name, dy, shape)
    if not shape and isinstance(dy, float) and not math.isfinite(dy):
        raise ValueError(f"{name}: expected a finite number, got {dy}")


def expect_floating_type(name: str, dtype: Any) -> None:
    """Raise TypeError unless `dtype` is a floating-point type, or anything that NumPy takes for one."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, AttributeError):
        kind = None
    if kind is None or not is_floating_type(kind) or kind.itemsize > 8:
        raise TypeError(f"{name}: expected a floating-point type, got {shown(dtype) if kind is None else kind}")


def expect_positive(**sizes: int) -> None:
    """Raise TypeError naming the first of `sizes` that is not an integer, ValueError naming the first below 1."""
    expect_at_least(1, **sizes)


def expect_at_least(low: int, **sizes: int) -> None:
    """Raise TypeError naming the first of `sizes` that is not an integer, ValueError naming the first below `low`, or
    above MAX_SIZE.

    Python's and NumPy's integers count as integers; 8.0 and True do not.
    """
    for name, size in sizes.items():
        if type(size) is not int and (not isinstance(size, Integral) or isinstance(size, bool)):
            raise TypeError(f"{name}: expected an integer, got {shown(size)}")
        if size < low:
            raise ValueError(f"{name}: expected a number >= {low}, got {shown(size)}")
        if size > MAX_SIZE:
            raise ValueError(f"{name}: expected a number <= {MAX_SIZE}, got {shown(size)}")


def as_integers(instance: Any, *names: str) -> None:
    """Turn NumPy's integers among these attributes of a frozen dataclass into Python's: 4 * np.int8(64) is 0."""
    for name in names:
        object.__setattr__(instance, name, int(getattr(instance, name)))


def expect_memory(count: int, what: str = "weights", /, **sizes: int) -> None:
    """Raise ValueError naming `sizes` unless `count` float32 numbers, the `what`, fit in this machine's memory."""
    if 4 * count > memory():
        given = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{', '.join(sizes)}: expected {what} that fit in {memory() / 2**30:.0f} GB of memory, "
            f"got {4 * count / 2**30:,.0f} GB for {given}"
        )


def expect_boolean(**flags: bool) -> None:
    """Raise TypeError naming the first of `flags` that is not a bool: otherwise the string "no" would count as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, got {shown(flag)}")


def expect_one_of(name: str, x: Any, known: Iterable[str]) -> None:
    """Raise ValueError unless `x` is one of the words `known`."""
    if not isinstance(x, str) or x not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {shown(x)}")


def expect_instance(name: str, x: Any, kind: Any, none: bool = False) -> None:
    """Raise TypeError unless `x` is a `kind`, or None if `none`."""
    if not (isinstance(x, kind) or (none and x is None)):
        raise TypeError(f"{name}: expected {with_article(kind)}{' or None' if none else ''}, got {shown(x)}")


def expect_number(name: str, x: float, zero: bool = True, infinite: bool = False) -> None:
    """Raise TypeError unless `x` is a number, ValueError unless it is finite and >= 0. zero: whether 0 is valid;
    infinite: whether infinity is.
    """
    if type(x) is float and 0 < x < math.inf:
        return
    expect_real_number(name, x)
    if not (x >= 0 and (_is_finite(x) or infinite) and (zero or x)):
        finite = "" if infinite else "finite "
        raise ValueError(f"{name}: expected a {finite}number {'>=' if zero else '>'} 0, got {_number(x)}")


def expect_fraction(name: str, x: float, letter: str = "") -> None:
    """Raise TypeError unless `x` is a number, ValueError unless 0 ≤ x < 1. The message calls x `letter`, if given."""
    if type(x) is float and 0 <= x < 1:
        return
    expect_real_number(name, x)
    if not 0 <= x < 1:
        raise ValueError(f"{name}: expected 0 <= {letter or name} < 1, got {_number(x)}")


def expect_real_number(name: str, x: Any) -> None:
    """Raise TypeError unless `x` is a number, of any size."""
    if type(x) is not float and (not isinstance(x, Real) or isinstance(x, bool)):
        raise TypeError(f"{name}: expected a number, got {shown(x)}")


def _is_finite(x: float) -> bool:
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer beyond the largest float
        return False


def _number(x: Any) -> str:
    return shown(x) if isinstance(x, int) else str(x)


def expect_texts(name: str, texts: Any, kind: Any = Iterable) -> None:
    """Raise TypeError unless `texts` is a `kind`, and if it is a sequence, of texts. A single text is refused: its
    characters would count as texts.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, kind):
        raise TypeError(f"{name}: expected a list of texts, got {describe(texts)}")
    for i, text in enumerate(texts if kind is not Iterable else ()):
        expect_instance(f"{name}[{i}]", text, str)


def expect_lengths(lengths: Array, **sizes: int) -> None:
    """Raise TypeError unless `lengths` is an array of integers, ValueError unless it has the shape (B,)."""
    if not hasattr(lengths, "dtype"):
        raise TypeError(f"lengths: expected an array of integers (B,), got {describe(lengths)}")
    expect_shape("lengths", lengths, "B", **sizes)
    expect_integers("lengths", lengths)


def expect_array(name: str, x: Any, dtype: Any = None) -> np.ndarray:
    """`x` as a NumPy array, of `dtype` if that is given. Raises TypeError if it cannot be one."""
    try:
        array = np.asarray(x)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind not in "biufV":
        raise TypeError(f"{name}: expected an array of numbers, got {shown(x)}")
    return array if dtype is None else array.astype(dtype, copy=False)


def expect_integers(name: str, x: Array) -> None:
    """Raise TypeError unless `x` is an array of integers."""
    if type(x) is np.ndarray and x.dtype.kind in "iu":
        return
    if _kind(x) not in ("i", "u") or isinstance(x, UNLIKE_ARRAYS):
        what = "an array of integers" if _kind(x) is None else "integers"
        raise TypeError(f"{name}: expected {what}, got {describe(x)}")


def expect_ids(name: str, ids: Array, size: int) -> None:
    """Raise TypeError unless `ids` are integers, IndexError unless all of them are in 0 ... size − 1."""
    expect_integers(name, ids)
    expect_range(name, ids, 0, size - 1, IndexError)


_checked: ContextVar[bool] = ContextVar("checked", default=False)


@contextmanager
def checked_on_host() -> Iterator[None]:
    """Inside the block, no values of arrays on a GPU are checked: the host would have to wait for each.

    Only for arrays that were checked before they were moved.
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked(x: Array) -> bool:
    """Whether the values of `x` need no check, since it is on a GPU and was checked before (`checked_on_host`)."""
    return _checked.get() and array_module(x) is not np


def expect_range(name: str, x: Array, low: int, high: int, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless all values of `x` are in low ... high, or `is_checked(x)`."""
    if 0 not in x.shape and (type(x) is np.ndarray or not is_checked(x)):
        xp = array_module(x)
        ends = xp.stack([xp.min(x), xp.max(x)])
        smallest, largest = ends.tolist() if hasattr(ends, "tolist") else map(int, ends)  # one transfer from a GPU
        if smallest < low or largest > high:
            raise error(f"{name}: expected values from {low} to {high}, got {smallest if smallest < low else largest}")

"""Checks of arguments, with messages that name the argument, what was expected and what was passed."""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..backend import Array, array_module, is_floating_type


def expect_shape(name: str, x: Array, letters: str, **sizes: int) -> None:
    """Raise ValueError unless `x` has one axis for each word of `letters`, of the size given in `sizes`, if any;
    TypeError if `x` is not an array.

    `expect_shape("x", x, "B T C", C=512)` fails with: x: expected (B, T, 512), got (4, 7, 256).
    """
    words = _words(letters)
    shape = getattr(x, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: expected an array ({', '.join(words)}), got {type(x).__name__}")
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


def expect_floating(**arrays: Array) -> None:
    """Raise TypeError naming the first of `arrays` that is not an array of floating-point (or complex) numbers.

    `expect_floating(z=z)` fails with: z: expected a floating-point array, got int64; convert it with
    z.astype(np.float32). A NumPy scalar passes, since it has a dtype too.
    """
    for name, x in arrays.items():
        if not _is_inexact(x):
            raise TypeError(f"{name}: expected a floating-point array, got {_found(x)}{_advice(name, x)}")


def _kind(x: Any) -> str | None:
    """The kind of an array's dtype, in NumPy's one letter: "f", "i", ...; None if `x` is not an array."""
    return getattr(getattr(x, "dtype", None), "kind", None)


def _is_inexact(x: Any) -> bool:
    return _kind(x) in ("f", "c") or (_kind(x) == "V" and is_floating_type(x.dtype))


def _found(x: Any) -> Any:
    return type(x).__name__ if _kind(x) is None else x.dtype


def _advice(name: str, x: Any) -> str:
    """How to convert `x` to floating point, if there is a way."""
    if _kind(x) is not None:
        return f"; convert it with {name}.astype(np.float32)"
    return "" if x is None or isinstance(x, str) else f"; convert it with np.asarray({name}, np.float32)"


def expect_like(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise TypeError unless `x` is a floating-point array, ValueError unless its shape is exactly `shape`."""
    expect_floating(**{name: x})
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(x.shape)}")


def expect_positive(**sizes: int) -> None:
    """Raise TypeError naming the first of `sizes` that is not an integer, ValueError naming the first below 1."""
    expect_at_least(1, **sizes)


def expect_at_least(least: int, **sizes: int) -> None:
    """Raise TypeError naming the first of `sizes` that is not an integer, ValueError naming the first below `least`.

    Python's and NumPy's integers count as integers; 8.0 and True do not.
    """
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise TypeError(f"{name}: expected an integer, got {size!r}")
        if size < least:
            raise ValueError(f"{name}: expected a number >= {least}, got {size}")


def expect_boolean(**flags: bool) -> None:
    """Raise TypeError naming the first of `flags` that is not a bool: otherwise the string "no" would count as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")


def expect_number(name: str, x: float, zero: bool = True) -> None:
    """Raise TypeError unless `x` is a number, ValueError unless it is finite and >= 0, or > 0 if not `zero`."""
    _expect_real(name, x)
    if not (0 <= x < math.inf and (zero or x)):
        raise ValueError(f"{name}: expected a finite number {'>=' if zero else '>'} 0, got {x}")


def expect_fraction(name: str, x: float, letter: str = "") -> None:
    """Raise TypeError unless `x` is a number, ValueError unless 0 ≤ x < 1. The message calls x `letter`, if given."""
    _expect_real(name, x)
    if not 0 <= x < 1:
        raise ValueError(f"{name}: expected 0 <= {letter or name} < 1, got {x}")


def _expect_real(name: str, x: Any) -> None:
    if type(x) is not float and (not isinstance(x, Real) or isinstance(x, bool)):
        raise TypeError(f"{name}: expected a number, got {x!r}")


def expect_lengths(lengths: Array, **sizes: int) -> None:
    """Raise TypeError unless `lengths` is an array of integers, ValueError unless it has the shape (B,)."""
    if not hasattr(lengths, "dtype"):
        raise TypeError(f"lengths: expected an array of integers (B,), got {type(lengths).__name__}")
    expect_shape("lengths", lengths, "B", **sizes)
    expect_integers("lengths", lengths)


def expect_integers(name: str, x: Array) -> None:
    """Raise TypeError unless `x` is an array of integers."""
    if _kind(x) not in ("i", "u"):
        what = "an array of integers" if _kind(x) is None else "integers"
        raise TypeError(f"{name}: expected {what}, got {_found(x)}")


def expect_ids(name: str, ids: Array, size: int) -> None:
    """Raise TypeError unless `ids` are integers, IndexError unless all of them are in 0 ... size − 1."""
    expect_integers(name, ids)
    expect_range(name, ids, 0, size - 1, IndexError)


def expect_range(name: str, x: Array, low: int, high: int, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless all values of `x` are in low ... high."""
    if x.size:
        least, most = array_module(x).stack([x.min(), x.max()]).tolist()  # one transfer from a GPU
        if least < low or most > high:
            raise error(f"{name}: expected values from {low} to {high}, got {least if least < low else most}")

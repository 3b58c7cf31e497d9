"""Checks of what a user passes in, with messages that name the argument, the letters expected and the shape found."""

from __future__ import annotations

from functools import lru_cache
from numbers import Integral

from ..backend import Array, array_module


def expect_shape(name: str, x: Array, letters: str, **sizes: int) -> None:
    """Raise ValueError unless `x` has one axis for each word of `letters`, of the size given for that word; TypeError
    if it is no array.

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


def expect_like(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `x` has exactly this shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(x.shape)}")


def expect_positive(**sizes: int) -> None:
    """Raise ValueError naming the first of `sizes` that is below 1: `expect_positive(d_model=0)`."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a number >= 1, got {size}")


def expect_lengths(lengths: Array, **sizes: int) -> None:
    """Raise TypeError unless `lengths` is an array of integers, ValueError unless it is (B,), of the B given."""
    if not hasattr(lengths, "dtype"):
        raise TypeError(f"lengths: expected an array of integers (B,), got {type(lengths).__name__}")
    expect_shape("lengths", lengths, "B", **sizes)
    expect_integers("lengths", lengths)


def expect_integers(name: str, x: Array) -> None:
    """Raise TypeError unless `x` holds integers."""
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")


def expect_ids(name: str, ids: Array, size: int) -> None:
    """Raise TypeError unless `ids` holds integers, IndexError unless all of them are in 0 ... size - 1."""
    expect_integers(name, ids)
    expect_range(name, ids, 0, size - 1, IndexError)


def expect_range(name: str, x: Array, low: int, high: int, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless all of `x` is in low ... high."""
    if x.size:
        least, most = array_module(x).stack([x.min(), x.max()]).tolist()  # one transfer from a GPU
        if least < low or most > high:
            raise error(f"{name}: expected values from {low} to {high}, got {least if least < low else most}")


def expect_whole(name: str, n: int, least: int) -> None:
    """Raise ValueError unless `n` is a whole number, at least `least`."""
    if not isinstance(n, Integral) or isinstance(n, bool) or n < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {n!r}")

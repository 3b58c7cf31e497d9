"""Checks of what a user passes in, with messages that name the argument, the letters expected and the shape found."""

from __future__ import annotations

from ..backend import Array


def expect_shape(name: str, x: Array, letters: str, **sizes: int) -> None:
    """Raise ValueError unless `x` has one axis for each word of `letters`, of the size given for that word.

    `expect_shape("x", x, "B T C", C=512)` fails with: x: expected (B, T, 512), got (4, 7, 256).
    """
    words = letters.split()
    fits = len(words) == x.ndim and all(
        sizes.get(word, size) == size for word, size in zip(words, x.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(str(sizes.get(word, word)) for word in words)
        raise ValueError(f"{name}: expected ({expected}), got {tuple(x.shape)}")


def expect_integers(name: str, x: Array) -> None:
    """Raise TypeError unless `x` holds integers."""
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")


def expect_ids(name: str, ids: Array, size: int) -> None:
    """Raise TypeError unless `ids` holds integers, IndexError unless all of them are in 0 ... size - 1."""
    expect_integers(name, ids)
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise IndexError(f"{name}: expected values from 0 to {size - 1}, got {low if low < 0 else high}")

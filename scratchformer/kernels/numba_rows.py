"""Loops that compiled twins share: over rows of numbers, and over the intervals of a pattern."""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_code import plus
from .numba_math import constant, greater, read
from .numba_vectors import LANES, filled, larger, largest, load, on_boundary, store, total, vectorised


@vectorised
def up(n: Any, to: Any) -> Any:
    return (n + to - 1) // to * to


@vectorised
def aligned(rows: Any, columns: Any, like: Any) -> Any:
    """Zeros of the type of `like`, aligned to the size of a vector, so that no vector lies in two lines of the cache.

    columns: a multiple of LANES.
    """
    return on_boundary(np.zeros((rows + 1, columns), like.dtype))[:rows]


@vectorised
def span(begin: Any, end: Any, pattern: Any, t: Any, height: Any, s: Any, width: Any) -> Any:
    """From the first to after the last of the keys s ... s + width − 1, counted from s, that one of the rows sees."""
    first, last = width, 0
    for i in range(t, t + height):
        start, stop = max(begin[pattern, i] - s, 0), min(end[pattern, i] - s, width)
        if start < stop:
            first, last = min(first, start), max(last, stop)
    return first, last


@vectorised
def fill(x: Any, i: Any, start: Any, stop: Any, value: Any) -> None:
    for s in range(start, stop):
        x[i, s] = value


@vectorised
def write_row(a: Any, i: Any, factor: Any, x: Any, b: Any, h: Any, t: Any) -> None:
    for d in range(0, x.shape[3], LANES):
        store(x, (b, h, t, d), load(a, (i, d)) * factor)


@vectorised
def centre(x: Any) -> Any:
    """(first, mean, squares) of a row x (C,): (x_c − first) − mean is x_c less the mean of the row, and squares is the
    sum of its squares.

    The mean itself would be rounded in proportion to its size, which may be large beside the spread of the row. The
    differences from the row's first number are no larger than the spread, and so is their mean.
    """
    first = read(x[0])
    mean, squares, width = constant(0.0, first), constant(0.0, first), constant(x.size, first)
    for c in range(x.size):
        mean = plus(mean, read(x[c]) - first)
    mean = mean / width
    for c in range(x.size):
        centred = (read(x[c]) - first) - mean
        squares = plus(squares, centred * centred)
    return first, mean, squares


@vectorised
def largest_of_row(a: Any, i: Any, left: Any, right: Any) -> Any:
    m = filled(a, -np.inf)
    for s in range(left, right, LANES):
        m = larger(m, load(a, (i, s)))
    return largest(m)


@vectorised
def maximum_of_row(x: Any, i: Any) -> Any:
    """The largest number of a contiguous row of any length; NaN if one is NaN.

    LLVM does not make vectors of a loop that takes a maximum, since NaN could be among the numbers. Such a loop took
    fifteen times as long. It runs only where the sum of the row is NaN.
    """
    columns = x.shape[1]
    whole = columns - columns % LANES
    maximum = read(x[i, 0])
    if whole:
        m = load(x, (i, 0))
        numbers = m
        for j in range(LANES, whole, LANES):
            m = larger(load(x, (i, j)), m)
            numbers = numbers + load(x, (i, j))
        maximum = largest(m)
        whole *= total(numbers) == total(numbers)
    for j in range(whole, columns):
        maximum = greater(maximum, read(x[i, j]))
    return maximum

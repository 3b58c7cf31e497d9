"""Products of a few rows and a matrix, as fast as the matrix can be read.

- A row times a matrix takes as long as reading the matrix. `multiply` reads eight rows of w at a time, in their order
  in memory, and adds x_i w_io + ... + x_{i+7} w_{i+7,o} to each y_o, so that y is read and written an eighth as often.
  It tells the processor which numbers it will read next: without this, bfloat16 weights arrive at only two
  thirds of the memory's rate.
- The numbers of w may be bfloat16, which halves what is read. Each is widened to float32 in a register.
- Several rows of bfloat16 are multiplied in tile registers where the processor has them, so that w is read once for
  all, and elsewhere by a library.
- Matrices of integers (`ops.quantized`) are multiplied in `numba_quantized`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from .mkl_products import Products, product
from .mkl_products import products as blas
from .numba_amx import (
    BLOCK,
    SIDE,
    WIDE,
    add_tiles,
    available,
    clear_tile,
    configure,
    load_tile,
    release,
    store_pairs,
    store_tile,
    supported,
)
from .numba_code import compiled
from .numba_math import BITS, narrow, read
from .numba_quantized import multiply_parts, multiply_quantized
from .numba_vectors import LANES, filled, load, prefetch, store, total, vectorised

AHEAD = 4096  # how far ahead of its use a matrix is prefetched, in numbers


@vectorised
def multiply(x: Any, w: Any, first: Any, y: Any) -> None:
    """y_o = Σ_i x_i w_{i,first + o} for x (I,), w (I, ...), y (O,)."""
    I, O, i = x.size, y.size, 0
    whole, ahead = O - O % LANES, max(8, AHEAD // max(O, 1))
    for o in range(O):
        y[o] = 0
    while i + 8 <= I:
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        for o in range(0, whole, LANES):
            s = first + o
            for row in range(i + ahead, i + ahead + 8):
                prefetch(w, (row, s))
            near = (load(w, (i, s)) * x0 + load(w, (i + 1, s)) * x1) + (
                load(w, (i + 2, s)) * x2 + load(w, (i + 3, s)) * x3
            )
            far = (load(w, (i + 4, s)) * x4 + load(w, (i + 5, s)) * x5) + (
                load(w, (i + 6, s)) * x6 + load(w, (i + 7, s)) * x7
            )
            store(y, (o,), load(y, (o,)) + (near + far))
        i += 8
    for row in range(i, I):
        for o in range(0, whole, LANES):
            store(y, (o,), load(y, (o,)) + load(w, (row, first + o)) * x[row])
    for row in range(I):
        for o in range(whole, O):
            y[o] += x[row] * read(w[row, first + o])


@vectorised
def multiply_transposed(x: Any, w: Any, first: Any, y: Any) -> None:
    """y_o = Σ_i x_i w_{o,first + i} for x (I,), w (O, ...), y (O,)."""
    I, O, o = x.size, y.size, 0
    whole, ahead = I - I % LANES, max(4, AHEAD // I)
    while o < O:
        p, q, r = min(o + 1, O - 1), min(o + 2, O - 1), min(o + 3, O - 1)
        a = b = c = d = filled(x, 0.0)
        for i in range(0, whole, LANES):
            s, numbers = first + i, load(x, (i,))
            for row in range(o + ahead, o + ahead + 4):
                prefetch(w, (row, s))
            a, b = a + load(w, (o, s)) * numbers, b + load(w, (p, s)) * numbers
            c, d = c + load(w, (q, s)) * numbers, d + load(w, (r, s)) * numbers
        y[o], y[p], y[q], y[r] = total(a), total(b), total(c), total(d)
        o += 4
    for row in range(O):
        for i in range(whole, I):
            y[row] += x[i] * read(w[row, first + i])


def times(x: Any, w: Any, first: Any, y: Any) -> None:
    """As `multiply` in compiled code, for a matrix of any kind: an array, or the arrays of a quantised one."""


@overload(times, strict=False)
def _times(x: Any, w: Any, first: Any, y: Any) -> Any:
    if isinstance(w, types.BaseTuple):
        return lambda x, w, first, y: multiply_quantized(x.reshape(1, -1), w, first, y.reshape(1, -1))
    return lambda x, w, first, y: multiply(x, w, first, y)


def times_parts(x: Any, w: Any, row: Any, size: Any, y: Any) -> None:
    """y_no = Σ_i x_i w_{row + i,o} over the n-th `size` numbers of x (I,), for y (parts, O), in compiled code."""


@overload(times_parts, strict=False)
def _times_parts(x: Any, w: Any, row: Any, size: Any, y: Any) -> Any:
    if isinstance(w, types.BaseTuple):
        return lambda x, w, row, size, y: multiply_parts(x, w, row, size, y)
    return part_by_part


def part_by_part(x, w, row, size, y):  # type: ignore[no-untyped-def]
    for i in range(0, x.size, size):
        multiply(x[i : i + size], w[row + i :], 0, y[i // size])


def width(w: Any) -> int:
    """The number of columns of a matrix of any kind, in compiled code."""
    raise TypeError("width: for compiled code only")


@overload(width, strict=False)
def _width(w: Any) -> Any:
    return (lambda w: w[2]) if isinstance(w, types.BaseTuple) else (lambda w: w.shape[1])


@compiled
def copy(x: Any, y: Any) -> None:
    """y = x, widened or rounded as y demands."""
    for i in range(x.size):
        y[i] = narrow(read(x[i]), y)


class Means(NamedTuple):
    """How products of several rows are computed."""

    library: Products
    tiles: bool  # whether the processor has them, and Linux lets this process use them


@functools.cache
def means() -> Means | None:
    library = blas()
    return None if library is None else Means(library, available())


def multiply_rows(means: Any, x: Any, w: Any, y: Any) -> None:
    """y = x w for x (B, I), w (I, O), y (B, O), in compiled code; row after row if there are no `means`."""


@overload(multiply_rows, strict=False)
def _multiply_rows(means: Any, x: Any, w: Any, y: Any) -> Any:
    if isinstance(w, types.BaseTuple):
        return lambda means, x, w, y: multiply_quantized(x, w, 0, y)
    if isinstance(means, types.NoneType):
        return one_by_one
    if w.dtype != BITS:
        return lambda means, x, w, y: product(means.library, x, False, w, False, 0, y)
    return tiles_or_library if supported() else by_library


def one_by_one(means, x, w, y):  # type: ignore[no-untyped-def]
    for b in range(x.shape[0]):
        multiply(x[b], w, 0, y[b])


def by_library(means, x, w, y):  # type: ignore[no-untyped-def]
    product(means.library, half(x), False, w, False, 0, y)


def tiles_or_library(means, x, w, y):  # type: ignore[no-untyped-def]
    if means.tiles and x.shape[1] % BLOCK == 0 and w.shape[1] % BLOCK == 0:
        for b in range(0, x.shape[0], SIDE):
            multiply_tiles(half(x[b : b + SIDE]), w, y[b : b + SIDE])
    else:
        product(means.library, half(x), False, w, False, 0, y)


@compiled
def half(x: Any) -> Any:
    """x in bfloat16."""
    y = np.empty(x.shape, np.uint16)
    for b in range(x.shape[0]):
        copy(x[b], y[b])
    return y


@vectorised
def multiply_tiles(x: Any, w: Any, y: Any) -> None:
    """y = x w for at most SIDE rows x (B, I), in the tile registers of `numba_amx`.

    w is read once, in columns as wide as a cache line, while the next of them are being read into the cache.
    """
    (B, I), O = x.shape, w.shape[1]
    rows, sums = np.zeros((SIDE, I), np.uint16), np.empty((SIDE, BLOCK), np.float32)
    for b in range(B):
        copy(x[b], rows[b])
    pairs = np.empty((SIDE, BLOCK), np.uint32)
    configure(WIDE)
    for o in range(0, O, BLOCK):
        clear_tile(0)
        clear_tile(1)
        for i in range(0, I, BLOCK):
            for r in range(0, BLOCK, 2):
                prefetch(w, (i + r, o + BLOCK))
                prefetch(w, (i + r + 1, o + BLOCK))
                store_pairs(pairs, (r // 2, 0), load(w, (i + r, o)), load(w, (i + r + 1, o)))
                store_pairs(pairs, (r // 2, SIDE), load(w, (i + r, o + SIDE)), load(w, (i + r + 1, o + SIDE)))
            load_tile(4, rows, (0, i))
            load_tile(5, pairs, (0, 0))
            add_tiles(0, 4, 5)
            load_tile(6, pairs, (0, SIDE))
            add_tiles(1, 4, 6)
        store_tile(0, sums, (0, 0))
        store_tile(1, sums, (0, SIDE))
        for b in range(B):
            copy(sums[b], y[b, o : o + BLOCK])
    release()

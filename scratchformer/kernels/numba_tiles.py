"""The affine map in bfloat16 on processors with AMX: its products in tile registers, as in `numba_amx`.

Both factors of a product are first copied to blocks of BLOCK x BLOCK numbers, which lie in memory as the registers need
them. So registers are loaded from whole cache lines, and a block serves many products. A block of the first factor has
rows of numbers, one of the second rows of pairs, which are neighbours along the axis that is summed over. A pair is
moved as if it were one float32; there is no arithmetic on it.

The sums of a block are finished (bias, rounding) as soon as they are complete, while they are in the first-level
cache. Products and rounding treat numbers below 2⁻¹²⁶ in magnitude (subnormal ones) as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from . import numba_amx, numba_bfloat16
from .numba_amx import (
    BLOCK,
    SIDE,
    WIDE,
    add_tiles,
    clear_sums,
    configure,
    load_sums,
    load_tile,
    release,
    store_pairs,
    store_sums,
)
from .numba_code import compiled
from .numba_math import BITS
from .numba_vectors import (
    LANES,
    element,
    filled,
    index_of,
    intrinsic,
    load,
    on_boundary,
    store,
    transpose_tile,
    vector_of,
    vectorised,
    written,
)

DEPTH, HEIGHT, WIDTH = 32, 8, 16  # blocks along the sum, of rows and of columns at once, for the sake of the caches
NUMBERS = BLOCK, SIDE  # the shape, in float32, of a block of the first factor
PAIRS = SIDE, BLOCK  # of a block of the second


def available() -> bool:
    """Whether the code here can be compiled and may run: besides AMX it needs what `numba_bfloat16` needs."""
    return numba_amx.available() and numba_bfloat16.available()


def pays(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether tiles compute a map from x (N, I) to y (N, O), both bits, faster than a library. With few rows they do
    not: copying the weights to blocks takes too long.
    """
    I, O = x.shape[1], y.shape[1]
    return x.dtype == np.uint16 and I % BLOCK == O % BLOCK == 0 and 4 * len(x) >= min(I, O) and available()


@compiled
def blocks(count: Any, shape: Any) -> Any:
    """Room for blocks of 32-bit numbers, each of this shape. It begins on a cache line."""
    size = count[0] * count[1] * shape[0] * shape[1]
    room = on_boundary(np.empty(size + LANES, np.float32))
    return room[:size].reshape((count[0], count[1], shape[0], shape[1]))


@compiled
def multiply(x: Any, w: Any, across: Any, b: Any, y: Any) -> None:
    """y = x w + b, as `numba_linear.affine`."""
    (N, O), deep, wide = y.shape, x.shape[1] // BLOCK, y.shape[1] // BLOCK
    right = blocks((wide, deep), PAIRS)
    if across:
        pair_columns(w, right)
    else:
        pair_rows(w, 0, w.shape[0], 0, right, np.empty(0, np.float32))
    left = blocks((HEIGHT, min(DEPTH, deep)), NUMBERS)
    h = blocks((1, 1), (BLOCK, BLOCK))[0, 0]
    part = np.empty((HEIGHT * BLOCK if deep > DEPTH else 0, O), np.float32)
    configure(WIDE)
    for n in range(0, N, HEIGHT * BLOCK):
        high = (min(HEIGHT * BLOCK, N - n) + BLOCK - 1) // BLOCK
        for k in range(0, deep, DEPTH):
            some = min(DEPTH, deep - k)
            copy_rows(x, n, k, some, left)
            for first in range(0, wide, WIDTH):
                for r in range(high):
                    for o in range(first, min(first + WIDTH, wide)):
                        if k:
                            load_sums(part, r * BLOCK, o * BLOCK)
                        else:
                            clear_sums()
                        add_products(left[r], right[o, k:], some)
                        if k + some < deep:
                            store_sums(part, r * BLOCK, o * BLOCK)
                        else:
                            store_sums(h, 0, 0)
                            finish(h, b, n + r * BLOCK, o * BLOCK, y)
    release()


@compiled
def multiply_transposed(x: Any, dy: Any, dw: Any, db: Any) -> None:
    """dw = xᵀ dy and, if db has elements, db = the sum of the rows of dy."""
    N, high, wide = x.shape[0], x.shape[1] // BLOCK, dy.shape[1] // BLOCK
    deep = (N + BLOCK - 1) // BLOCK
    left, right = blocks((high, min(DEPTH, deep)), NUMBERS), blocks((WIDTH, min(DEPTH, deep)), PAIRS)
    pairs = np.empty((SIDE, SIDE), np.float32)
    db[:] = 0
    configure(WIDE)
    for k in range(0, deep, DEPTH):
        some = min(DEPTH, deep - k)
        first, last = k * BLOCK, min(N, (k + some) * BLOCK)
        transpose_rows(x, first, last, pairs, left)
        for o in range(0, wide, WIDTH):
            columns = min(WIDTH, wide - o)
            pair_rows(dy, first, last, o * BLOCK, right[:columns], db)
            for i in range(high):
                for c in range(columns):
                    if k:
                        load_sums(dw, i * BLOCK, (o + c) * BLOCK)
                    else:
                        clear_sums()
                    add_products(left[i], right[c], some)
                    store_sums(dw, i * BLOCK, (o + c) * BLOCK)
    release()


@vectorised
def add_products(left: Any, right: Any, deep: Any) -> None:
    """Add the products of `deep` blocks to the sums, which registers 0 to 3 hold."""
    for k in range(deep):
        load_tile(4, left, (k, 0, 0))
        load_tile(6, right, (k, 0, 0))
        add_tiles(0, 4, 6)
        load_tile(7, right, (k, 0, SIDE))
        add_tiles(1, 4, 7)
        load_tile(5, left, (k, SIDE, 0))
        add_tiles(2, 5, 6)
        add_tiles(3, 5, 7)


@vectorised
def finish(h: Any, b: Any, n: Any, o: Any, y: Any) -> None:
    """As `numba_linear.finish_row`, for a block of y."""
    for r in range(min(BLOCK, y.shape[0] - n)):
        for c in range(0, BLOCK, LANES):
            a = load(h, (r, c))
            if b.size:
                a = a + load(b, (o + c,))
            put(y, (n + r, o + c), a)


def put(x: Any, index: Any, a: Any) -> None:
    """As `store`, but for bfloat16 by `round_to`."""


@overload(put, strict=False)
def _put(x: Any, index: Any, a: Any) -> Any:
    return (lambda x, index, a: round_to(x, index, a)) if x.dtype == BITS else (lambda x, index, a: store(x, index, a))


@intrinsic
def round_to(typing: Any, x: Any, index: Any, a: Any) -> Any:
    """As `store` for bfloat16, in one instruction, which takes numbers below 2⁻¹²⁶ in magnitude for 0."""

    def write(context: Any, builder: Any, array: Any, index: Any, a: Any) -> None:
        kind = ir.FunctionType(vector_of(x.dtype), [a.type])
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        narrow = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a])
        builder.store(narrow, element(context, builder, x, array, index), align=2)

    return written(types.void(x, index_of(x), a), write)


@vectorised
def copy_rows(x: Any, n: Any, k: Any, deep: Any, to: Any) -> None:
    """Rows of x, from row n and block k on, to blocks; rows after the last one of x are 0."""
    pairs = x.view(np.float32)
    for r in range(0, min(to.shape[0] * BLOCK, (x.shape[0] - n + BLOCK - 1) // BLOCK * BLOCK)):
        block, row = to[r // BLOCK], r % BLOCK
        for d in range(deep):
            if n + r < x.shape[0]:
                store(block, (d, row, 0), load(pairs, (n + r, (k + d) * SIDE)))
            else:
                store(block, (d, row, 0), filled(block, np.float32(0)))


@vectorised
def pair_rows(x: Any, first: Any, last: Any, at: Any, to: Any, sums: Any) -> None:
    """Rows of x, from column `at` on, in pairs, to blocks. The last block is filled up with zeros. The sums of the
    columns are added to `sums`, if it has elements.
    """
    pairs = to.view(np.uint32)
    for i in range(first, (last + BLOCK - 1) // BLOCK * BLOCK, 2):
        d, row = (i - first) // BLOCK, (i - first) % BLOCK // 2
        for o in range(to.shape[0]):
            for c in range(0, BLOCK, LANES):
                column = at + o * BLOCK + c
                even = odd = filled(to, np.float32(0))
                if i < last:
                    even = load(x, (i, column))
                if i + 1 < last:
                    odd = load(x, (i + 1, column))
                store_pairs(pairs, (o, d, row, c), even, odd)
                if sums.size:
                    store(sums, (column,), load(sums, (column,)) + (even + odd))


@vectorised
def pair_columns(x: Any, to: Any) -> None:
    """The transpose of x, by pairs of its rows, to blocks."""
    pairs = x.view(np.float32)
    for o in range(0, x.shape[0], SIDE):
        for d in range(to.shape[1]):
            transpose_tile(pairs, o, d * SIDE, to[o // BLOCK, d], 0, o % BLOCK)


@vectorised
def transpose_rows(x: Any, first: Any, last: Any, pairs: Any, to: Any) -> None:
    """The transpose of rows of x to blocks, by way of `pairs`. The last block is filled up with zeros."""
    for n in range(first, last, BLOCK):
        for i in range(0, x.shape[1], SIDE):
            for r in range(0, BLOCK, 2):
                even = odd = filled(to, np.float32(0))
                if n + r < last:
                    even = load(x, (n + r, i))
                if n + r + 1 < last:
                    odd = load(x, (n + r + 1, i))
                store_pairs(pairs.view(np.uint32), (r // 2, 0), even, odd)
            transpose_tile(pairs, 0, 0, to[i // BLOCK, (n - first) // BLOCK], i % BLOCK, 0)

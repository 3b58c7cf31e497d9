"""Attention in bfloat16 on processors with AMX, whose tile registers hold 16 x 16 sums.

One instruction adds to a tile of sums, in float32, the product of 16 x 32 and 32 x 16 numbers in bfloat16. The second
factor lies in memory by pairs: its rows 2i and 2i + 1 are one row of pairs. The equations are those of
`numba_attention`. What differs is the order of numbers in memory, and that e and dz are rounded to bfloat16.

Scores are scaled within the exponential, and the backward subtracts the logarithm of a row's sum in the same step. With
a = q k, the scale c = 1/(√D log 2), and m the largest a of a row,

    log_sum = log2(Σ 2^(c (a − m)))        p = 2^(c (a − m) − log_sum)

dk = dzᵀ q and dv = pᵀ dy would need the transposes of every tile of dz and p. Computed instead are dkᵀ = qᵀ dz and
dvᵀ = dyᵀ p: only q and dy are transposed, once for each head, and dz and p are stored by pairs of rows.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .numba_code import has
from .numba_rows import fill, largest_of_row, span, up, write_row
from .numba_vectors import (
    INTEGER,
    LANES,
    constant,
    element,
    exp2,
    filled,
    index_of,
    intrinsic,
    load,
    place,
    pointer,
    store,
    total,
    transpose_tile,
    vectorised,
    written,
)

SIDE = 16  # of a tile
BLOCK = 32  # rows and columns of scores at once
FEW = 4 * BLOCK  # fewer positions that are not whole blocks take longer to fill up than AMX saves


def supported() -> bool:
    """Whether code for AMX can be compiled; whether it may run here, `available` says. Numba keeps compiled code for
    other processes, so what is compiled may depend on this function but not on `available`.
    """
    return sys.platform == "linux" and LANES == SIDE and has("amx-bf16") and has("amx-tile")


@functools.cache
def available() -> bool:
    """Whether the processor has AMX for bfloat16 and Linux lets this process use it."""
    if not supported():
        return False
    permission, tile_data, arch_prctl = 0x1023, 18, 158  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, the system call
    return ctypes.CDLL(None).syscall(arch_prctl, permission, tile_data) == 0


def configuration(depth: int) -> np.ndarray:
    """The shapes of the eight tile registers: 64 bytes that the processor defines.

    Registers 0 to 3 hold sums, 4 and 5 factors with an inner width of `depth`, 6 and 7 factors with one of 32.
    """
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only format there is
    for register in range(8):
        shapes[16 + 2 * register] = 2 * depth if register == 4 else 64  # bytes in a row
        shapes[48 + register] = depth // 2 if register == 5 else SIDE  # rows
    return shapes


NARROW, WIDE = configuration(SIDE), configuration(BLOCK)


def instruction(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


BYTE, BITS = ir.IntType(8), ir.VectorType(INTEGER, LANES)


def number(register: Any) -> Any:
    return BYTE(register.literal_value)


@intrinsic
def configure(typing: Any, shapes: Any) -> Any:
    def write(context: Any, builder: Any, array: Any) -> None:
        address, _ = place(context, builder, shapes, array, [ir.IntType(64)(0)])
        instruction(builder, "ldtilecfg", pointer(builder, address, BYTE))

    return written(types.void(shapes), write)


@intrinsic
def release(typing: Any) -> Any:
    return written(types.void(), lambda context, builder: instruction(builder, "tilerelease"))


@intrinsic(prefer_literal=True)
def clear_tile(typing: Any, c: Any) -> Any:
    return written(types.void(c), lambda context, builder, *_: instruction(builder, "tilezero", number(c)))


@intrinsic(prefer_literal=True)
def add_tiles(typing: Any, c: Any, a: Any, b: Any) -> Any:
    """Add the product of two registers to a third."""
    registers = [number(x) for x in (c, a, b)]
    return written(types.void(c, a, b), lambda context, builder, *_: instruction(builder, "tdpbf16ps", *registers))


def moved(name: str) -> Any:
    """A function that moves a register from or to the rows of an array that begin at an element."""

    @intrinsic(prefer_literal=True)
    def function(typing: Any, register: Any, x: Any, index: Any) -> Any:
        def write(context: Any, builder: Any, _: Any, array: Any, index: Any) -> None:
            address, strides = place(context, builder, x, array, cgutils.unpack_tuple(builder, index, x.ndim))
            instruction(builder, name, number(register), pointer(builder, address, BYTE), strides[x.ndim - 2])

        return written(types.void(register, x, index_of(x)), write)

    return function


load_tile, store_tile = moved("tileloadd64"), moved("tilestored64")


@vectorised
def clear_sums() -> None:
    clear_tile(0)
    clear_tile(1)
    clear_tile(2)
    clear_tile(3)


@vectorised
def load_sums(c: Any, i: Any, j: Any) -> None:
    """Registers 0 to 3 get the BLOCK x BLOCK numbers of c from row i and column j on."""
    load_tile(0, c, (i, j))
    load_tile(1, c, (i, j + SIDE))
    load_tile(2, c, (i + SIDE, j))
    load_tile(3, c, (i + SIDE, j + SIDE))


@vectorised
def store_sums(c: Any, i: Any, j: Any) -> None:
    store_tile(0, c, (i, j))
    store_tile(1, c, (i, j + SIDE))
    store_tile(2, c, (i + SIDE, j))
    store_tile(3, c, (i + SIDE, j + SIDE))


@intrinsic
def store_near(typing: Any, x: Any, index: Any, a: Any) -> Any:
    """As `store` for bfloat16, but of two equally near numbers the one farther from zero: in two instructions, not
    seven.
    """

    def write(context: Any, builder: Any, array: Any, index: Any, a: Any) -> None:
        upper = builder.lshr(half_added(builder, a), constant(BITS, 16))
        narrow = builder.trunc(upper, ir.VectorType(ir.IntType(16), LANES))
        builder.store(narrow, element(context, builder, x, array, index), align=2)

    return written(types.void(x, index_of(x), a), write)


@intrinsic
def store_pairs(typing: Any, x: Any, index: Any, a: Any, b: Any) -> Any:
    """The numbers of a and b in pairs, rounded to bfloat16 as by `store_near`, to an array of 32-bit integers."""

    def write(context: Any, builder: Any, array: Any, index: Any, a: Any, b: Any) -> None:
        lower = builder.lshr(half_added(builder, a), constant(BITS, 16))
        upper = builder.and_(half_added(builder, b), constant(BITS, 0xFFFF0000))
        builder.store(builder.or_(lower, upper), element(context, builder, x, array, index), align=4)

    return written(types.void(x, index_of(x), a, b), write)


def half_added(builder: Any, a: Any) -> Any:
    return builder.add(builder.bitcast(a, BITS), constant(BITS, 0x8000))


def fits(q: np.ndarray, k: np.ndarray) -> bool:
    """Whether `attention` takes such arrays, on this processor, and pays."""
    D = q.shape[3]
    whole_or_many = all(x.shape[2] % BLOCK == 0 or x.shape[2] >= FEW for x in (q, k))
    return q.dtype.char == "E" and D > 0 and (D == SIDE or D % BLOCK == 0) and whole_or_many and available()


@vectorised
def forward(
    q: Any, k: Any, v: Any, begin: Any, end: Any, scale: Any, maximum: Any, log_sum: Any, y: Any
) -> None:  # fmt: skip
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    depth = min(D, 32)
    keys = np.zeros((D // 2, S + SIDE), np.uint32)
    values = np.zeros((S // 2, D), np.uint32)
    a, e = np.zeros((SIDE, S + SIDE), np.float32), np.zeros((SIDE, S + 2 * SIDE), np.uint16)
    rows, tile = np.zeros((SIDE, SIDE), np.float32), np.zeros((SIDE, SIDE), np.float32)
    sums, inverse = np.zeros((SIDE, D), np.float32), np.zeros(SIDE, np.float32)
    configure(NARROW if D == SIDE else WIDE)
    for b in range(B):
        pattern = min(b, len(begin) - 1)
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                transpose_pairs(k, b, g, rows, tile, keys)
                pair_rows(v, b, g, values)
            for t in range(0, T, SIDE):
                first, last = span(begin, end, pattern, t, SIDE, 0, S)
                left, right = first // BLOCK * BLOCK, up(last, BLOCK)
                for s in range(left, right, BLOCK):
                    clear_tile(0)
                    clear_tile(1)
                    for d in range(0, D, depth):
                        load_tile(4, q, (b, h, t, d))
                        load_tile(5, keys, (d // 2, s))
                        add_tiles(0, 4, 5)
                        load_tile(5, keys, (d // 2, s + SIDE))
                        add_tiles(1, 4, 5)
                    store_tile(0, a, (0, s))
                    store_tile(1, a, (0, s + SIDE))
                for i in range(SIDE):
                    start, stop = begin[pattern, t + i], end[pattern, t + i]
                    fill(a, i, left, start, -np.inf)
                    fill(a, i, stop, right, -np.inf)
                    seen = start < stop
                    m = maximum[b, h, t + i] = largest_of_row(a, i, left, right) if seen else np.float32(0)
                    l = exponentials(a, e, i, left, right, scale, m)
                    log_sum[b, h, t + i] = np.log2(l) if seen else np.float32(0)
                    inverse[i] = 1 / l if seen else np.float32(0)
                for d in range(0, D, SIDE):
                    clear_tile(2)
                    for s in range(left, right, BLOCK):
                        load_tile(6, e, (0, s))
                        load_tile(7, values, (s // 2, d))
                        add_tiles(2, 6, 7)
                    store_tile(2, sums, (0, d))
                for i in range(SIDE):
                    write_row(sums, i, inverse[i], y, b, h, t + i)
    release()


@vectorised
def exponentials(a: Any, e: Any, i: Any, left: Any, right: Any, scale: Any, m: Any) -> Any:
    terms = filled(a, 0.0)
    for s in range(left, right, LANES):
        one = exp2((load(a, (i, s)) - m) * scale)
        store_near(e, (i, s), one)
        terms = terms + one
    return total(terms)


@vectorised
def columns(x: Any, b: Any, h: Any, s: Any, d: Any, rows: Any, to: Any) -> None:
    """A tile of x, transposed, in float32."""
    for i in range(SIDE):
        store(rows, (i, 0), load(x, (b, h, s + i, d)))
    transpose_tile(rows, 0, 0, to, 0, 0)


@vectorised
def transpose_pairs(x: Any, b: Any, h: Any, rows: Any, tile: Any, to: Any) -> None:
    """The transpose of x, by pairs of its rows."""
    for s in range(0, x.shape[2], SIDE):
        for d in range(0, x.shape[3], SIDE):
            columns(x, b, h, s, d, rows, tile)
            for i in range(0, SIDE, 2):
                store_pairs(to, ((d + i) // 2, s), load(tile, (i, 0)), load(tile, (i + 1, 0)))


@vectorised
def transpose(x: Any, b: Any, h: Any, rows: Any, tile: Any, to: Any) -> None:
    for s in range(0, x.shape[2], SIDE):
        for d in range(0, x.shape[3], SIDE):
            columns(x, b, h, s, d, rows, tile)
            for i in range(SIDE):
                store_near(to, (d + i, s), load(tile, (i, 0)))


@vectorised
def write_transposed(sums: Any, factor: Any, rows: Any, x: Any, b: Any, g: Any) -> None:
    for s in range(0, x.shape[2], SIDE):
        for d in range(0, x.shape[3], SIDE):
            transpose_tile(sums, d, s, rows, 0, 0)
            for i in range(SIDE):
                store(x, (b, g, s + i, d), load(rows, (i, 0)) * factor)


@vectorised
def pair_rows(x: Any, b: Any, h: Any, to: Any) -> None:
    for s in range(0, x.shape[2], 2):
        for d in range(0, x.shape[3], LANES):
            store_pairs(to, (s // 2, d), load(x, (b, h, s, d)), load(x, (b, h, s + 1, d)))


@vectorised
def backward(
    dy: Any, q: Any, k: Any, v: Any, y: Any, begin: Any, end: Any, scale: Any, maximum: Any, log_sum: Any,
    dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    depth = min(D, 32)
    keys, values = np.zeros((D // 2, S + SIDE), np.uint32), np.zeros((D // 2, S + SIDE), np.uint32)
    key_pairs = np.zeros((S // 2, D), np.uint32)
    queries, outputs = np.zeros((D, T + BLOCK), np.uint16), np.zeros((D, T + BLOCK), np.uint16)
    sum_dk, sum_dv = np.zeros((D, S + SIDE), np.float32), np.zeros((D, S + SIDE), np.float32)
    rows, tile = np.zeros((SIDE, SIDE), np.float32), np.zeros((SIDE, SIDE), np.float32)
    sum_dq, delta = np.zeros((BLOCK, D), np.float32), np.zeros(BLOCK, np.float32)
    a, dp = np.zeros((BLOCK, BLOCK), np.float32), np.zeros((BLOCK, BLOCK), np.float32)
    dz = np.zeros((BLOCK, BLOCK), np.uint16)
    p_pairs, dz_pairs = np.zeros((SIDE, BLOCK), np.uint32), np.zeros((SIDE, BLOCK), np.uint32)
    factor = scale * np.float32(np.log(2.0))
    configure(NARROW if D == SIDE else WIDE)
    for b in range(B):
        pattern = min(b, len(begin) - 1)
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                transpose_pairs(k, b, g, rows, tile, keys)
                transpose_pairs(v, b, g, rows, tile, values)
                pair_rows(k, b, g, key_pairs)
                for d in range(D):
                    fill(sum_dk, d, 0, S, 0)
                    fill(sum_dv, d, 0, S, 0)
            transpose(q, b, h, rows, tile, queries)
            transpose(dy, b, h, rows, tile, outputs)
            for t in range(0, T, BLOCK):
                for i in range(BLOCK):
                    fill(sum_dq, i, 0, D, 0)
                    delta[i] = dot(dy[b, h, t + i], y[b, h, t + i])
                first, last = span(begin, end, pattern, t, BLOCK, 0, S)
                latest, earliest = begin[pattern, t : t + BLOCK].max(), end[pattern, t : t + BLOCK].min()
                for s in range(first // BLOCK * BLOCK, last, BLOCK):
                    tiles(q, b, h, t, keys, s, depth, a)
                    tiles(dy, b, h, t, values, s, depth, dp)
                    if s < latest or s + BLOCK > earliest:
                        for i in range(BLOCK):
                            start, stop = min(begin[pattern, t + i] - s, BLOCK), max(end[pattern, t + i] - s, 0)
                            fill(a, i, 0, start, -np.inf)
                            fill(a, i, stop, BLOCK, -np.inf)
                    for i in range(0, BLOCK, 2):
                        gradients(a, dp, i, scale, maximum, log_sum, b, h, t + i, delta, dz, dz_pairs, p_pairs)
                    for d in range(0, D, SIDE):
                        load_tile(7, key_pairs, (s // 2, d))
                        load_tile(0, sum_dq, (0, d))
                        load_tile(6, dz, (0, 0))
                        add_tiles(0, 6, 7)
                        store_tile(0, sum_dq, (0, d))
                        load_tile(1, sum_dq, (SIDE, d))
                        load_tile(6, dz, (SIDE, 0))
                        add_tiles(1, 6, 7)
                        store_tile(1, sum_dq, (SIDE, d))
                        add_transposed(sum_dk, d, s, queries, t, dz_pairs)
                        add_transposed(sum_dv, d, s, outputs, t, p_pairs)
                for i in range(BLOCK):
                    write_row(sum_dq, i, factor, dq, b, h, t + i)
            if (h + 1) * G % H == 0:
                write_transposed(sum_dk, factor, rows, dk, b, g)
                write_transposed(sum_dv, np.float32(1), rows, dv, b, g)
    release()


@vectorised
def tiles(x: Any, b: Any, h: Any, t: Any, columns: Any, s: Any, depth: Any, to: Any) -> None:
    """The BLOCK x BLOCK products of rows of x and of columns by pairs."""
    clear_sums()
    for d in range(0, x.shape[3], depth):
        load_tile(4, x, (b, h, t, d))
        load_tile(5, columns, (d // 2, s))
        add_tiles(0, 4, 5)
        load_tile(5, columns, (d // 2, s + SIDE))
        add_tiles(1, 4, 5)
        load_tile(4, x, (b, h, t + SIDE, d))
        add_tiles(3, 4, 5)
        load_tile(5, columns, (d // 2, s))
        add_tiles(2, 4, 5)
    store_sums(to, 0, 0)


@vectorised
def add_transposed(to: Any, d: Any, s: Any, x: Any, t: Any, pairs: Any) -> None:
    load_tile(6, x, (d, t))
    load_tile(0, to, (d, s))
    load_tile(7, pairs, (0, 0))
    add_tiles(0, 6, 7)
    store_tile(0, to, (d, s))
    load_tile(1, to, (d, s + SIDE))
    load_tile(7, pairs, (0, SIDE))
    add_tiles(1, 6, 7)
    store_tile(1, to, (d, s + SIDE))


@vectorised
def gradients(
    a: Any, dp: Any, i: Any, scale: Any, maximum: Any, log_sum: Any, b: Any, h: Any, t: Any, delta: Any,
    dz: Any, dz_pairs: Any, p_pairs: Any,
) -> None:  # fmt: skip
    """p and dz of rows i and i + 1 of a block, in bfloat16."""
    m, m2, l, l2 = maximum[b, h, t], maximum[b, h, t + 1], log_sum[b, h, t], log_sum[b, h, t + 1]
    for s in range(0, BLOCK, LANES):
        p = exp2((load(a, (i, s)) - m) * scale - l)
        p2 = exp2((load(a, (i + 1, s)) - m2) * scale - l2)
        one, two = p * (load(dp, (i, s)) - delta[i]), p2 * (load(dp, (i + 1, s)) - delta[i + 1])
        store_pairs(p_pairs, (i // 2, s), p, p2)
        store_pairs(dz_pairs, (i // 2, s), one, two)
        store_near(dz, (i, s), one)
        store_near(dz, (i + 1, s), two)


@vectorised
def dot(a: Any, x: Any) -> Any:
    terms = load(a, (0,)) * load(x, (0,))
    for d in range(LANES, x.size, LANES):
        terms = terms + load(a, (d,)) * load(x, (d,))
    return total(terms)

"""Products with matrices of 8-bit and 4-bit integers, as fast as the matrix can be read: see `ops.quantized`.

A row x is rounded to integers first. Then a vector register holds four inputs of each of LANES columns. One instruction
(VNNI), or where it is missing two products of pairs of 16-bit integers and some shifts, adds to each column's sum, a
32-bit integer,

    sum_o ← sum_o + k_0o m_0 + k_1o m_1 + k_2o m_2 + k_3o m_3

for the stored k without a sign and four integers m of x, which are the same for all columns. What was added to every k
to make it positive is subtracted in advance, where the sum starts. At the end of a group the sums, which are exact,
become floating-point numbers and are multiplied by the scales.

Columns that are read together for one row are in the cache for the next, so several rows cost little more than one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..ops.quantized import GROUP, PANEL, SMALLEST, Quantized
from .numba_code import compiled, has
from .numba_vectors import (
    INTEGER,
    LANES,
    Vector,
    constant,
    element,
    filled,
    index_of,
    intrinsic,
    load,
    prefetch,
    splat,
    store,
    vector_of,
    vectorised,
)

WORDS = GROUP // 4  # of four integers
AHEAD = 32  # how many groups ahead a matrix of 4 bits is prefetched; one of 8 bits is as fast without
TINY, TOP = np.float32(SMALLEST), np.float32(127)
MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign: positive numbers are in the order of their bits
VNNI = {16: has("avx512vnni"), 8: (has("avx512vnni") and has("avx512vl")) or has("avxvnni"), 4: False}[LANES]
# The instruction for a_0 b_0 + a_1 b_1 of pairs of 16-bit integers, by LLVM's name, unless the processor has none.
PAIRS = {
    16: "avx512.pmaddw.d.512" if has("avx512bw") else "",
    8: "avx2.pmadd.wd",
    4: "sse2.pmadd.wd" if has("sse2") else "",
}[LANES]


@intrinsic
def words(typing: Any, x: Any, index: Any) -> Any:
    """LANES words of an array of 32-bit integers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(element(context, builder, x, *args), align=4)

    return Vector(types.uint32)(x, index_of(x)), code


@intrinsic
def filled_with(typing: Any, value: Any) -> Any:
    """A vector of LANES times the same integer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, vector_of(types.uint32), args[0])

    return Vector(types.uint32)(types.uint32), code


@intrinsic
def half_bytes(typing: Any, w: Any, upper: Any) -> Any:
    """The lower halves of all bytes of w, or with `upper` = 4 the upper ones."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = vector_of(types.uint32)
        moved = builder.lshr(args[0], splat(builder, vector, args[1]))
        return builder.and_(moved, constant(vector, 0x0F0F0F0F))

    return w(w, types.uint32), code


@intrinsic
def plus_products(typing: Any, sums: Any, w: Any, x: Any) -> Any:
    """sums + Σ_j k_j m_j for the four bytes k of each word of w, without a sign, and the four of x, which have one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, stored, four = args
        vector = total.type
        if VNNI:
            kind = ir.FunctionType(vector, [vector] * 3)
            name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
            dot = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(dot, (total, stored, splat(builder, vector, four)))
        pairs = ir.VectorType(ir.IntType(16), 2 * LANES)
        eight, byte = (ir.Constant(pairs, [n] * 2 * LANES) for n in (8, 255))
        whole = builder.bitcast(stored, pairs)
        signed = builder.bitcast(splat(builder, vector, four), pairs)
        factors = (
            (builder.and_(whole, byte), builder.ashr(builder.shl(signed, eight), eight)),
            (builder.lshr(whole, eight), builder.ashr(signed, eight)),
        )
        for a, b in factors:
            if PAIRS:
                kind = ir.FunctionType(vector, [pairs] * 2)
                dot = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{PAIRS}")
                total = builder.add(total, builder.call(dot, (a, b)))
                continue
            for first in 0, 1:
                some = ir.Constant(ir.VectorType(INTEGER, LANES), list(range(first, 2 * LANES, 2)))
                left, right = (builder.sext(builder.shuffle_vector(y, y, some), vector) for y in (a, b))
                total = builder.add(total, builder.mul(left, right))
        return total

    return sums(sums, w, types.uint32), code


@intrinsic
def floats(typing: Any, sums: Any) -> Any:
    """The integers, with their signs, as floating-point numbers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], vector_of(types.float32))

    return Vector(types.float32)(sums), code


@compiled
def integers(x: Any, zero: Any) -> Any:
    """Rows x (N, I) as integers: their words (N groups, WORDS); each group's scale; and −zero Σ_i m_i, as a word."""
    N, I = x.shape
    groups = (I + GROUP - 1) // GROUP
    numbers = np.zeros((N * groups, GROUP), np.int8)
    scales, starts = np.empty(N * groups, np.float32), np.empty(N * groups, np.uint32)
    for row in range(N * groups):
        first = row % groups * GROUP
        part, to = x[row // groups, first : first + GROUP], numbers[row]
        top, total = np.int32(0), np.int32(0)
        for i in range(GROUP) if part.size == GROUP else range(part.size):
            bits = np.int32(np.float32(part[i]).view(np.int32) & MAGNITUDE)
            top = bits if bits > top else top
        largest = np.int32(top).view(np.float32)  # infinity or NaN if there is one, and so is the scale
        inverse = np.float32(0) if largest < TINY else TOP / largest
        for i in range(GROUP) if part.size == GROUP else range(part.size):
            integer = np.int32(np.rint(part[i] * inverse))
            to[i] = integer
            total += integer
        scales[row], starts[row] = largest / TOP, np.uint32(-zero * total)
    return numbers.view(np.uint32), scales, starts


@vectorised
def of_bytes(x: Any, first: Any, last: Any, numbers: Any, scales: Any, p: Any, group: Any, y: Any) -> None:
    """y (PANEL,) = Σ_i x_i w_i for panel p of w, from `group` on, and groups first ... last − 1 of x, as `integers`
    gives it.
    """
    words_of_x, scales_of_x, starts = x
    for o in range(0, PANEL, LANES):
        total = filled(y, 0.0)
        for g in range(first, last):
            row, sums = group + g - first, filled_with(starts[g])
            for k in range(WORDS):
                sums = plus_products(sums, words(numbers, (p, row, k, o)), words_of_x[g, k])
            total = total + floats(sums) * (load(scales, (p, row, o)) * scales_of_x[g])
        store(y, (o,), total)


@vectorised
def of_half_bytes(x: Any, first: Any, last: Any, numbers: Any, scales: Any, p: Any, group: Any, y: Any) -> None:
    """As `of_bytes`, for integers of 4 bits."""
    words_of_x, scales_of_x, starts = x
    for o in range(0, PANEL, LANES):
        total = filled(y, 0.0)
        for g in range(first, last):
            row, sums = group + g - first, filled_with(starts[g])
            for k in range(WORDS // 2):
                prefetch(numbers, (p, row + AHEAD, k, o))
                both = words(numbers, (p, row, k, o))
                sums = plus_products(sums, half_bytes(both, np.uint32(0)), words_of_x[g, 2 * k])
                sums = plus_products(sums, half_bytes(both, np.uint32(4)), words_of_x[g, 2 * k + 1])
            total = total + floats(sums) * (load(scales, (p, row, o)) * scales_of_x[g])
        store(y, (o,), total)


@compiled
def multiply_quantized(x: Any, w: Any, column: Any, y: Any) -> None:
    """y_no = Σ_i x_ni w_{i,column + o} for x (N, I) and y (N, O).

    w: see `arrays_of`. column is a multiple of PANEL; so is O, unless y ends where the matrix ends.
    """
    groups = (x.shape[1] + GROUP - 1) // GROUP
    multiply_integers(integers(x, zero_of(w)), groups, w, 0, 0, column, y)


@compiled
def multiply_parts(x: Any, w: Any, row: Any, size: Any, y: Any) -> None:
    """y_no = Σ_i x_i w_{row + i,o} over the n-th `size` numbers of x (I,), for y (parts, O).

    row and size are multiples of GROUP.
    """
    x = integers(x.reshape(1, -1), zero_of(w))
    multiply_integers(x, size // GROUP, w, row // GROUP, size // GROUP, 0, y)


@compiled
def zero_of(w: Any) -> Any:
    """What has been added to every integer of w."""
    return 128 if w[0].shape[2] == WORDS else 8


@compiled
def multiply_integers(x: Any, size: Any, w: Any, group: Any, step: Any, column: Any, y: Any) -> None:
    """y_n = x_n w, where x_n are the n-th `size` groups of x, and begin at `group` + n `step` of w. Each panel is read
    for all of them.
    """
    numbers, scales, _ = w
    groups, O, rest = x[1].size, y.shape[1], np.empty(PANEL, np.float32)
    for o in range(0, O, PANEL):
        p, complete = (column + o) // PANEL, o + PANEL <= O
        for n in range((groups + size - 1) // size):
            to, first, last = y[n, o : o + PANEL] if complete else rest, n * size, min((n + 1) * size, groups)
            if numbers.shape[2] == WORDS:
                of_bytes(x, first, last, numbers, scales, p, group + n * step, to)
            else:
                of_half_bytes(x, first, last, numbers, scales, p, group + n * step, to)
            if not complete:
                y[n, o:] = rest[: O - o]


def arrays_of(w: Quantized) -> tuple[np.ndarray, np.ndarray, int]:
    """A matrix as compiled code takes it: words (panels, groups, words, PANEL), scales (panels, groups, PANEL), and the
    number of columns.
    """
    return w.numbers.view(np.uint32)[..., 0], w.scales, w.shape[1]

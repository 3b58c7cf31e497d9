"""Products of bfloat16 matrices on processors with AVX512-BF16, whose instructions multiply pairs of numbers.

One instruction adds, to each of 16 sums in float32, the products of two pairs of bfloat16 numbers:

    c_ij ← c_ij + a_{i,2k} b_{2k,j} + a_{i,2k+1} b_{2k+1,j}

So a pair of neighbours along k is the unit in which both factors are stored: 32 bits. Products are computed in blocks
that fit the caches, as in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). A block of
b, DEPTH × WIDTH, is copied to panels of COLUMNS columns, and a block of a, HEIGHT × DEPTH, to panels of ROWS rows. In
a panel, the pairs that one step of the innermost loop needs lie side by side. That loop keeps ROWS × COLUMNS sums in
registers.

The instruction treats numbers below 2⁻¹²⁶ in magnitude (subnormal ones) as 0, among its factors and its sums.

MKL has such products for Intel's processors. On an AMD EPYC (Zen 4) those of MKL in bfloat16 were no faster than its
products in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from .numba_code import compiled, has
from .numba_vectors import INTEGER, LANES, intrinsic, place, pointer, splat, vector_of, vectorised, written

VECTORS = 2  # in a row of a panel of b
ROWS, COLUMNS = 14, VECTORS * LANES  # their sums take 28 of the 32 registers
HEIGHT, WIDTH, DEPTH = 19 * ROWS, 16 * COLUMNS, 512  # of blocks, in numbers; at least the 256 rows of `linear`'s
TRANSPOSE = 112  # the number of CBLAS
LARGE, ADDRESS = types.int64, types.CPointer(types.uint16)
CBLAS = types.void(
    *[types.int32] * 3, *[LARGE] * 3, types.float32, *[ADDRESS, LARGE] * 2, types.float32,
    types.CPointer(types.float32), LARGE,
)  # fmt: skip


def available() -> bool:
    """Whether compiled code may use the instructions; LLVM counts AVX512BW among what they need."""
    return LANES == 16 and has("avx512bw") and has("avx512bf16")


@functools.cache
def address() -> int:
    """The address of a function c = α a b + β c. It takes the arguments of `cblas_gemm_bf16bf16f32`, and every matrix
    by rows. Unlike BLAS it reads a and b also if α is 0. If there is no memory, c becomes NaN: an exception would not
    reach the caller, who would go on.
    """
    result = gemm.get_compile_result(CBLAS)  # unlike `numba.cfunc`, with the code that `compiled` keeps on disk
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


@compiled
def gemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # type: ignore[no-untyped-def]
    left = carray(a, (k, lda) if ta == TRANSPOSE else (m, lda))
    right = carray(b, (n, ldb) if tb == TRANSPOSE else (k, ldb))
    result = carray(c, (m, ldc))
    try:
        multiply(left, ta == TRANSPOSE, right, tb == TRANSPOSE, alpha, beta, (m, n, k), result)
    except Exception:
        result[:, :n] = np.nan


@compiled
def multiply(a: Any, ta: Any, b: Any, tb: Any, alpha: Any, beta: Any, sizes: Any, c: Any) -> None:
    """The first M rows and N columns of c become α a b + β c."""
    M, N, K = sizes
    if beta != 1 and (beta != 0 or K == 0):
        for i in range(M):
            for j in range(N):
                c[i, j] = c[i, j] * beta if beta != 0 else 0
    pairs = (min(DEPTH, K) + 1) // 2
    left = np.empty(((min(HEIGHT, M) + ROWS - 1) // ROWS, pairs, ROWS), np.uint32)
    right = np.empty(((min(WIDTH, N) + COLUMNS - 1) // COLUMNS, pairs, COLUMNS), np.uint32)
    part = np.empty((ROWS, COLUMNS), np.float32)
    for j in range(0, N, WIDTH):
        width = min(WIDTH, N - j)
        for k in range(0, K, DEPTH):
            depth = min(DEPTH, K - k)
            add = k > 0 or beta != 0
            pack(b, not tb, j, width, k, depth, right)
            for i in range(0, M, HEIGHT):
                height = min(HEIGHT, M - i)
                pack(a, ta, i, height, k, depth, left)
                for s in range(0, width, COLUMNS):
                    for r in range(0, height, ROWS):
                        panels = left[r // ROWS], right[s // COLUMNS]
                        if r + ROWS <= height and s + COLUMNS <= width:
                            tile(*panels, (depth + 1) // 2, alpha, add, c, i + r, j + s)
                        else:
                            tile(*panels, (depth + 1) // 2, alpha, False, part, 0, 0)
                            copy(part, c[i + r : i + height, j + s : j + width], add)


@compiled
def copy(x: Any, y: Any, add: Any) -> None:
    """y = x, or y = y + x, in the part that both arrays have."""
    for i in range(min(x.shape[0], y.shape[0])):
        for j in range(min(x.shape[1], y.shape[1])):
            y[i, j] = y[i, j] + x[i, j] if add else x[i, j]


@compiled
def pack(x: Any, pairs_of_rows: Any, first: Any, count: Any, start: Any, depth: Any, panels: Any) -> None:
    """Copy x to panels, in pairs along k, which runs down x if `pairs_of_rows`, and across it otherwise.

    first, count: where the part of x begins along the other axis, and its size. The last panel is filled up with zeros.
    """
    size, pairs = panels.shape[2], depth // 2
    for p in range((count + size - 1) // size):
        at, some = first + p * size, min(size, count - p * size)
        panel = panels[p]
        if some < size:
            panel[: (depth + 1) // 2] = 0
        if pairs_of_rows:
            for k in range(pairs):
                even, odd = x[start + 2 * k, at : at + some], x[start + 2 * k + 1, at : at + some]
                for j in range(some):
                    panel[k, j] = pair(even[j], odd[j])
        else:
            for j in range(some):
                row = x[at + j, start : start + depth]
                for k in range(pairs):
                    panel[k, j] = pair(row[2 * k], row[2 * k + 1])
        if depth % 2:
            for j in range(some):
                panel[pairs, j] = x[start + depth - 1, at + j] if pairs_of_rows else x[at + j, start + depth - 1]


@vectorised
def pair(even: Any, odd: Any) -> Any:
    return np.uint32(even) | np.uint32(np.uint32(odd) << np.uint32(16))


@intrinsic
def tile(typing: Any, a: Any, b: Any, pairs: Any, alpha: Any, add: Any, c: Any, i: Any, j: Any) -> Any:
    """Write α a b, for two panels, to c from row i and column j on; or add it to what c holds there.

    For each pair along k, VECTORS registers hold a row of b, and ROWS · VECTORS instructions use them.
    """
    sums_of, pairs_of = vector_of(types.float32), ir.VectorType(INTEGER, LANES)

    def write(
        context: Any, builder: Any, left: Any, right: Any, stop: Any, factor: Any, more: Any, to: Any, row: Any,
        column: Any,
    ) -> None:  # fmt: skip
        zero = stop.type(0)
        corner, (down, _) = place(context, builder, c, to, (row, column))
        a_start, _ = place(context, builder, a, left, (zero, zero))
        b_start, _ = place(context, builder, b, right, (zero, zero))

        def at(start: Any, offset: Any, kind: Any) -> Any:
            return pointer(builder, builder.add(start, offset), kind)

        kind = ir.FunctionType(sums_of, [sums_of, pairs_of, pairs_of])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        sums = [[cgutils.alloca_once(builder, sums_of) for _ in range(VECTORS)] for _ in range(ROWS)]
        for each in (each for row in sums for each in row):
            builder.store(sums_of(None), each)
        with cgutils.for_range_slice(builder, zero, stop, zero.type(1), zero.type) as (k, _):
            a_row = builder.add(a_start, builder.mul(k, zero.type(4 * ROWS)))
            b_row = builder.add(b_start, builder.mul(k, zero.type(4 * COLUMNS)))
            numbers = [builder.load(at(b_row, zero.type(4 * LANES * v), pairs_of), align=4) for v in range(VECTORS)]
            for r in range(ROWS):
                pair = splat(builder, pairs_of, builder.load(at(a_row, zero.type(4 * r), INTEGER), align=4))
                for each, number in zip(sums[r], numbers, strict=True):
                    builder.store(builder.call(dot, (builder.load(each), pair, number)), each)
        factors = splat(builder, sums_of, factor)
        for r in range(ROWS):
            start = builder.add(corner, builder.mul(down, zero.type(r)))
            for v in range(VECTORS):
                goal = at(start, zero.type(4 * LANES * v), sums_of)
                old = builder.select(more, builder.load(goal, align=4), sums_of(None))
                builder.store(builder.fadd(old, builder.fmul(builder.load(sums[r][v]), factors)), goal, align=4)

    n = types.intp
    return written(types.void(a, b, n, types.float32, types.boolean, c, n, n), write)

"""Compiled twins of `portable`, with the same bits.

No function here lets LLVM make one operation of two, or change their order. Only `product` has fused multiply-adds,
each of which is written as such. Each number of c = a b is one chain, c ← a_ik b_kj + c for k = 0, 1, ..., K − 1, from
c = 0. So its bits depend neither on how the matrices are cut into blocks nor on the size of a vector register. The
blocks are those of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a block of b,
DEPTH × WIDTH, is copied to panels of COLUMNS columns, each of which stays in the first-level cache while HEIGHT rows of
a, in the second, are multiplied by it. The innermost loop keeps ROWS × COLUMNS sums in registers. Where a chain goes on
in the next block, it begins with what c holds.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.arrayobj import make_array, populate_array

from .. import portable
from ..portable import Axes, are_matrices, axes_of, is_float32, is_floating
from .numba_code import compiled
from .numba_vectors import LANES, intrinsic, load, load_first, on_boundary, store, tile, transpose_tile
from .numba_vectors import total as total_of

ROWS, VECTORS = {16: (8, 2), 8: (6, 2), 4: (4, 2)}[LANES]  # the sums of a tile fill at most 12 of 16 registers
COLUMNS = VECTORS * LANES
HEIGHT, WIDTH, DEPTH = 32 * ROWS, 16 * COLUMNS, 256  # of blocks, in numbers
STRIP = 64  # of columns that `fold` adds at a time
NUMBERS = types.Array(types.float32, 4, "A")
exact = partial(compiled, fastmath=())
exp, log, tanh, erf = (
    exact(function, inline=True) for function in (portable.exp32, portable.log32, portable.tanh32, portable.erf32)
)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c = a b, float32, for stacks a (..., M, K) and b (..., K, N) of any strides."""
    if b.ndim == 2 and a.ndim > 2:
        return product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    stack = a.shape[:-2]
    if b.shape[:-2] != stack:
        stack = np.broadcast_shapes(stack, b.shape[:-2])
    c = np.empty((*stack, a.shape[-2], b.shape[-1]), np.float32)
    left, right, to = stacked(a, stack), stacked(b, stack), stacked(c, stack)
    places = address(left), address(right), address(to)
    multiply_stacks(*places, left.shape, right.shape, to.shape, left.strides, right.strides, to.strides)
    return c


portable.product.add_twin(np.ndarray, are_matrices, product, fast=True)


def stacked(x: np.ndarray, stack: tuple[int, ...]) -> np.ndarray:
    """x with exactly two axes before the two of its matrices; each matrix is contiguous along one axis."""
    if x.itemsize not in x.strides[-2:]:
        x = np.ascontiguousarray(x)
    if x.shape[:-2] != stack:
        x = np.broadcast_to(x, stack + x.shape[-2:])
    return x[(None,) * (4 - x.ndim)] if x.ndim <= 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


@exact
def address(x: Any) -> Any:
    return x.ctypes.data


@intrinsic
def array_at(typing: Any, address: Any, shape: Any, strides: Any) -> Any:
    """The float32 array of four axes at an address. So one compiled function serves arrays of all strides."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = make_array(NUMBERS)(context, builder)
        data = builder.inttoptr(args[0], ir.FloatType().as_pointer())
        size = context.get_constant(types.intp, 4)
        populate_array(array, data=data, shape=args[1], strides=args[2], itemsize=size, meminfo=None)
        return array._getvalue()

    four = types.UniTuple(types.intp, 4)
    return NUMBERS(types.intp, four, four), code


@intrinsic
def begin_tile(typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any) -> Any:
    """As `numba_vectors.product`, for a tile of the size here."""
    return tile(c, a, b, ROWS, VECTORS, once=True)


@intrinsic
def continue_tile(typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any) -> Any:
    """As `numba_vectors.add_product`, for a tile of the size here."""
    return tile(c, a, b, ROWS, VECTORS, added=True, once=True)


@intrinsic
def begin_row(typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any) -> Any:
    """The same for a single row."""
    return tile(c, a, b, 1, VECTORS, once=True)


@exact
def multiply_stacks(a, b, c, a_shape, b_shape, c_shape, a_strides, b_strides, c_strides):  # type: ignore[no-untyped-def]
    """c = a b for stacks of matrices with two leading axes."""
    left, right = array_at(a, a_shape, a_strides), array_at(b, b_shape, b_strides)
    result = array_at(c, c_shape, c_strides)
    (P, Q, _, N), K = c_shape, a_shape[3]
    deep, wide = min(DEPTH, K), (min(WIDTH, N) + COLUMNS - 1) // COLUMNS
    panels = on_boundary(np.empty(wide * deep * COLUMNS + LANES, np.float32))[: wide * deep * COLUMNS]
    panels = panels.reshape((wide, deep, COLUMNS))
    edge = np.zeros((ROWS, K + 1), np.float32)[:, :K]
    part = np.empty((ROWS, COLUMNS + 1), np.float32)[:, :COLUMNS]
    for p in range(P):
        for q in range(Q):
            multiply(left[p, q], right[p, q], result[p, q], panels, edge, part)


@exact
def multiply(a: Any, b: Any, c: Any, panels: Any, edge: Any, part: Any) -> None:
    """c = a b, with room for panels of b, for the rows of a that fill no tile, and for a tile at an edge of c."""
    (M, N), K = c.shape, a.shape[1]
    if M < ROWS and N % COLUMNS == 0 and b.strides[1] == b.itemsize:  # a copy of b would take longer than the product
        for i in range(M):
            for j in range(0, N, COLUMNS):
                begin_row(c, i, j, a, i, b, j, 0, K)
        return
    whole = M - M % ROWS
    edge[: M - whole] = a[whole:]
    for j in range(0, N, WIDTH):
        width = min(WIDTH, N - j)
        for k in range(0, K, DEPTH):
            depth = min(DEPTH, K - k)
            pack(b[k : k + depth, j : j + width], panels)
            for i in range(0, M, HEIGHT):
                for s in range(0, width, COLUMNS):
                    panel = panels[s // COLUMNS]
                    for r in range(i, min(i + HEIGHT, M), ROWS):
                        left, top = (a[:, k:], r) if r < whole else (edge[:, k:], 0)
                        rows, columns = min(ROWS, M - r), min(COLUMNS, width - s)
                        inside = rows == ROWS and columns == COLUMNS
                        goal, row, column = (c, r, j + s) if inside else (part, 0, 0)
                        corner = c[r : r + rows, j + s : j + s + columns]
                        if k == 0:
                            begin_tile(goal, row, column, left, top, panel, 0, 0, depth)
                        else:
                            if not inside:
                                part[:rows, :columns] = corner
                            continue_tile(goal, row, column, left, top, panel, 0, 0, depth)
                        if not inside:
                            corner[:] = part[:rows, :columns]
    if K == 0:
        c[:] = 0


@exact
def pack(b: Any, panels: Any) -> None:
    """Copy b to panels of COLUMNS columns; what lies beyond the last column of b is of no importance."""
    K, N = b.shape
    if b.strides[1] == b.itemsize:
        for s in range(0, N, LANES):
            panel, column = panels[s // COLUMNS], s % COLUMNS
            if s + LANES <= N:
                for k in range(K):
                    store(panel, (k, column), load(b, (k, s)))
            else:
                for k in range(K):
                    store(panel, (k, column), load_first(b, (k, s), N - s))
        return
    columns = b.T
    for s in range(0, N, LANES):
        panel, column = panels[s // COLUMNS], s % COLUMNS
        square = K - K % LANES if s + LANES <= N else 0
        for k in range(0, square, LANES):
            transpose_tile(columns, s, k, panel, k, column)
        for j in range(s, min(s + LANES, N)):
            for k in range(square, K):
                panel[k, column + j - s] = columns[j, k]


def total(x: np.ndarray, axis: Axes = None, keepdims: bool = False) -> np.ndarray:
    """As `portable.total`. The axes that are added become one, and so do those before it and those after it."""
    axes = axes_of(x, axis)
    others = [a for a in range(x.ndim) if a not in axes]
    shape = [1 if a in axes else size for a, size in enumerate(x.shape)]
    n = math.prod(x.shape[a] for a in axes)
    first = axes[0] if axes and axes[-1] - axes[0] < len(axes) else 0
    terms = x if first or axes[-1:] == [len(axes) - 1] else x.transpose(*axes, *others)
    before = math.prod(x.shape[:first])
    after = math.prod(shape) // max(before, 1)
    y = np.empty((before, after), x.dtype)
    fold(np.ascontiguousarray(terms).reshape(before, n, after), y)
    return y.reshape(shape if keepdims else [x.shape[a] for a in others])


portable.total.add_twin(np.ndarray, is_floating, total, fast=True)


@exact
def fold(x: Any, y: Any) -> None:
    """y (P, Q) = the sum of x (P, n, Q) over n, in the order of `portable.total`."""
    P, n, Q = x.shape
    h = n // 2
    numbers, rest = x.reshape(-1), n - h
    room = np.zeros(max(rest, 1) * min(Q, STRIP), x.dtype)
    for p in range(P):
        for first in range(0, Q, STRIP):
            at, width, size = p * n * Q + first, min(STRIP, Q - first), rest
            if width == Q:
                add(numbers, at, at + rest * Q, room, 0, h * Q)
            else:
                for i in range(h):
                    add(numbers, at + i * Q, at + (rest + i) * Q, room, i * width, width)
            for j in range(h * width, rest * width):
                room[j] = numbers[at + h * Q + j - h * width]
            collapse(room, size, width)
            for j in range(width):
                y[p, first + j] = room[j]


@partial(exact, inline=True)
def collapse(x: Any, n: Any, width: Any) -> Any:
    """The sum of n rows, each of so many numbers, which replaces the first of them; returns the first number of it."""
    while n > 1 and (width > 1 or n != LANES):
        half = n // 2
        n -= half
        add(x, 0, n * width, x, 0, half * width)
    if n > 1:
        x[0] = total_of(load(x, (0,)))  # in the same order
    return x[0]


@partial(exact, inline=True)
def add(x: Any, i: Any, j: Any, y: Any, k: Any, count: Any) -> None:
    """y[k : k + count] = x[i : i + count] + x[j : j + count]"""
    whole = count - count % LANES
    for at in range(0, whole, LANES):
        store(y, (k + at,), load(x, (i + at,)) + load(x, (j + at,)))
    for at in range(whole, count):
        y[k + at] = x[i + at] + x[j + at]


def elementwise(loop: Any) -> Any:
    """The function of an array that a compiled loop computes."""

    def function(x: np.ndarray) -> np.ndarray:
        y = np.empty(x.shape, np.float32)
        loop(np.ascontiguousarray(x).reshape(-1), y.reshape(-1))
        return y

    return function


# If one function made these loops, they would close over exp, log and the others, and Numba would not cache their code.
@exact
def exp_of(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = exp(x[i])


@exact
def log_of(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = log(x[i])


@exact
def tanh_of(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = tanh(x[i])


@exact
def erf_of(x: Any, y: Any) -> None:
    for i in range(x.size):
        y[i] = erf(x[i])


for operation, loop in zip(
    (portable.exp, portable.log, portable.tanh, portable.erf), (exp_of, log_of, tanh_of, erf_of), strict=True
):
    operation.add_twin(np.ndarray, is_float32, elementwise(loop), fast=True)

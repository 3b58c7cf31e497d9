"""Compiled twins of `portable`, with the same bits, and of the operations that would take most of the time of a step
with `PortableArray`s: for every number the same operations in the same order, in fewer passes over memory.

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
from numba import types
from numba.core.compiler_lock import global_compiler_lock

from .. import ops, portable
from ..ops.activations import sigmoid as sigmoid_of
from ..ops.attention import masked_softmax, stack_groups
from ..ops.layernorm import root_mean_square as root_mean_square_of
from ..ops.patterns import Full, Pattern
from ..ops.relative import RelativeShiftCache
from ..portable import INFINITY, ONE, ZERO, Axes, PortableArray, axes_of, where
from .numba_code import compiled
from .numba_rows import maximum_of_row
from .numba_vectors import LANES, intrinsic, load, on_boundary, store, tile, transpose_tile
from .numba_vectors import total as total_of
from .numpy_relative import shifted

ROWS, VECTORS = {16: (8, 2), 8: (6, 2), 4: (4, 2)}[LANES]  # the sums of a tile fill at most 12 of 16 registers
COLUMNS = VECTORS * LANES
HEIGHT, WIDTH, DEPTH = 32 * ROWS, 16 * COLUMNS, 256  # of blocks, in numbers
MATRICES = types.Array(types.float32, 4, "A", readonly=True)  # of any strides
exact = partial(compiled, fastmath=())
exp, erf = (exact(function, inline=True) for function in (portable.exp32, portable.erf32))


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c = a b, float32, for stacks a (..., M, K) and b (..., K, N) of any strides."""
    if b.ndim == 2 and a.ndim > 2:
        return product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    stack = a.shape[:-2]
    if b.shape[:-2] != stack:
        stack = np.broadcast_shapes(stack, b.shape[:-2])
    c = np.zeros((*stack, a.shape[-2], b.shape[-1]), np.float32)
    multiply_all()(stacked(a, stack), stacked(b, stack), stacked(c, stack))
    return c


def stacked(x: np.ndarray, stack: tuple[int, ...]) -> np.ndarray:
    """x with exactly two axes before the two of its matrices; each matrix is contiguous along one axis."""
    if x.itemsize not in x.strides[-2:]:
        x = np.ascontiguousarray(x)
    if x.shape[:-2] != stack:
        x = np.broadcast_to(x, stack + x.shape[-2:])
    return x[(None,) * (4 - x.ndim)]


def are_matrices(a: Any, b: Any) -> bool:
    fit = 1 < min(a.ndim, b.ndim) <= max(a.ndim, b.ndim) <= 4 and a.shape[-1] == b.shape[-2]
    return a.dtype == b.dtype == np.float32 and fit


portable.product.add_twin(np.ndarray, are_matrices, product, fast=True)


@global_compiler_lock
def multiply_all() -> Any:
    """`multiply_stacks`, compiled once for arrays of all strides."""
    if not multiply_stacks.signatures:
        multiply_stacks.compile((MATRICES, MATRICES, types.float32[:, :, :, ::1]))
        multiply_stacks.disable_compile()
    return multiply_stacks


@intrinsic
def add_product(typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any) -> Any:
    """As `numba_vectors.add_product`, for a tile of the size here."""
    return tile(c, a, b, ROWS, VECTORS, added=True, once=True)


@exact
def multiply_stacks(a: Any, b: Any, c: Any) -> None:
    """Add a b to c for stacks of matrices with two leading axes."""
    (P, Q, _, N), K = c.shape, a.shape[3]
    deep, wide = min(DEPTH, K), (min(WIDTH, N) + COLUMNS - 1) // COLUMNS
    panels = on_boundary(np.empty(wide * deep * COLUMNS + LANES, np.float32))[: wide * deep * COLUMNS]
    panels = panels.reshape((wide, deep, COLUMNS))
    edge = np.zeros((ROWS, K + 1), np.float32)[:, :K]
    part = np.empty((ROWS, COLUMNS + 1), np.float32)[:, :COLUMNS]
    for p in range(P):
        for q in range(Q):
            multiply(a[p, q], b[p, q], c[p, q], panels, edge, part)


@exact
def multiply(a: Any, b: Any, c: Any, panels: Any, edge: Any, part: Any) -> None:
    """Add a b to c, with room for panels of b, for the rows of a that fill no tile, and for a tile at an edge of c."""
    (M, N), K = c.shape, a.shape[1]
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
                        if not inside:
                            part[:rows, :columns] = corner
                        add_product(goal, row, column, left, top, panel, 0, 0, depth)
                        if not inside:
                            corner[:] = part[:rows, :columns]


@exact
def pack(b: Any, panels: Any) -> None:
    """Copy b to panels of COLUMNS columns; what lies beyond the last column of b is of no importance."""
    K, N = b.shape
    for s in range(0, N, LANES):
        panel, column, done = panels[s // COLUMNS], s % COLUMNS, 0
        if s + LANES <= N and b.strides[1] == b.itemsize:
            for k in range(K):
                store(panel, (k, column), load(b, (k, s)))
            done = K
        elif s + LANES <= N:
            for k in range(0, K - LANES + 1, LANES):
                transpose_tile(b.T, s, k, panel, k, column)
            done = K - K % LANES
        for j in range(s, min(s + LANES, N)):
            for k in range(done, K):
                panel[k, column + j - s] = b[k, j]


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


portable.total.add_twin(np.ndarray, lambda x, *_, **__: x.dtype in (np.float32, np.float64), total, fast=True)


@exact
def fold(x: Any, y: Any) -> None:
    """y (P, Q) = the sum of x (P, n, Q) over n, in the order of `portable.total`."""
    P, n, Q = x.shape
    h, numbers = n // 2, x.reshape(-1)
    rest = n - h
    room = np.zeros(max(rest, 1) * Q, x.dtype)
    for p in range(P):
        at = p * n * Q
        add(numbers, at, at + rest * Q, room, 0, h * Q)
        for j in range(h * Q, rest * Q):
            room[j] = numbers[at + j]
        collapse(room, rest, Q)
        for j in range(Q):
            y[p, j] = room[j]


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


def flat(*arrays: np.ndarray) -> list[np.ndarray]:
    """The numbers of each, in one contiguous axis: a view of a contiguous array, otherwise a copy."""
    return [np.ascontiguousarray(x).reshape(-1) for x in arrays]


def rows(*arrays: np.ndarray) -> list[np.ndarray]:
    """Each as a contiguous array of two axes, the last of which is its own."""
    return [np.ascontiguousarray(x).reshape(-1, x.shape[-1]) for x in arrays]


@partial(exact, inline=True)
def sigmoid(x: Any) -> Any:
    e = exp(-abs(x))
    return where(x < ZERO, e, ONE) / (ONE + e)


@exact
def apply(function: Any, x: Any, y: Any) -> None:
    """y = a function of x, number by number."""
    if function == "exp":
        for i in range(x.size):
            y[i] = exp(x[i])
    elif function == "erf":
        for i in range(x.size):
            y[i] = erf(x[i])
    else:
        for i in range(x.size):
            y[i] = sigmoid(x[i])


def pointwise(x: np.ndarray, function: Any) -> np.ndarray:
    y = np.empty(x.shape, np.float32)
    apply(function.__name__, *flat(x, y))
    return y.view(type(x))


def are_float32(*args: Any, arrays: int = 1, **options: Any) -> bool:
    """Whether so many of the arguments are arrays of float32 that are not empty."""
    return len(args) >= arrays and all(x.dtype == np.float32 and x.size for x in args[:arrays])


for function in portable.exp, portable.erf:
    function.add_twin(np.ndarray, are_float32, partial(pointwise, function=function), fast=True)
sigmoid_of.add_twin(PortableArray, are_float32, partial(pointwise, function=sigmoid), fast=True)


# Operations whose forward is the reference, with the functions above; their gradients take the most passes over memory.


def swiglu_backward(dy: np.ndarray, cache: Any) -> list[np.ndarray]:
    gradients = np.empty((2, *dy.shape), np.float32)
    swiglu_gradients(*flat(dy, *cache, *gradients))
    return portable.portable([*gradients])


@exact
def swiglu_gradients(dy: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    for i in range(dy.size):
        s = sigmoid(gate[i])
        dgate[i] = dy[i] * up[i] * (s * (ONE + gate[i] * (ONE - s)))
        dup[i] = dy[i] * (gate[i] * s)


def root_mean_square(x: np.ndarray, eps: float) -> np.ndarray:
    y = np.empty((*x.shape[:-1], 1), np.float32)
    root_mean_squares(*rows(x), np.float32(eps), y.reshape(-1))
    return y.view(PortableArray)


@exact
def root_mean_squares(x: Any, eps: Any, y: Any) -> None:
    """As `ops.layernorm.root_mean_square`, for each row of x (N, C)."""
    N, C = x.shape
    room = np.empty(C, np.float32)
    for n in range(N):
        for c in range(C):
            room[c] = x[n, c] * x[n, c]
        y[n] = np.sqrt(collapse(room, C, 1) / np.float32(C) + eps)


def layernorm_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, ...]:
    x, shift, rstd, gamma = cache
    return *norm_backward(dy, x - x[..., :1] - shift, rstd, gamma, True), dy.sum(tuple(range(dy.ndim - 1)))


def rmsnorm_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, ...]:
    x, rrms, gamma = cache
    return norm_backward(dy, x, rrms, gamma, False)


def norm_backward(
    dy: np.ndarray, centred: np.ndarray, rstd: np.ndarray, gamma: np.ndarray, centre: bool
) -> tuple[np.ndarray, np.ndarray]:
    dx, terms = np.empty((2, *dy.shape), np.float32)
    norm_gradients(*rows(dy, centred), *flat(rstd, gamma), centre, *rows(dx, terms))
    return portable.portable((dx, total(terms, tuple(range(dy.ndim - 1)))))


@exact
def norm_gradients(
    dy: Any, centred: Any, rstd: Any, gamma: Any, centre: Any, dx: Any, terms: Any
) -> None:  # fmt: skip
    """Compute dx, and each row's terms of dγ. centre: whether the norm subtracts the mean of a row."""
    N, C = dy.shape
    g, along, xhat, count = np.empty(C, np.float32), np.empty(C, np.float32), np.empty(C, np.float32), np.float32(C)
    for n in range(N):
        for c in range(C):
            xhat[c] = centred[n, c] * rstd[n]
            terms[n, c] = dy[n, c] * xhat[c]
            dx[n, c] = g[c] = dy[n, c] * gamma[c]
            along[c] = g[c] * xhat[c]
        mean_along = collapse(along, C, 1) / count
        if centre:
            mean = collapse(g, C, 1) / count
            for c in range(C):
                dx[n, c] -= mean
        for c in range(C):
            dx[n, c] = rstd[n] * (dx[n, c] - xhat[c] * mean_along)


def softmax(z: np.ndarray, pattern: Pattern | None) -> np.ndarray:
    _, H, T, S = z.shape
    allowed = (pattern or Full()).table(H, T, S, np)
    seen = np.broadcast_to(True if allowed is None else allowed, z.shape)
    p = np.empty(z.shape, np.float32)
    softmax_rows(*rows(z, seen, p))
    return p.view(PortableArray)


@exact
def softmax_rows(z: Any, seen: Any, p: Any) -> None:
    """p (N, S) = the softmax of each row over those that are seen (N, S), as in `ops.attention`."""
    N, S = z.shape
    room = np.empty(S, np.float32)
    row = room.reshape(1, S)
    for n in range(N):
        some = False
        for s in range(S):
            room[s] = z[n, s] if seen[n, s] else -INFINITY
            some |= seen[n, s]
        top = where(some, maximum_of_row(row, 0) + ZERO, ZERO)
        for s in range(S):
            e = exp(z[n, s] - top)
            p[n, s] = room[s] = e if seen[n, s] else ZERO
        Z = collapse(room, S, 1)
        Z = where(Z == ZERO, ONE, Z)
        for s in range(S):
            p[n, s] /= Z


def attention_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, ...]:
    q, k, v, p = map(np.asarray, cache)
    dy, stacked_q, p = (stack_groups(x, k.shape[1]) for x in (np.asarray(dy), q, p))
    dv, da = score_gradients(dy, v, p, q.shape[-1])
    dq, dk = product(da, k), product(da.swapaxes(2, 3), stacked_q)
    return portable.portable((dq.reshape(q.shape), dk, dv))


def relative_attention_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, ...]:
    q, k, v, r, u, w, p = map(np.asarray, (*cache[:6], cache.probabilities))
    dv, da = score_gradients(np.asarray(dy), v, p, q.shape[-1])
    db = np.zeros((*da.shape[:-1], r.shape[1]), np.float32)
    shifted(db)[...] = da
    dqu, dqw = product(da, k), product(db, r)
    dk = product(da.swapaxes(2, 3), q + u[:, None])
    dr = total(product(db.swapaxes(2, 3), q + w[:, None]), 0)
    return portable.portable((dqu + dqw, dk, dv, dr, total(dqu, (0, 2)), total(dqw, (0, 2))))


def score_gradients(dy: np.ndarray, v: np.ndarray, p: np.ndarray, D: int) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the values v, and of the scores before they are divided by √D; p are the probabilities."""
    dv, da = product(p.swapaxes(2, 3), dy), product(dy, v.swapaxes(2, 3))
    softmax_gradients(*rows(p, da), np.float32(1 / math.sqrt(D)))
    return dv, da


@exact
def softmax_gradients(p: Any, dp: Any, scale: Any) -> None:
    """dp (N, S) = scale times the gradient of the scores whose softmax is p and has the gradient dp."""
    N, S = p.shape
    room = np.empty(S, np.float32)
    for n in range(N):
        for s in range(S):
            room[s] = p[n, s] * dp[n, s]
        mean = collapse(room, S, 1)
        for s in range(S):
            dp[n, s] = p[n, s] * (dp[n, s] - mean) * scale


def relative_shift(x: np.ndarray) -> tuple[np.ndarray, Any]:
    return portable.portable(shifted(x)), RelativeShiftCache(x.shape)


root_mean_square_of.add_twin(PortableArray, are_float32, root_mean_square, fast=True)
masked_softmax.add_twin(PortableArray, are_float32, softmax, fast=True)
ops.relative_shift.add_twin(
    PortableArray, lambda x: x.ndim > 1 and x.shape[-1] >= x.shape[-2] > 0, relative_shift, fast=True
)
for operation, arrays, backward in (
    (ops.swiglu, 2, swiglu_backward),
    (ops.rmsnorm, 2, rmsnorm_backward),
    (ops.layernorm, 3, layernorm_backward),
    (ops.attention, 3, attention_backward),
    (ops.relative_attention, 6, relative_attention_backward),
):
    fits = partial(are_float32, arrays=arrays)
    operation.add_twin(PortableArray, fits, operation.reference, backward, fast=True)

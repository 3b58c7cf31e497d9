"""Attention on a GPU: in half precision by cuDNN's fused kernels, otherwise by products and a softmax.

For a pattern in which each query sees one range of keys (`Pattern.intervals`), the kernels read where the ranges begin
and end; for any other they also read its truth table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array, kept
from ..ops.attention import check_attention
from ..ops.patterns import Causal, Full, Local, Padding, Pattern, from_key
from . import cupy_cudnn
from .cupy_code import alike, contiguous, kernel, real, vector
from .cupy_cudnn import joined
from .cupy_products import available, fits, product
from .numpy_half import add_twin_in_half

PARTS = 4  # into which the queries are cut, at most; for each part only the keys that it may see are read
FEWEST = 128  # queries in a part
REGISTERS = 64  # numbers of a row that a thread has, at most
Part = tuple[int, slice, slice]  # the first query, the rows of the matrices of each group, and the keys


class Table(NamedTuple):
    """What the kernels read of a pattern: query t sees those of the keys begin ... end − 1 that are allowed."""

    begin: Array  # (B, T) or (1, T)
    end: Array
    allowed: Array | None  # (B or 1, H or 1, T, S), boolean; None for all


@kept(64)
def _kept_ranges(key: tuple, T: int, S: int, device: int) -> Table:
    return _ranges(from_key(key), T, S)


def _ranges(pattern: Pattern, T: int, S: int) -> Table:
    ends: Any = pattern.intervals(T, S, cupy)
    size = max(map(len, ends))
    begin, end = (contiguous(cupy.broadcast_to(a, (size, T)).astype(np.int32)) for a in ends)
    return Table(begin, end, None)


def table_of(pattern: Pattern | None, H: int, T: int, S: int) -> Table:
    """The table of a pattern for H heads. A pattern that is a value gets its table once."""
    pattern, allowed = pattern or Full(), None
    if not has_ranges(pattern, T, S):
        allowed = pattern.table(H, T, S, cupy)
        pattern = Full()
    key = pattern.key()
    ranges = _ranges(pattern, T, S) if key is None else _kept_ranges(key, T, S, cupy.cuda.runtime.getDevice())
    if allowed is None:
        return ranges
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    return ranges._replace(allowed=contiguous(cupy.broadcast_to(allowed, (*allowed.shape[:2], T, S))))


def has_ranges(pattern: Pattern, T: int, S: int) -> bool:
    """Whether each query sees one range of keys, the same for all heads."""
    known = Full, Causal, Local, Padding
    return all(type(p) in known or p.intervals(T, S, cupy) is not None for p in joined(pattern))


def parts(pattern: Pattern | None, T: int, S: int, groups: bool) -> Iterator[Part]:
    """The queries in parts of about equal length, each with the keys that some of them may see, as far as this is known
    without looking at values on the GPU. There is one part if that leaves out nothing, or if heads share keys (groups).
    """
    known = [p for p in joined(pattern) if not p.differs and not isinstance(p, Full)]
    count = 1 if groups or not known else min(PARTS, max(1, T // FEWEST))
    for i in range(count):
        rows = slice(i * T // count, (i + 1) * T // count)
        starts, stops = zip((0, S), *(p.span(0, rows, T, S) for p in known), strict=True)
        start = min(max(starts), S - 1)
        yield rows.start, slice(None) if groups else rows, slice(start, max(start + 1, min(stops)))


def accepts(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> bool:
    if not (alike(q, k, v) and available() and q.size and k.size):
        return False
    check_attention(q, k, v, pattern)
    return True


def attention(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> tuple[Array, tuple]:
    """As `ops.attention`, part by part of the queries.

    The scores of a part are computed for the keys that some of its queries see: with `Causal` and 4 parts, for five
    eighths of all pairs. One kernel turns them into p. For half precision they are float32. The backward goes through
    the same parts; dk and dv add up over them.
    """
    (H, T), (G, S) = q.shape[1:3], k.shape[1:3]
    table = table_of(pattern, H, T, S)
    q, k, v = by_heads(q, G == H), by_heads(k), by_heads(v)
    y, done = cupy.empty(q.shape, q.dtype), []
    of_q, of_k, of_v, of_y = (matrices(x, G) for x in (q, k, v, y))
    for part in parts(pattern, T, S, G != H):
        _, rows, keys = part
        p = softmax("softmax", (scores(of_q[:, rows], of_k[:, keys]),), table, part, q)
        product(p, of_v[:, keys], of_y[:, rows])
        done.append((part, p))
    return by_positions(y), (q, k, v, table, done)


def attention_backward(dy: Array, cache: tuple) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, table, done = cache
    G, S = k.shape[1:3]
    dy, dq = by_heads(dy, G == q.shape[1]), cupy.empty(q.shape, q.dtype)
    dk, dv = (cupy.empty(k.shape, real(k.dtype)) for _ in range(2))
    of_q, of_k, of_v, of_dy, of_dq, of_dk, of_dv = (matrices(x, G) for x in (q, k, v, dy, dq, dk, dv))
    written = False
    for part, p in reversed(done):  # with `Causal` the last part has all keys
        _, rows, keys = part
        if not written and keys != slice(0, S):
            dk[...] = dv[...] = 0
            written = True
        product(p.swapaxes(1, 2), of_dy[:, rows], of_dv[:, keys], of_dv[:, keys] if written else None)
        dp = scores(of_dy[:, rows], of_v[:, keys])
        da = softmax("softmax_backward", (dp, p), table, part, q)
        product(da, of_k[:, keys], of_dq[:, rows])
        product(da.swapaxes(1, 2), of_q[:, rows], of_dk[:, keys], of_dk[:, keys] if written else None)
        written = True
    dq, dk, dv = (by_positions(x.astype(k.dtype, copy=False)) for x in (dq, dk, dv))
    return dq, dk, dv


def by_heads(x: Array, alone: bool = True) -> Array:
    """x (B, H, T, D), or a copy of it in memory in this order, for batched products.

    alone: each head is a matrix (T, D) of its own, so these matrices only need to be equally far apart. Otherwise
    several heads are multiplied as one matrix, and the rows of all heads must be equally far apart.
    """
    apart = x.strides[0] == x.shape[1] * x.strides[1] and fits(x)
    return x if x.flags.c_contiguous or (alone and apart) else moved(x, cupy.empty(x.shape, x.dtype))


def by_positions(x: Array) -> Array:
    """x (B, H, T, D), in memory (B, T, H, D): joining the heads then moves nothing."""
    return moved(x, cupy_cudnn.like_heads(x))


def moved(x: Array, y: Array) -> Array:
    """y, after x (B, H, T, D) was copied to it; both may have other strides, but y none between numbers of a head."""
    _, H, T, D = x.shape
    if x.strides[3] != x.itemsize:
        y[...] = x
        return y
    of_x, of_y = ([np.int64(n // x.itemsize) for n in a.strides[:3]] for a in (x, y))
    V = vector(x.dtype, D * x.itemsize, x.data.ptr, *x.strides[:3], *y.strides[:3])
    rows = x.size // D
    run = kernel("attention", "move_heads", x.dtype.name, V=V, PER=1)
    numbers = np.int64(rows), np.int32(H), np.int32(T), np.int32(D)
    run((-(-rows * D // (V * 256)),), (256,), (x, *of_x, y, *of_y, *numbers))
    return y


def matrices(x: Array, G: int) -> Array:
    """(B, H, T, D) -> (B G, H/G T, D), a view: the rows of a group's heads, one head after another."""
    B, H, T, D = x.shape
    return x.reshape(B * G, H // G * T, D)


def scores(x: Array, y: Array) -> Array:
    """x yᵀ, for each matrix; in float32 for half precision."""
    return product(x, y.swapaxes(1, 2), cupy.empty((*x.shape[:2], y.shape[1]), real(x.dtype)))


def softmax(name: str, arrays: tuple[Array, ...], table: Table, part: Part, q: Array) -> Array:
    """Run the kernel `name` of attention.cu on arrays (B G, H/G t, s), for the t queries and s keys of a part. The
    result has the type of q, and overwrites the first array if that has this type. A warp has a row in its registers,
    if it fits.
    """
    (B, H, T, D), s, (first, _, keys) = q.shape, arrays[0].shape[2], part
    out = arrays[0] if arrays[0].dtype == q.dtype else cupy.empty(arrays[0].shape, q.dtype)
    rows, scale = out.size // s, real(q.dtype).type(1 / math.sqrt(D))
    V = min(vector(x.dtype, s * x.itemsize, x.data.ptr) for x in (*arrays, out))
    PER = -(-s // (32 * V))
    PER = PER if PER * V <= REGISTERS else 0
    run = kernel("attention", name, q.dtype.name, V=V, PER=PER, MASKED=int(table.allowed is not None))
    numbers = map(np.int32, (len(table.begin) == 1, H, rows // (B * H), T, first, keys.start, s))
    mask: tuple = ()
    if table.allowed is not None:
        of_B, of_H, _, S = table.allowed.shape
        rows_apart = T * of_H if of_B > 1 else 0, T if of_H > 1 else 0
        mask = table.allowed, *map(np.int64, (*rows_apart, S))
    run((-(-rows // 8),), (256,), (*arrays, out, table.begin, table.end, np.int64(rows), *numbers, scale, *mask))
    return out


add_twin_in_half(ops.attention, ops.attention_backward, cupy.ndarray, fast=True)
ops.attention.add_twin(cupy.ndarray, accepts, attention, attention_backward, fast=True)
ops.attention.add_twin(cupy.ndarray, cupy_cudnn.fits, cupy_cudnn.attention, cupy_cudnn.attention_backward, fast=True)

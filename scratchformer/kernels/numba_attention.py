"""Attention in compiled code."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from .. import ops
from ..ops.attention import check_attention
from ..ops.patterns import Full, Pattern
from .numba_vectors import (
    LANES,
    ROWS,
    add_product,
    exp2,
    filled,
    larger,
    largest,
    load,
    product,
    store,
    total,
    vectorised,
)
from .numpy_attention import attention as numpy_attention
from .numpy_attention import heads_inside

TILE = 64
LOG2E = np.log2(np.e)


@vectorised
def up(n, to):
    return (n + to - 1) // to * to


@vectorised
def pack(x, b, h, t, to, r, factor):
    D = x.shape[3]
    for d in range(0, D // LANES * LANES, LANES):
        store(to, (r, d), load(x, (b, h, t, d)) * factor)


@vectorised
def unpack(a, r, x, b, h, t, factor):
    D = x.shape[3]
    for d in range(0, D // LANES * LANES, LANES):
        store(x, (b, h, t, d), load(a, (r, d)) * factor)


@vectorised
def transpose(x, to, S):
    for s in range(S):
        for d in range(x.shape[1]):
            to[d, s] = x[s, d]


@vectorised
def pack_all(x, b, h, to):
    for s in range(x.shape[2]):
        pack(x, b, h, s, to, s, 1.0)


@vectorised
def fill(z, r, start, stop, value):
    for s in range(start, stop):
        z[r, s] = value


@vectorised
def make_finite(x, s):
    for d in range(x.shape[1]):
        if x[s, d] - x[s, d] != 0:
            x[s, d] = 0


@vectorised
def row_largest(z, r, left, right):
    m = filled(z, -np.inf)
    for s in range(left, right, LANES):
        m = larger(m, load(z, (r, s)))
    return largest(m)


@vectorised
def row_exp(z, r, left, right, m):
    l = filled(z, 0)
    for s in range(left, right, LANES):
        e = exp2(load(z, (r, s)) - m)
        store(z, (r, s), e)
        l = l + e
    return total(l)


@vectorised
def row_dz(e, dz, r, left, right, m, delta):
    for s in range(left, right, LANES):
        p = exp2(load(e, (r, s)) - m)
        store(e, (r, s), p)
        store(dz, (r, s), p * (load(dz, (r, s)) - delta))


@vectorised
def forward(q, k, v, begin, end, scale, y, top, inverse):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    long = up(S, LANES) + LANES
    keys = np.zeros((D, long), top.dtype)
    values = np.zeros((S, D), top.dtype)
    queries = np.zeros((ROWS, D), top.dtype)
    z = np.zeros((ROWS, long), top.dtype)
    sums = np.zeros((ROWS, D), top.dtype)
    for b in range(B):
        bb = b % begin.shape[0]
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                pack_all(k, b, g, values)
                transpose(values, keys, S)
                pack_all(v, b, g, values)
            for t in range(0, T, ROWS):
                rows = min(ROWS, T - t)
                lo, hi = S, 0
                for r in range(rows):
                    pack(q, b, h, t + r, queries, r, scale)
                    if begin[bb, t + r] < end[bb, t + r]:
                        lo, hi = min(lo, begin[bb, t + r]), max(hi, end[bb, t + r])
                left, right = lo // LANES * LANES, up(hi, LANES)
                for j in range(left, right, LANES):
                    product(z, 0, j, queries, 0, keys, j, 0, D)
                for r in range(rows):
                    x0, x1 = begin[bb, t + r], end[bb, t + r]
                    fill(z, r, left, x0, -np.inf)
                    fill(z, r, x1, right, -np.inf)
                    m = row_largest(z, r, left, right) if x0 < x1 else top.dtype.type(0)
                    l = row_exp(z, r, left, right, m)
                    top[b, h, t + r] = m
                    inverse[b, h, t + r] = 1 / l if x0 < x1 else 0
                for d in range(0, D, LANES):
                    product(sums, 0, d, z, 0, values, d, lo, hi)
                for r in range(rows):
                    unpack(sums, r, y, b, h, t + r, inverse[b, h, t + r])


@vectorised
def backward(dy, q, k, v, y, begin, end, scale, top, inverse, dq, dk, dv):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    long = up(S, TILE) + LANES
    keysT = np.zeros((D, long), top.dtype)
    valuesT = np.zeros((D, long), top.dtype)
    keys = np.zeros((up(S, TILE), D), top.dtype)
    queries = np.zeros((TILE, D), top.dtype)
    output = np.zeros((TILE, D), top.dtype)
    delta = np.zeros(TILE, top.dtype)
    e = np.zeros((TILE, TILE + LANES), top.dtype)
    dz = np.zeros((TILE, TILE + LANES), top.dtype)
    eT, dzT = e.T, dz.T
    sum_dq = np.zeros((TILE, D), top.dtype)
    sum_dk = np.zeros((long, D), top.dtype)
    sum_dv = np.zeros((long, D), top.dtype)
    ln2 = 1 / LOG2E
    for b in range(B):
        bb = b % begin.shape[0]
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                pack_all(v, b, g, keys)
                transpose(keys, valuesT, S)
                pack_all(k, b, g, keys)
                transpose(keys, keysT, S)
                for s in range(S):
                    make_finite(keys, s)
                for s in range(long):
                    fill(sum_dk, s, 0, D, 0)
                    fill(sum_dv, s, 0, D, 0)
            for t in range(0, T, TILE):
                height = min(TILE, T - t)
                lo, hi = S, 0
                for r in range(height):
                    pack(q, b, h, t + r, queries, r, scale)
                    pack(dy, b, h, t + r, output, r, inverse[b, h, t + r])
                    fill(sum_dq, r, 0, D, 0)
                    dl = filled(sum_dq, 0)
                    for d in range(0, D, LANES):
                        dl = dl + load(output, (r, d)) * load(y, (b, h, t + r, d))
                    delta[r] = total(dl)
                    if begin[bb, t + r] < end[bb, t + r]:
                        lo, hi = min(lo, begin[bb, t + r]), max(hi, end[bb, t + r])
                for s in range(lo // TILE * TILE, hi, TILE):
                    k_tile = keys[s : s + TILE]
                    width = min(TILE, S - s)
                    for i in range(0, height, ROWS):
                        rows = min(ROWS, height - i)
                        left, right = TILE, 0
                        for r in range(i, i + rows):
                            x0, x1 = max(begin[bb, t + r] - s, 0), min(end[bb, t + r] - s, TILE)
                            if x0 < x1:
                                left, right = min(left, x0), max(right, x1)
                        a, z = left // LANES * LANES, up(right, LANES)
                        for j in range(a, z, LANES):
                            product(e, i, j, queries, i, keysT, s + j, 0, D)
                            product(dz, i, j, output, i, valuesT, s + j, 0, D)
                        for r in range(i, i + rows):
                            x0, x1 = max(begin[bb, t + r] - s, 0), min(end[bb, t + r] - s, TILE)
                            if x1 <= x0:
                                x0 = x1 = TILE
                            row_dz(e, dz, r, a, z, top[b, h, t + r], delta[r])
                            fill(e, r, 0, x0, 0)
                            fill(dz, r, 0, x0, 0)
                            fill(e, r, x1, TILE, 0)
                            fill(dz, r, x1, TILE, 0)
                        for d in range(0, D, LANES):
                            add_product(sum_dq, i, d, dz, i, k_tile, d, left, right)
                    for j in range(0, width, ROWS):
                        t0, t1 = height, 0
                        for r in range(height):
                            if (
                                begin[bb, t + r] < s + j + ROWS
                                and end[bb, t + r] > s + j
                                and begin[bb, t + r] < end[bb, t + r]
                            ):
                                t0, t1 = min(t0, r), max(t1, r + 1)
                        for d in range(0, D, LANES):
                            add_product(sum_dv, s + j, d, eT, j, output, d, t0, t1)
                            add_product(sum_dk, s + j, d, dzT, j, queries, d, t0, t1)
                for r in range(height):
                    unpack(sum_dq, r, dq, b, h, t + r, scale * ln2)
            if (h + 1) * G % H == 0:
                for s in range(S):
                    unpack(sum_dk, s, dk, b, g, s, ln2)
                    unpack(sum_dv, s, dv, b, g, s, 1.0)


class CompiledAttentionCache(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    y: np.ndarray
    maximum: np.ndarray
    inverse: np.ndarray
    begin: np.ndarray
    end: np.ndarray


@functools.cache
def compiled_for(function: Any, bits: np.dtype, arrays: int) -> Any:
    """The code of forward or backward for arrays of this dtype, with any strides."""
    wide = types.float64 if bits == np.float64 else types.float32
    x, rows, keys = (
        types.Array(numba.from_dtype(bits), 4, "A"),
        types.Array(wide, 3, "C"),
        types.Array(types.intp, 2, "C"),
    )
    before, after = ((x,) * 3, (x, rows, rows)) if function is forward else ((x,) * 5, (rows, rows, x, x, x))
    return function.compile(types.void(*before, keys, keys, wide, *after))


BITS: dict[str, Any] = {"bfloat16": np.uint16, "float16": np.int16}


def as_bits(x: np.ndarray) -> np.ndarray:
    return x.view(BITS.get(x.dtype.name, x.dtype))


def ready(x: np.ndarray) -> np.ndarray:
    """x with vectors of whole registers, contiguous in memory: x itself where possible."""
    D = x.shape[-1]
    if D % LANES == 0 and x.strides[-1] == x.itemsize:
        return as_bits(x)
    wider = np.zeros((*x.shape[:-1], -(-D // LANES) * LANES), x.dtype)
    wider[..., :D] = x
    return as_bits(wider)


def intervals(pattern, T, S):
    found = pattern.intervals(T, S, np)
    return (
        None
        if found is None
        else tuple(np.ascontiguousarray(np.broadcast_to(x, (x.shape[0], T)), np.intp) for x in found)
    )


DTYPES = {"float32", "float64", "bfloat16", "float16"}


@ops.attention.twin(np.ndarray, fast=True)
def attention(q, k, v, pattern=None):
    dtypes = {x.dtype for x in (q, k, v) if type(x) is np.ndarray}
    if len(dtypes) != 1 or q.dtype.name not in DTYPES or q.ndim != 4 or q.shape[2] == 1:
        return numpy_attention(q, k, v, pattern)
    check_attention(q, k, v, pattern)
    B, H, T, D = q.shape
    S = k.shape[2]
    found = intervals(pattern or Full(), T, S)
    if found is None:
        return numpy_attention(q, k, v, pattern)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    y = heads_inside((B, H, T, -(-D // LANES) * LANES), q.dtype)
    maximum, inverse = np.empty((2, B, H, T), wide)
    arguments = tuple(map(ready, (q, k, v)))
    compiled_for(forward, arguments[0].dtype, 0)(
        *arguments, *found, wide(LOG2E / math.sqrt(D)), as_bits(y), maximum, inverse
    )
    y = y[..., :D]
    return y, CompiledAttentionCache(q, k, v, y, maximum, inverse, *found)


@ops.attention_backward.twin(CompiledAttentionCache)
def attention_backward(dy, cache):
    q, k, v, y, maximum, inverse, begin, end = cache
    ops.checks.expect_like("dy", dy, q.shape)
    D = q.shape[-1]
    dq, dk, dv = (heads_inside((*x.shape[:-1], -(-D // LANES) * LANES), x.dtype) for x in (q, k, v))
    dy = dy.astype(q.dtype, copy=False)
    arguments = tuple(map(ready, (dy, q, k, v, y)))
    compiled_for(backward, arguments[0].dtype, 0)(
        *arguments, begin, end, maximum.dtype.type(LOG2E / math.sqrt(D)), maximum, inverse, *map(as_bits, (dq, dk, dv))
    )
    return dq[..., :D], dk[..., :D], dv[..., :D]

"""Attention in compiled code: tiles of scores that stay in a core's nearest cache, for every pattern of intervals.

Arrays are read and written where they lie, with any strides between heads and positions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np
from numba import types

from .. import ops
from ..ops.attention import check_attention
from ..ops.patterns import Full, Pattern
from . import numba_amx
from .numba_amx import dot
from .numba_rows import aligned, fill, span, up, write_row
from .numba_vectors import (
    COLUMNS,
    LANES,
    ROWS,
    TALL,
    VECTORS,
    add_narrow_product,
    add_product,
    exp2,
    filled,
    larger,
    load,
    product,
    store,
    transpose_tile,
    vectorised,
    where_inside,
)
from .numpy_attention import accepted, heads_inside

QUERIES, KEYS = 64, 64  # of a tile: multiples of COLUMNS and TALL
LN2 = math.log(2)
DTYPES: dict[str, Any] = {  # by the letter of a dtype, what compiled code takes
    "f": np.float32,
    "d": np.float64,
    "E": np.uint16,  # the bits of bfloat16
}


def fits(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None = None) -> bool:
    """The pattern must give each query an interval of keys."""
    alike = {(type(x), getattr(x, "dtype", None)) for x in (q, k, v)} == {(np.ndarray, q.dtype)}
    if not alike or not q.dtype.isnative or q.dtype.char not in DTYPES or q.shape[2:3] == (1,):
        return False
    return accepted(check_attention, q, k, v, pattern) and intervals(q, k, pattern) is not None


def intervals(q: np.ndarray, k: np.ndarray, pattern: Pattern | None) -> Any:
    return (pattern or Full()).intervals(q.shape[2], k.shape[2], np)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None = None) -> tuple[np.ndarray, Any]:
    """As `ops.attention`, in memory linear in T + S, for patterns by which each query sees an interval of keys.

    Forward, for each sequence and query head h, as in `attention`, with g the key head of h:

        z_hts = 1/√D Σ_d q_htd k_gsd with g = ⌊h G/H⌋
        p_hts = softmax_{s, begin_t ≤ s < end_t}(z_hts) where begin_t ≤ s < end_t, 0 elsewhere
        y_htd = Σ_s p_hts v_gsd with g = ⌊h G/H⌋

    A power of 2 is cheap, since half of it is an exponent's bits. So the scores are computed in units of log 2. The
    factor goes into the queries, together with 1/√D. Any number m_ht may be subtracted from the scores of a row:

        u_htd = q_htd/(√D log(2))
        a_hts = Σ_d u_htd k_gsd with g = ⌊h G/H⌋
        m := shift
        e_hts = exp(log(2) (a_hts − m_ht)) where begin_t ≤ s < end_t, 0 elsewhere
        r_ht := 1/Σ_s e_hts        inverse_ht = r_ht
        y_htd = r_ht Σ_s e_hts v_gsd with g = ⌊h G/H⌋

    The only purpose of m is to keep e in range. It is the largest score of a row in the tiles so far. When a tile has a
    larger one, m′, the sums so far are multiplied by 2^(m − m′), since 2^(a − m) 2^(m − m′) = 2^(a − m′).

    A block of COLUMNS queries and a tile of keys are done at a time. A vector holds the scores of LANES queries with
    one key, so that the sums over s add vectors, and never the numbers within one. The backward computes a again, with
    the same rounding, and only then subtracts m: large scores have few digits, and sums that begin at −m have others.

    Backward. p = e r, and the factor r can go into dy, once for each row. The last sum of dz is known before the first
    tile, as in the NumPy twin:

        dp_hts = Σ_d dy_htd v_gsd with g = ⌊h G/H⌋
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')
        p_hts = e_hts r_ht        w_htd = dy_htd r_ht
        δ_ht := Σ_d w_htd y_htd = r_ht Σ_s p_hts dp_hts
        dz_hts = e_hts (Σ_d w_htd v_gsd − δ_ht) with g = ⌊h G/H⌋

    The sums over s and over t run over J tiles of W keys and I tiles of W queries, in any order:

        dq_htd = 1/√D Σ_j Σ_{s, ⌊s/W⌋ = j} dz_hts k_gsd with g = ⌊h G/H⌋
        dk_gsd = log(2) Σ_{h, ⌊h G/H⌋ = g} Σ_i Σ_{t, ⌊t/W⌋ = i} dz_hts u_htd
        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_i Σ_{t, ⌊t/W⌋ = i} e_hts w_htd

    The loops `forward` and `backward` have these equations as comments. Then

        return dq, dk, dv

    Intervals. The pattern's `intervals` are begin and end. Tiles in which no query sees a key are skipped. In the
    others, the scores of keys that a query does not see are overwritten with −∞.

    bfloat16 is widened to float32 on the way into a tile, and y, dq, dk and dv are rounded on the way out. On
    processors with AMX, `numba_amx` takes bfloat16 arrays if T and S are multiples of 32, or at least 128. It also
    rounds p and dz to bfloat16.
    The cache keeps q, k, v and y (which a caller must not change before backward), and two numbers for each row.
    Source: Dao et al., "FlashAttention", 2022, algorithms 1 and 4, appendix B; Milakov, Gimelshein, "Online normalizer
    calculation for softmax", 2018.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    begin, end = (np.array(x, np.intp) for x in intervals(q, k, pattern))
    rows = max(len(begin), len(end)), T
    begin, end = (np.ascontiguousarray(np.broadcast_to(x, rows)).clip(0, S) for x in (begin, end))
    amx = numba_amx.fits(q, k)
    more, dtype = -T % numba_amx.BLOCK if amx else 0, np.float64 if q.dtype == np.float64 else np.float32
    shift, inverse = np.empty((2, B, H, T + more), dtype)
    (y,) = run(numba_amx.forward if amx else forward, amx, (q, k, v), (begin, end), (shift, inverse), (q,))
    return y, (q, k, v, y, shift, inverse, begin, end, amx)


def attention_backward(dy: np.ndarray, cache: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, y, shift, inverse, begin, end, amx = cache
    loops = numba_amx.backward if amx else backward
    dq, dk, dv = run(loops, amx, (dy, q, k, v, y), (begin, end), (shift, inverse), (q, k, v))
    return dq, dk, dv


ops.attention.add_twin(np.ndarray, fits, attention, attention_backward, fast=True)


def run(loops: Any, amx: bool, arrays: tuple, seen: tuple, statistics: tuple, like: tuple) -> list[np.ndarray]:
    """Call the loops, of this module or of `numba_amx`. Returns results with the shapes and the dtype of `like`."""
    dtype, D = like[0].dtype, like[0].shape[3]
    taken, height = np.dtype(DTYPES[dtype.char]), numba_amx.BLOCK if amx else 1
    results = [heads_inside(whole_shape(x, height), dtype) for x in like]
    code = compiled_for(loops, taken, len(arrays), len(results))
    rows = *map(filled_up, seen), 1 / (math.sqrt(D) * LN2)
    inputs = (whole(x, height).view(taken) for x in arrays)
    code(*inputs, *rows, *statistics, *(x.view(taken) for x in results))
    return [x[:, :, : of.shape[2], :D] for x, of in zip(results, like, strict=True)]


def filled_up(x: np.ndarray) -> np.ndarray:
    """begin or end (..., T), filled up to whole blocks with queries that see nothing."""
    more = -x.shape[1] % numba_amx.BLOCK
    return np.pad(x, ((0, 0), (0, more))) if more else x


def whole_shape(x: np.ndarray, height: int) -> tuple[int, ...]:
    """The shape of x with whole vectors and a multiple of `height` rows."""
    B, H, T, D = x.shape
    return B, H, T + -T % height, D + -D % LANES


def whole(x: np.ndarray, height: int) -> np.ndarray:
    """x itself, or a copy of this shape with contiguous rows, filled up with zeros."""
    _, _, T, D = x.shape
    if not (T % height or D % LANES) and x.strides[3] == x.itemsize:
        return x
    wider = np.zeros(whole_shape(x, height), x.dtype)
    wider[:, :, :T, :D] = x
    return wider


@functools.cache
def compiled_for(loops: Any, taken: Any, arrays: int, results: int) -> Any:
    """The code for arrays of one type with any strides. (Numba itself would compile again for contiguous arrays.)"""
    number = types.float64 if taken == np.float64 else types.float32
    x, keys = types.Array(numba.from_dtype(taken), 4, "A"), types.Array(types.intp, 2, "A")
    row = types.Array(number, 3, "A")
    return loops.compile(types.void(*[x] * arrays, keys, keys, number, row, row, *[x] * results))


@vectorised
def forward(q: Any, k: Any, v: Any, begin: Any, end: Any, scale: Any, shift: Any, inverse: Any, y: Any) -> None:
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    long = up(S, KEYS) + LANES  # rows of a length that is no power of 2 do not compete for places in the cache
    keys, values = aligned(D, long, shift), aligned(long, D, shift)
    query_rows, queries = aligned(COLUMNS, D, shift), aligned(D, COLUMNS, shift)
    e, sums = aligned(KEYS, COLUMNS, shift), aligned(COLUMNS, D, shift)
    lowest = np.finfo(shift.dtype).min
    m, l, factor = np.zeros(COLUMNS, shift.dtype), np.zeros(COLUMNS, shift.dtype), np.zeros(COLUMNS, shift.dtype)
    for b in range(B):
        pattern = min(b, len(begin) - 1)
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:  # the first head that uses these keys
                read_rows(k[b, g], values)
                transpose(values, keys)
                read_rows(v[b, g], values)
            for t in range(0, T, COLUMNS):
                height = min(COLUMNS, T - t)
                # u_htd = q_htd/(√D log(2))
                for i in range(height):
                    read_row(q, b, h, t + i, query_rows, i, scale)
                transpose(query_rows, queries)
                first, last, _, _ = interval(begin, end, pattern, t, 0, S)
                m[:], l[:] = lowest, 0
                clear(sums)
                for s in range(first // KEYS * KEYS, last, KEYS):
                    # a_hts = Σ_d u_htd k_gsd with g = ⌊h G/H⌋
                    top, bottom = scores(e, keys, queries, 0, begin, end, pattern, t, s)
                    # e_hts = exp(log(2) (a_hts − m_ht)) where begin_t ≤ s < end_t, 0 elsewhere
                    # r_ht := 1/Σ_s e_hts
                    for i in range(0, COLUMNS, LANES):
                        before = load(m, (i,))
                        now = largest_of_columns(e, i, top, bottom, before)
                        store(m, (i,), now)
                        store(factor, (i,), exp2(before - now))
                        store(l, (i,), load(l, (i,)) * load(factor, (i,)) + exponentials(e, i, top, bottom, now))
                    # y_htd = r_ht Σ_s e_hts v_gsd with g = ⌊h G/H⌋
                    for d in range(0, D, LANES):
                        for i in range(COLUMNS):
                            store(sums, (i, d), load(sums, (i, d)) * factor[i])
                    for i in range(0, COLUMNS, TALL):
                        add_rows(sums, i, e.T, i, values[s:], top, min(bottom, last - s))
                for i in range(height):
                    seen = begin[pattern, t + i] < end[pattern, t + i]
                    shift[b, h, t + i] = m[i] if seen else 0
                    inverse[b, h, t + i] = 1 / l[i] if seen else 0
                    write_row(sums, i, inverse[b, h, t + i], y, b, h, t + i)


@vectorised
def scores(e: Any, keys: Any, queries: Any, i: Any, begin: Any, end: Any, pattern: Any, t: Any, s: Any) -> Any:
    """Write a to e, or −∞ where a query does not see a key. Forward and backward get the same numbers, bit for bit.

    The rows of e are KEYS keys from s on. Its columns are COLUMNS queries from t on, which `queries` has from i on.
    Returns the first row that was written and the one after the last.
    """
    first, last, start, stop = interval(begin, end, pattern, t, s, KEYS)
    top, bottom = first // TALL * TALL, up(last, TALL)
    for x in range(top, bottom, ROWS):
        product(e, x, 0, keys.T, s + x, queries, i, 0, len(keys))
    hide(e, top, bottom, start, stop, begin, end, pattern, t, s)
    return top, bottom


@vectorised
def backward(
    dy: Any, q: Any, k: Any, v: Any, y: Any, begin: Any, end: Any, scale: Any, shift: Any, inverse: Any,
    dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    long = up(S, KEYS) + LANES
    keys, values = aligned(D, long, shift), aligned(D, long, shift)
    key_rows = aligned(long, D, shift)
    sum_dk, sum_dv = aligned(long, D, shift), aligned(long, D, shift)
    query_rows, output_rows = aligned(QUERIES, D, shift), aligned(QUERIES, D, shift)
    queries, outputs = aligned(D, QUERIES + LANES, shift), aligned(D, QUERIES + LANES, shift)
    sum_dq = aligned(QUERIES, D, shift)
    m, delta = np.zeros(QUERIES, shift.dtype), np.zeros(QUERIES, shift.dtype)
    e, dz = aligned(KEYS, COLUMNS, shift), aligned(KEYS, COLUMNS, shift)
    for b in range(B):
        pattern = min(b, len(begin) - 1)
        for h in range(H):
            g = h * G // H
            if h * G % H == 0:
                read_rows(v[b, g], key_rows)
                transpose(key_rows, values)
                read_rows(k[b, g], key_rows)
                transpose(key_rows, keys)
                clear(sum_dk)
                clear(sum_dv)
            for t in range(0, T, QUERIES):
                height = min(QUERIES, T - t)
                clear(sum_dq)
                if height < QUERIES:
                    clear(query_rows)
                    clear(output_rows)
                for i in range(height):
                    # u_htd = q_htd/(√D log(2))
                    read_row(q, b, h, t + i, query_rows, i, scale)
                    # w_htd = dy_htd r_ht
                    read_row(dy, b, h, t + i, output_rows, i, inverse[b, h, t + i])
                    # δ_ht := Σ_d w_htd y_htd
                    delta[i] = dot(output_rows[i], y[b, h, t + i])
                    m[i] = shift[b, h, t + i]
                transpose(query_rows, queries)
                transpose(output_rows, outputs)
                first, last = span(begin, end, pattern, t, height, 0, S)
                for s in range(first // KEYS * KEYS, last, KEYS):
                    for i in range(0, height, COLUMNS):
                        # a_hts = Σ_d u_htd k_gsd with g = ⌊h G/H⌋
                        # dz_hts = e_hts (Σ_d w_htd v_gsd − δ_ht) with g = ⌊h G/H⌋
                        top, bottom = scores(e, keys, queries, i, begin, end, pattern, t + i, s)
                        for x in range(top, bottom, ROWS):
                            product(dz, x, 0, values.T, s + x, outputs, i, 0, D)
                        for j in range(0, COLUMNS, LANES):
                            scores_to_gradients(e, dz, j, top, bottom, load(m, (i + j,)), load(delta, (i + j,)))
                        # dq_htd = 1/√D Σ_j Σ_{s, ⌊s/W⌋ = j} dz_hts k_gsd with g = ⌊h G/H⌋
                        for r in range(0, COLUMNS, TALL):
                            add_rows(sum_dq, i + r, dz.T, r, key_rows[s:], top, bottom)
                        # dk_gsd = log(2) Σ_{h, ⌊h G/H⌋ = g} Σ_i Σ_{t, ⌊t/W⌋ = i} dz_hts u_htd
                        # dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_i Σ_{t, ⌊t/W⌋ = i} e_hts w_htd
                        for x in range(top, bottom, TALL):
                            add_rows(sum_dk, s + x, dz, x, query_rows[i:], 0, COLUMNS)
                            add_rows(sum_dv, s + x, e, x, output_rows[i:], 0, COLUMNS)
                for i in range(height):
                    write_row(sum_dq, i, scale * LN2, dq, b, h, t + i)
            if (h + 1) * G % H == 0:  # the last head that uses these keys
                for s in range(S):
                    write_row(sum_dk, s, LN2, dk, b, g, s)
                    write_row(sum_dv, s, 1.0, dv, b, g, s)


@vectorised
def add_rows(c: Any, i: Any, a: Any, r: Any, b: Any, start: Any, stop: Any) -> None:
    """As `add_product`, for TALL rows of c from row i on, and all of its columns."""
    D = c.shape[1]
    for d in range(0, D - D % COLUMNS, COLUMNS):
        for x in range(0, TALL, ROWS):
            add_product(c, i + x, d, a, r + x, b, d, start, stop)
    if VECTORS > 1 and D % COLUMNS:
        add_narrow_product(c, i, D - LANES, a, r, b, D - LANES, start, stop)


@vectorised
def interval(begin: Any, end: Any, pattern: Any, t: Any, s: Any, width: Any) -> Any:
    """Of the keys s ... s + width − 1, counted from s: the first that one of COLUMNS queries from t on sees, and the
    one after the last; then the same for the keys that all of them see.
    """
    first, last, start, stop = width, 0, 0, width
    for i in range(t, t + COLUMNS):
        one, other = max(begin[pattern, i] - s, 0), min(end[pattern, i] - s, width)
        start, stop = max(start, one), min(stop, other)
        first, last = min(first, one if one < other else width), max(last, other if one < other else 0)
    return first, last, start, max(start, stop)


@vectorised
def hide(
    x: Any, top: Any, bottom: Any, start: Any, stop: Any, begin: Any, end: Any, pattern: Any, t: Any, s: Any
) -> None:  # fmt: skip
    """Write −∞ where COLUMNS queries from t on, columns of x, do not see the keys from s + top to before s + bottom.

    All of them see the keys from s + start to before s + stop.
    """
    for first, last in (top, min(start, bottom)), (max(stop, top), bottom):
        for r in range(first, last):
            for i in range(0, COLUMNS, LANES):
                store(x, (r, i), where_inside(begin, end, (pattern, t + i), s + r, load(x, (r, i)), -np.inf))


@vectorised
def read_row(x: Any, b: Any, h: Any, t: Any, to: Any, i: Any, factor: Any) -> None:
    for d in range(0, x.shape[3], LANES):
        store(to, (i, d), load(x, (b, h, t, d)) * factor)


@vectorised
def read_rows(x: Any, to: Any) -> None:
    for i in range(x.shape[0]):
        for d in range(0, x.shape[1], LANES):
            store(to, (i, d), load(x, (i, d)))


@vectorised
def transpose(x: Any, to: Any) -> None:
    for s in range(0, x.shape[0], LANES):
        for d in range(0, x.shape[1], LANES):
            transpose_tile(x, s, d, to, d, s)


@vectorised
def clear(x: Any) -> None:
    for i in range(x.shape[0]):
        fill(x, i, 0, x.shape[1], 0)


@vectorised
def largest_of_columns(a: Any, i: Any, top: Any, bottom: Any, before: Any) -> Any:
    """The largest number of each of LANES columns, and of `before`."""
    m, n = before, before
    for s in range(top, bottom, 2):
        m, n = larger(m, load(a, (s, i))), larger(n, load(a, (s + 1, i)))
    return larger(m, n)


@vectorised
def exponentials(a: Any, i: Any, top: Any, bottom: Any, m: Any) -> Any:
    """Replace the scores in LANES columns by e, and return their sums."""
    terms = filled(a, 0.0)
    for s in range(top, bottom):
        e = exp2(load(a, (s, i)) - m)
        store(a, (s, i), e)
        terms = terms + e
    return terms


@vectorised
def scores_to_gradients(e: Any, dz: Any, i: Any, top: Any, bottom: Any, m: Any, delta: Any) -> None:
    """Replace the scores in e by e, and the products of w and v in dz by dz, in LANES columns."""
    for s in range(top, bottom):
        one = exp2(load(e, (s, i)) - m)
        store(e, (s, i), one)
        store(dz, (s, i), one * (load(dz, (s, i)) - delta))

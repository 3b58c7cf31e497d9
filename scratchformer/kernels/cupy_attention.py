"""Attention on a GPU: in half precision by cuDNN's fused kernels, otherwise by products and a softmax of our own.

These twins handle patterns in which each query sees one range of keys (`Pattern.intervals`); the reference handles the
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import ops
from ..backend import Array, array_module, kept
from ..ops.attention import check_attention
from ..ops.checks import expect_like
from ..ops.patterns import Both, Full, Pattern, from_key
from . import cupy_cudnn
from .cupy_code import alike, contiguous, kernel, real, vector
from .cupy_half import in_half
from .cupy_products import available, fits, product

PARTS = 4  # into which the queries are cut, at most; for each part only the keys that it may see are read
FEWEST = 128  # queries in a part
LONG = {"softmax": "softmax_of_long_rows", "softmax_backward": "softmax_backward_of_long_rows"}
plain = in_half(ops.attention, ops.attention_backward)


class CudaAttentionCache(NamedTuple):
    q: Array  # (B, H, T, D)
    k: Array  # (B, G, S, D)
    v: Array  # (B, G, S, D)
    probabilities: list[Array]  # (B, H, t, s), for each part of the queries
    pattern: Pattern | None


class Part(NamedTuple):
    """Some of the queries, and the keys that they may see."""

    rows: slice
    keys: slice


class Table(NamedTuple):
    """The keys begin ... end − 1 of each query, (B, T) or (1, T)."""

    begin: Array
    end: Array


@kept(64)
def _kept_table(key: tuple, T: int, S: int, device: int) -> Table | None:
    return _table(from_key(key), T, S)


def _table(pattern: Pattern, T: int, S: int) -> Table | None:
    found = pattern.intervals(T, S, cupy)
    if found is None:
        return None
    size = max(len(a) for a in found)
    return Table(*(contiguous(cupy.broadcast_to(a, (size, T)).astype(np.int32)) for a in found))


def table_of(pattern: Pattern | None, T: int, S: int) -> Table | None:
    """The keys of each query; None if they are no range, or not the same for all heads. A pattern that is a value gets
    its table once.
    """
    pattern = Full() if pattern is None else pattern
    key = pattern.key()
    return _table(pattern, T, S) if key is None else _kept_table(key, T, S, cupy.cuda.runtime.getDevice())


def parts(pattern: Pattern | None, T: int, S: int, groups: bool) -> Iterator[Part]:
    """The queries in parts of about equal length, each with the keys that some of them may see, as far as this is known
    without looking at values on the GPU. There is one part if that leaves out nothing, or if heads share keys (groups).
    """
    known = _same_for_all(pattern)
    count = 1 if groups or known is None else min(PARTS, max(1, T // FEWEST))
    for i in range(count):
        rows = slice(i * T // count, (i + 1) * T // count)
        start, stop = (0, S) if known is None else known.span(0, rows, T, S)
        yield Part(rows, slice(start, max(start + 1, stop)))


def _same_for_all(pattern: Pattern | None) -> Pattern | None:
    """A part of the pattern that hides keys and is the same for all sequences, or None."""
    if isinstance(pattern, Both):
        return _same_for_all(pattern.first) or _same_for_all(pattern.second)
    return None if pattern is None or pattern.differs or isinstance(pattern, Full) else pattern


@ops.attention.twin(cupy.ndarray, fast=True)
def attention(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> tuple[Array, Any]:
    """As `ops.attention`, part by part of the queries.

    Forward, for each sequence and query head h, with g its key head. Query t may see the keys from begin_t to
    end_t − 1:

        a_hts = Σ_d q_htd k_gsd with g = ⌊h G/H⌋        z_hts = a_hts/√D
        Z_ht = Σ_s [begin_t ≤ s < end_t] exp(z_hts)
        p_hts = [begin_t ≤ s < end_t] exp(z_hts)/Z_ht where Z_ht > 0, 0 elsewhere
        y_htd = Σ_s p_hts v_gsd with g = ⌊h G/H⌋

    The scores of a part of the queries are computed for the keys that some of these queries see: with `Causal` and 4
    parts, for five eighths of all pairs. One kernel turns them into p. For half precision they are float32.

    Backward. As derived in `attention`, part by part; dk and dv add up over the parts.

        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t p_hts dy_htd        dp_hts = Σ_d dy_htd v_gsd with g = ⌊h G/H⌋
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')        da_hts = dz_hts/√D
        dq_htd = Σ_s da_hts k_gsd with g = ⌊h G/H⌋
        dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd

    In code:

        product(p.swapaxes(1, 2), of_dy[:, rows], of_dv[:, keys], add=written)
        dp = scores(of_dy[:, rows], of_v[:, keys])
        da = softmax("softmax_backward", (dp, p), table, H, part, T, q)
        product(da, of_k[:, keys], of_dq[:, rows])
        product(da.swapaxes(1, 2), of_q[:, rows], of_dk[:, keys], add=written)

    In half precision cuDNN does all of this without writing z or p to memory (`cupy_cudnn`), for `Full`, `Causal` and
    `Padding`. Its backward computes p again, from log Σ_s exp(z_hts), which the forward keeps. A NaN in a key may then
    reach queries that may not see it.
    """
    check_attention(q, k, v, pattern)
    (_, H, T, _), (_, G, S, _) = q.shape, k.shape
    if not (alike(q, k, v) and available() and q.size and k.size):
        return plain(q, k, v, pattern)
    if cupy_cudnn.fits(q, k, v, pattern):
        return cupy_cudnn.attention(q, k, v, pattern)
    table = table_of(pattern, T, S)
    if table is None:
        return plain(q, k, v, pattern)
    q, k, v = by_heads(q, G == H), by_heads(k), by_heads(v)
    y, probabilities = cupy.empty(q.shape, q.dtype), []
    of_q, of_k, of_v, of_y = (matrices(x, G) for x in (q, k, v, y))
    for part in parts(pattern, T, S, G != H):
        rows, keys = part.rows if G == H else slice(None), part.keys
        z = scores(of_q[:, rows], of_k[:, keys])
        p = softmax("softmax", (z,), table, H, part, T, q)
        product(p, of_v[:, keys], of_y[:, rows])
        probabilities.append(p)
    return by_positions(y), CudaAttentionCache(q, k, v, probabilities, pattern)


@ops.attention_backward.twin(CudaAttentionCache)
def attention_backward(dy: Array, cache: CudaAttentionCache) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, probabilities, pattern = cache
    (_, H, T, _), (_, G, S, _) = q.shape, k.shape
    expect_like("dy", dy, q.shape)
    array_module(dy, q)
    dy, dq = by_heads(dy.astype(q.dtype, copy=False), G == H), cupy.empty(q.shape, q.dtype)
    dk, dv = (cupy.empty(k.shape, real(k.dtype)) for _ in range(2))
    of_q, of_v, of_dy, of_dq, of_dk, of_dv = (matrices(x, G) for x in (q, v, dy, dq, dk, dv))
    of_k = matrices(cupy.nan_to_num(k), G)  # 0 · NaN is NaN, and da is 0 where a query may not see the key
    table, written = table_of(pattern, T, S), False
    every = list(zip(parts(pattern, T, S, G != H), probabilities, strict=True))
    for part, p in reversed(every):  # with `Causal` the last part has all keys
        rows, keys = part.rows if G == H else slice(None), part.keys
        if not written and keys != slice(0, S):
            dk[...] = dv[...] = 0
            written = True
        product(p.swapaxes(1, 2), of_dy[:, rows], of_dv[:, keys], add=written)
        dp = scores(of_dy[:, rows], of_v[:, keys])
        da = softmax("softmax_backward", (dp, p), table, H, part, T, q)
        product(da, of_k[:, keys], of_dq[:, rows])
        product(da.swapaxes(1, 2), of_q[:, rows], of_dk[:, keys], add=written)
        written = True
    return tuple(by_positions(x.astype(k.dtype, copy=False)) for x in (dq, dk, dv))


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
    apart = [np.int64(n // x.itemsize) for a in (x, y) for n in a.strides[:3]]
    V = vector(x.dtype, D * x.itemsize, x.data.ptr, *x.strides[:3], *y.strides[:3])
    rows = x.size // D
    run = kernel("attention", "move_heads", x.dtype.name, V=V, PER=1)
    numbers = np.int64(rows), np.int32(H), np.int32(T), np.int32(D)
    run((-(-rows * D // (V * 256)),), (256,), (x, *apart[:3], y, *apart[3:], *numbers))
    return y


def matrices(x: Array, G: int) -> Array:
    """(B, H, T, D) -> (B G, H/G T, D), a view: the rows of a group's heads, one head after another."""
    B, H, T, D = x.shape
    return x.reshape(B * G, H // G * T, D)


def scores(x: Array, y: Array) -> Array:
    """x yᵀ, for each matrix; in float32 for half precision."""
    return product(x, y.swapaxes(1, 2), cupy.empty((*x.shape[:2], y.shape[1]), real(x.dtype)))


def softmax(name: str, arrays: tuple, table: Table | None, H: int, part: Part, T: int, q: Array) -> Array:
    """Run the kernel `name` of attention.cu on arrays (B G, H/G t, s), for one part of the T queries. The result has
    the type of q, and overwrites the first array if that has this type. A warp has a row in its registers, if it fits.
    """
    assert table is not None  # `attention` has made it
    first, dtype, t = arrays[0], q.dtype, part.rows.stop - part.rows.start
    found = first if first.dtype == dtype else cupy.empty(first.shape, dtype)
    s = first.shape[2]
    rows = first.size // s
    numbers = np.int32(len(table.begin) == 1), np.int32(H), np.int64(rows), np.int32(t), np.int32(T)
    scale = real(dtype).type(1 / math.sqrt(q.shape[3]))
    more = np.int32(part.rows.start), np.int32(part.keys.start), np.int32(s), scale
    V = min(vector(x.dtype, s * x.itemsize, x.data.ptr) for x in (*arrays, found))
    PER = -(-s // (32 * V))
    if PER > 64 // V:  # more numbers than a thread has registers for
        name, PER = LONG[name], 1
    run = kernel("attention", name, dtype.name, V=V, PER=PER)
    run((-(-rows // 8),), (256,), (*arrays, found, *table, *numbers, *more))
    return found


ops.attention_backward.twin(cupy_cudnn.FusedAttentionCache)(cupy_cudnn.attention_backward)

"""Tiled attention with relative positions on NumPy: like `numpy_attention`, with one more product for each tile.

A tile has n rows and n' columns, in steps of k, starting at query t₀ and key s₀. Its pair (i, i') is query t₀ + k i and
key s₀ + k i', so its column in an array by distance, T − 1 − t₀ + s₀ + k (i' − i), depends only on i' − i. The tile is
therefore a small relative attention with n + n' − 1 distances, whose vectors are a slice of r with step k. Its scores
by distance are b, of shape (n, n + n' − 1), and the window of row i begins at column n − 1 − i, which in memory is
offset (n + n' − 2) i + n − 1. So the shift is a view whose row stride is one element shorter, and nothing is copied.
Tiles that a causal pattern leaves empty are skipped, and so are their distances.

Otherwise forward and backward are those of `numpy_attention`: they keep two numbers for each row and recompute the
probabilities from them. Keys that are not finite, and here also vectors of distances, are treated in the same way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import ops
from ..ops.checks import expect_like
from ..ops.patterns import Full, Pattern
from ..ops.relative import check_relative_attention
from .numpy_arrays import one_real_dtype
from .numpy_attention import (
    SAFE,
    Run,
    add_product,
    forbid,
    groups,
    heads_inside,
    largest_norm,
    subtrahends,
    with_column,
)

plain = ops.relative_attention.reference


class TiledRelativeAttentionCache(NamedTuple):
    """What backward needs. y is the returned array itself, so the caller must not change it before backward."""

    q: np.ndarray  # (B, H, T, D)
    k: np.ndarray  # (B, H, S, D)
    v: np.ndarray  # (B, H, S, D)
    r: np.ndarray  # (H, R, D)
    content_bias: np.ndarray  # (H, D)
    position_bias: np.ndarray  # (H, D)
    y: np.ndarray  # (B, H, T, D)
    shift: np.ndarray  # (B, H, T): m
    log_sum: np.ndarray  # (B, H, T): log l, or the dtype's largest number where a query sees no key
    finite: bool  # whether q, k, r, the biases and the bound on their scores are finite
    pattern: Pattern


def distances(run: Run, T: int) -> slice:
    """The vectors of r (H, R, D) that the pairs of a run need, as a slice."""
    rows, columns = (range(part.start, part.stop, part.step or 1) for part in (run.rows, run.columns))
    return slice(T - 1 - rows[-1] + columns[0], T - rows[0] + columns[-1], rows.step)


def shifted(b: np.ndarray) -> np.ndarray:
    """A contiguous array (..., n, n + n' − 1) by distance, viewed by key: (..., n, n')."""
    *batch, n, width = b.shape
    *steps, row, item = b.strides
    return as_strided(b[..., n - 1 :], (*batch, n, width - n + 1), (*steps, row - item, item))


def scores(
    content: np.ndarray, keys: np.ndarray, position: np.ndarray, r: np.ndarray, run: Run, T: int, finite: bool
) -> np.ndarray:
    """The scores (..., n, n') of a run, content plus position; −∞ where the pattern forbids the pair."""
    z = content[..., run.rows, :] @ keys[..., run.columns, :].swapaxes(-1, -2)
    z += shifted(position[..., run.rows, :] @ r[..., distances(run, T), :].swapaxes(-1, -2))
    forbid(z, run, finite)
    return z


def row_maxima(
    content: np.ndarray, keys: np.ndarray, position: np.ndarray, r: np.ndarray, runs: list[Run], finite: bool
) -> np.ndarray:
    """As in `numpy_attention`: (..., T), the largest score of each row, or 0 if it is within ±SAFE."""
    T = content.shape[-2]
    top = np.full(content.shape[:-1], -np.inf, content.dtype)
    for run in runs:
        z = scores(content, keys, position, r, run, T, finite)
        np.maximum(top[..., run.rows], z.max(axis=-1), out=top[..., run.rows])
    return np.where((np.abs(top) <= SAFE) | (top == -np.inf), 0, top)


def one_step(pattern: Pattern, B: int, H: int, T: int, S: int) -> bool:
    """Whether the rows and columns of each piece have the same step, so that its distances have that step too."""
    sequences = range(B if pattern.differs else 1)
    pieces = (piece for _, own in pattern.of_heads(H) for b in sequences for piece in own.pieces(b, T, S, np))
    return all((p.rows.step or 1) == (p.columns.step or 1) for p in pieces)


@ops.relative_attention.twin(np.ndarray)
def relative_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    r: np.ndarray,
    content_bias: np.ndarray,
    position_bias: np.ndarray,
    pattern: Pattern | None = None,
) -> tuple[np.ndarray, TiledRelativeAttentionCache]:
    """As `ops.relative_attention`, in memory linear in T + S."""
    arrays = (q, k, v, r, content_bias, position_bias)
    if not one_real_dtype(*arrays):
        return plain(*arrays, pattern)
    check_relative_attention(*arrays, pattern)
    pattern = pattern or Full()
    (B, H, T, D), S = q.shape, k.shape[2]
    if not (B and T and S and one_step(pattern, B, H, T, S)):
        return plain(*arrays, pattern)
    scale = 1 / math.sqrt(D)
    y, shift, log_sum = heads_inside(q.shape, q.dtype), *np.zeros((2, B, H, T), q.dtype)
    all_finite = True
    for part, runs in groups(pattern, q.shape, S, q.dtype):
        heads = part[1]
        content = (q[part] + content_bias[heads, None]) * scale
        position = (q[part] + position_bias[heads, None]) * scale
        keys, values = k[part], with_column(v[part], 1)
        bound = largest_norm(content) * largest_norm(keys) + largest_norm(position) * largest_norm(r[heads])
        finite = math.isfinite(bound)
        all_finite = all_finite and finite
        if not bound <= SAFE:
            shift[part] = row_maxima(content, keys, position, r[heads], runs, finite)
            content, keys = with_column(content, -shift[part]), with_column(keys, 1)
        total = np.zeros((*q[part].shape[:-1], D + 1), q.dtype)  # [y l, l]
        for run in runs:
            z = scores(content, keys, position, r[heads], run, T, finite)
            np.exp(z, out=z)
            add_product(z, values[..., run.columns, :], total[..., run.rows, :], run.first)
        sums = total[..., -1]
        seen = sums != 0
        np.divide(total[..., :-1], np.where(seen, sums, 1)[..., None], out=y[part])
        log_sum[part] = np.where(seen, np.log(sums, out=sums, where=seen), np.finfo(q.dtype).max)
    return y, TiledRelativeAttentionCache(*arrays, y, shift, log_sum, all_finite, pattern)


@ops.relative_attention_backward.twin(TiledRelativeAttentionCache)
def relative_attention_backward(dy: np.ndarray, cache: TiledRelativeAttentionCache) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv, dr, dcontent_bias, dposition_bias), as `ops.relative_attention_backward`."""
    q, k, v, r, content_bias, position_bias, y, shift, log_sum, finite, pattern = cache
    expect_like("dy", dy, q.shape)
    (_, _, T, D), S = q.shape, k.shape[2]
    dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v))
    dr, du, dw = np.zeros_like(r), np.zeros_like(content_bias), np.zeros_like(position_bias)
    scale = 1 / math.sqrt(D)
    for part, runs in groups(pattern, q.shape, S, q.dtype):
        heads = part[1]
        keys, output = np.ascontiguousarray(k[part]), np.ascontiguousarray(dy[part])
        within, after = subtrahends(shift[part], log_sum[part])
        content = with_column((q[part] + content_bias[heads, None]) * scale, -within)
        position = (q[part] + position_bias[heads, None]) * scale
        keys_one, values_one = with_column(keys, 1), with_column(v[part], 1)
        output_delta = with_column(output, -np.vecdot(output, y[part]))
        finite_keys, finite_r = (x if finite else np.nan_to_num(x) for x in (keys, r[heads]))
        sum_dqu, sum_dqw, sum_dk, sum_dv = (np.zeros_like(x) for x in (output, output, keys, keys))
        for run in runs:
            rows, columns, near = ((..., s, slice(None)) for s in (run.rows, run.columns, distances(run, T)))
            p = scores(content, keys_one, position, r[heads], run, T, finite)
            if after is not None:
                p -= after[..., run.rows, None]  # z − m − log l
            np.exp(p, out=p)
            sum_dv[columns] += p.swapaxes(-1, -2) @ output[rows]
            da = output_delta[rows] @ values_one[columns].swapaxes(-1, -2)  # dp − δ
            da *= p
            db = np.zeros((*da.shape[:-1], sum(da.shape[-2:]) - 1), da.dtype)
            shifted(db)[...] = da
            add_product(da, finite_keys[columns], sum_dqu[rows], run.first)
            add_product(db, finite_r[near], sum_dqw[rows], run.first)
            sum_dk[columns] += da.swapaxes(-1, -2) @ content[rows][..., :-1]
            dr[heads][near] += (db.swapaxes(-1, -2) @ position[rows]).sum(axis=0)
        np.multiply(sum_dqu + sum_dqw, scale, out=dq[part])
        du[heads] += sum_dqu.sum(axis=(0, 2)) * scale
        dw[heads] += sum_dqw.sum(axis=(0, 2)) * scale
        dk[part], dv[part] = sum_dk, sum_dv
    return dq, dk, dv, dr, du, dw

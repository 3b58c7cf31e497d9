"""Tiled attention with relative positions on NumPy: like `numpy_attention`, with one more product for each tile.

Tiles that a causal pattern leaves empty are skipped, and so are their distances.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import ops
from ..ops.patterns import Full, Pattern
from ..ops.relative import check_relative_attention
from .numpy_attention import (
    REAL,
    Strip,
    accepted,
    add_product,
    attend,
    groups,
    heads_inside,
    largest_norm,
    probabilities_of,
    products,
    with_column,
)


def distances(run: Strip, T: int) -> slice:
    """The vectors of r (H, R, D) that the pairs of a run need, as a slice."""
    rows, columns = (range(part.start, part.stop, part.step or 1) for part in (run.rows, run.columns))
    return slice(T - 1 - rows[-1] + columns[0], T - rows[0] + columns[-1], rows.step)


def shifted(b: np.ndarray) -> np.ndarray:
    """A contiguous array (..., n, n + n' − 1) by distance, viewed by key: (..., n, n')."""
    *batch, n, width = b.shape
    *steps, row, item = b.strides
    return as_strided(b[..., n - 1 :], (*batch, n, width - n + 1), (*steps, row - item, item))


def scores(
    position: np.ndarray, r: np.ndarray, T: int, content: np.ndarray, keys: np.ndarray, run: Strip
) -> np.ndarray:
    """The scores (..., n, n') of a run, content plus position."""
    z = products(content, keys, run)
    z += shifted(position[..., run.rows, :] @ r[..., distances(run, T), :].swapaxes(-1, -2))
    return z


def one_step(pattern: Pattern, B: int, H: int, T: int, S: int) -> bool:
    """Whether the rows and columns of each piece have the same step, so that its distances have that step too."""
    sequences = range(B if pattern.differs else 1)
    pieces = (piece for _, part in pattern.of_heads(H) for b in sequences for piece in part.pieces(b, T, S, np))
    return all((p.rows.step or 1) == (p.columns.step or 1) for p in pieces)


def fits(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, r: np.ndarray, content_bias: np.ndarray, position_bias: np.ndarray,
    pattern: Pattern | None = None,
) -> bool:  # fmt: skip
    arrays = q, k, v, r, content_bias, position_bias
    alike = all(type(x) is np.ndarray and x.dtype == q.dtype for x in arrays) and q.dtype in REAL
    if not (alike and accepted(check_relative_attention, *arrays, pattern)):
        return False
    (B, H, T, _), S = q.shape, k.shape[2]
    return B > 0 and T > 0 and S > 0 and one_step(pattern or Full(), B, H, T, S)


def relative_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, r: np.ndarray, content_bias: np.ndarray, position_bias: np.ndarray,
    pattern: Pattern | None = None,
) -> tuple[np.ndarray, tuple]:  # fmt: skip
    """As `ops.relative_attention`, in memory linear in T + S.

    Forward, for each sequence and head h, as in `relative_attention`; allowed_hts = 1 if query t may see key s:

        u := content_bias        w := position_bias
        a_hts = Σ_d (q_htd + u_hd)/√D k_hsd        b_htj = Σ_d (q_htd + w_hd)/√D r_hjd
        z_hts = a_hts + b_htj with j = s + T − 1 − t
        p_hts = softmax_{s, allowed_hts = 1}(z_hts) where allowed_hts = 1, 0 elsewhere
        y_htd = Σ_s p_hts v_hsd

    The shift copies nothing. In memory the rows of b, R numbers each, follow one another, and the window of row t
    begins at column T − 1 − t, which is place t R + T − 1 − t. So the windows are a view whose rows are one element
    shorter:

        R = S + T − 1        f_hi := b_htj with t = ⌊i/R⌋, j = i mod R
        z_hts = a_hts + f_hi with i = t (R − 1) + T − 1 + s

    A tile is a small relative attention. Let it have X rows, from query t₀ on, and Y columns, from key s₀ on, both in
    steps of κ. The distance of its pair (x, y) depends only on y − x, so E = X + Y − 1 vectors are enough, a slice of r
    in steps of κ, and the window of row x begins at column X − 1 − x:

        E = X + Y − 1        ρ_hed := r_hjd with j = s₀ + T − 1 − t₀ + κ (e − X + 1)
        β_hxe := Σ_d (q_htd + w_hd)/√D ρ_hed with t = t₀ + κ x
        z_hts = a_hts + β_{h, x, X−1−x+y} with t = t₀ + κ x, s = s₀ + κ y

    The rest is as in `numpy_attention`: any m cancels, and the backward recomputes the probabilities from m and log l,
    with the scores rounded as in the forward.

        m := shift
        l_ht = Σ_{s, allowed_hts = 1} exp(z_hts − m_ht)        log_sum_ht = log(l_ht)
        p_hts = exp(z_hts − m_ht − log_sum_ht) where allowed_hts = 1, 0 elsewhere

    Backward. δ is known before the first tile, and a is one term of the sum z, so da is dz:

        dp_hts = Σ_d dy_htd v_hsd        δ_ht := Σ_s p_hts dp_hts = Σ_d dy_htd y_htd
        dz_hts = p_hts (dp_hts − δ_ht)        da_hts = dz_hts

    b is the other term. The view puts each entry of da in its place in db; the places between the windows are 0:

        db_htj = da_hts where 0 ≤ j − T + 1 + t < S, 0 elsewhere with s = j − T + 1 + t

    Each product has two factors. All sequences n share r, u and w, and u and w are added to every query:

        dq_htd = 1/√D (Σ_s da_hts k_hsd + Σ_j db_htj r_hjd)
        dk_hsd = Σ_t da_hts (q_htd + u_hd)/√D        dv_hsd = Σ_t p_hts dy_htd
        dr_hjd = Σ_{n,t} db_nhtj (q_nhtd + w_hd)/√D
        du_hd = 1/√D Σ_{n,t,s} da_nhts k_nhsd        dw_hd = 1/√D Σ_{n,t,j} db_nhtj r_hjd

    For the rows, columns and distances of a tile, da is first dp − δ:

        p = probabilities(run)
        sum_dv[columns] += p.swapaxes(-1, -2) @ output[rows]
        da = output_delta[rows] @ values_one[columns].swapaxes(-1, -2)
        da *= p
        db = np.zeros((*da.shape[:-1], sum(da.shape[-2:]) - 1), da.dtype)
        shifted(db)[...] = da
        add_product(da, keys[columns], sum_dqu[rows], run.first)
        add_product(db, vectors[near], sum_dqw[rows], run.first)
        sum_dk[columns] += da.swapaxes(-1, -2) @ content[rows]
        dr[heads][near] += (db.swapaxes(-1, -2) @ position[rows]).sum(axis=0)
        np.multiply(sum_dqu + sum_dqw, scale, out=dq[part])
        return dq, dk, dv, dr, du, dw

    The cache keeps the arguments, y, m and log l, where the reference keeps T S probabilities for each head.
    """
    arrays, pattern = (q, k, v, r, content_bias, position_bias), pattern or Full()
    (B, H, T, _), S = q.shape, k.shape[2]
    y, shift, log_sum = heads_inside(q.shape, q.dtype), *np.zeros((2, B, H, T), q.dtype)
    bounds = []
    for part, runs in groups(pattern, q.shape, S, q.dtype):
        keys, values, near = k[part], with_column(v[part], 1), r[part[1]]
        content, position = with_biases(arrays, part)
        bounds.append(largest_norm(content) * largest_norm(keys) + largest_norm(position) * largest_norm(near))
        results = y[part], shift[part], log_sum[part]
        attend(partial(scores, position, near, T), content, keys, values, runs, bounds[-1], *results)
    return y, (arrays, y, shift, log_sum, bounds, pattern)


def with_biases(arrays: tuple[np.ndarray, ...], part: tuple[slice, slice]) -> tuple[np.ndarray, np.ndarray]:
    """(q + u)/√D and (q + w)/√D, of a group."""
    q, _, _, _, *biases = arrays
    content, position = ((q[part] + bias[part[1], None]) * (1 / math.sqrt(q.shape[-1])) for bias in biases)
    return content, position


def relative_attention_backward(dy: np.ndarray, cache: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv, dr, dcontent_bias, dposition_bias), as `ops.relative_attention_backward`."""
    arrays, y, shift, log_sum, bounds, pattern = cache
    q, k, v, r, content_bias, position_bias = arrays
    (_, _, T, D), S = q.shape, k.shape[2]
    dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v))
    dr, du, dw = np.zeros_like(r), np.zeros_like(content_bias), np.zeros_like(position_bias)
    scale = 1 / math.sqrt(D)
    for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype), bounds, strict=True):
        heads, values_one = part[1], with_column(v[part], 1)
        keys, output = np.ascontiguousarray(k[part]), np.ascontiguousarray(dy[part])
        (content, position), vectors = with_biases(arrays, part), r[heads]
        statistics = shift[part], log_sum[part]
        probabilities = probabilities_of(partial(scores, position, vectors, T), content, keys, bound, *statistics)
        output_delta = with_column(output, -np.vecdot(output, y[part]))
        sum_dqu, sum_dqw, sum_dk, sum_dv = (np.zeros_like(x) for x in (output, output, keys, keys))
        for run in runs:
            rows, columns, near = ((..., s, slice(None)) for s in (run.rows, run.columns, distances(run, T)))
            p = probabilities(run)
            sum_dv[columns] += p.swapaxes(-1, -2) @ output[rows]
            da = output_delta[rows] @ values_one[columns].swapaxes(-1, -2)
            da *= p
            db = np.zeros((*da.shape[:-1], sum(da.shape[-2:]) - 1), da.dtype)
            shifted(db)[...] = da
            add_product(da, keys[columns], sum_dqu[rows], run.first)
            add_product(db, vectors[near], sum_dqw[rows], run.first)
            sum_dk[columns] += da.swapaxes(-1, -2) @ content[rows]
            dr[heads][near] += (db.swapaxes(-1, -2) @ position[rows]).sum(axis=0)
        np.multiply(sum_dqu + sum_dqw, scale, out=dq[part])
        du[heads] += sum_dqu.sum(axis=(0, 2)) * scale
        dw[heads] += sum_dqw.sum(axis=(0, 2)) * scale
        dk[part], dv[part] = sum_dk, sum_dv
    return dq, dk, dv, dr, du, dw


ops.relative_attention.add_twin(np.ndarray, fits, relative_attention, relative_attention_backward)

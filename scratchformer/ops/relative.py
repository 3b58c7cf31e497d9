"""Attention by relative positions: what a query makes of a key depends on how far back it lies, not on where both are.

A query t at place t + S − T among S keys (see `patterns`) is at distance δ = t + S − T − s from key s: 0 for its own
place, positive for keys before it, negative for keys after it. There are R = S + T − 1 distances, from S − 1, of the
last query to the first key, down to −(T − 1), of the first query to the last key. An array "by distance" has them in
this order, so that its column j belongs to distance S − 1 − j.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, array_module
from ..dispatch import backward, operation
from .attention import check_attention, masked_softmax
from .checks import expect_floating, expect_like, expect_shape
from .patterns import Pattern
from .precision import widen


class RelativeShiftCache(NamedTuple):
    shape: tuple[int, ...]  # of x


def windows(T: int, S: int, xp: Any) -> tuple[Array, Array]:
    """Rows (T, 1) and columns (T, S): where the number for query t and key s stands in an array (T, R) by distance."""
    rows = xp.arange(T)[:, None]
    return rows, xp.arange(S)[None, :] + (T - 1 - rows)


@operation
def relative_shift(x: Array) -> tuple[Array, RelativeShiftCache]:
    """y_ts = x_tj with j = s + T − 1 − t: scores by distance become scores by key.

    x: (..., T, S + T − 1), for each query a number for every distance from S − 1 down to −(T − 1). Returns y
    (..., T, S) and the cache. Raises ValueError if x has fewer columns than rows, so that no S ≥ 1 is left.

    Key s is at distance δ = t + S − T − s from query t, and distance δ stands in column j = S − 1 − δ = s + T − 1 − t.
    So row t of y is a window of S numbers in row t of x, and each row's window begins one column before that of the row
    above it. With T = 3 queries and S = 4 keys, of the six columns the rows take

        ······  distance 3  2  1  0 −1 −2
        query 0          ·  ·  x  x  x  x
        query 1          ·  x  x  x  x  ·
        query 2          x  x  x  x  ·  ·

    Nothing is computed: numbers are moved, and those outside the windows are left behind.

    Backward. As a sum over all columns, with [·] = 1 where it is true and 0 elsewhere,

        y_ts = Σ_j [j = s + T − 1 − t] x_tj           dx_tj = Σ_s [j = s + T − 1 − t] dy_ts

    The matrix of brackets is the same in both: its transpose sums over s. For given t and j there is one s at most,
    j − (T − 1 − t), if it lies in 0 ... S − 1. So no sum has two terms: what came from a column goes back to it, and
    the columns that were left behind get 0.

        rows, columns = windows(T, S, xp)
        dx[..., rows, columns] = dy

    The cache keeps the shape of x, and none of its numbers: the map is linear.
    Source: Dai et al., "Transformer-XL", 2019, appendix B; Shaw et al., "Self-attention with relative position
    representations", 2018, section 3.2.
    """
    expect_floating(x=x)
    T, S = _sizes(x)
    rows, columns = windows(T, S, array_module(x))
    return x[..., rows, columns], RelativeShiftCache(tuple(x.shape))


def _sizes(x: Array) -> tuple[int, int]:
    """T and S of an array (..., T, S + T − 1)."""
    T, S = x.shape[-2:] if x.ndim > 1 else (0, 0)
    S -= T - 1
    if T < 1 or S < 1:
        raise ValueError(f"x: expected (..., T, S + T - 1) with T, S >= 1, got {tuple(x.shape)}")
    return T, S


@backward
def relative_shift_backward(dy: Array, cache: RelativeShiftCache) -> Array:
    """dx: see `relative_shift`."""
    *batch, T, R = cache.shape
    xp, S = array_module(dy), R - T + 1
    expect_like("dy", dy, (*batch, T, S))
    dx = xp.zeros(cache.shape, dy.dtype)
    rows, columns = windows(T, S, xp)
    dx[..., rows, columns] = dy
    return dx


class RelativeAttentionCache(NamedTuple):
    q: Array  # (B, H, T, D)
    k: Array  # (B, H, S, D)
    v: Array  # (B, H, S, D)
    r: Array  # (H, R, D)
    content_bias: Array  # (H, D)
    position_bias: Array  # (H, D)
    shift: RelativeShiftCache
    probabilities: Array  # (B, H, T, S)


def check_relative_attention(
    q: Array, k: Array, v: Array, r: Array, content_bias: Array, position_bias: Array, pattern: Pattern | None = None
) -> None:
    """Raise ValueError unless the shapes fit; TypeError for anything but floating-point arrays, and for a pattern that
    is no Pattern: see `relative_attention`.
    """
    check_attention(q, k, v, pattern)
    expect_floating(r=r, content_bias=content_bias, position_bias=position_bias)
    array_module(q, r, content_bias, position_bias)
    _, H, T, D = q.shape
    expect_shape("k", k, "B H S D", H=H)  # every query head has keys of its own
    expect_shape("r", r, "H R D", H=H, R=k.shape[2] + T - 1, D=D)
    expect_shape("content_bias", content_bias, "H D", H=H, D=D)
    expect_shape("position_bias", position_bias, "H D", H=H, D=D)


@operation
def relative_attention(
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    content_bias: Array,
    position_bias: Array,
    pattern: Pattern | None = None,
) -> tuple[Array, RelativeAttentionCache]:
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(((q_t + u) · k_s + (q_t + w) · r_δ)/√D), δ the distance of s from t.

    q: (B, H, T, D). k, v: (B, H, S, D). r: (H, S + T − 1, D), a vector for each distance from S − 1 down to −(T − 1),
    the same for all sequences. content_bias, position_bias: (H, D), the u and w of each head. pattern: as in
    `attention`; a causal one never looks at the vectors of distances below 0. Returns y (B, H, T, D) and the cache. A
    query that may see no key gets y = 0, and passes no gradient on. Raises ValueError if shapes do not fit, TypeError
    for another pattern.

    Where it comes from. Absolute positions give place i a vector e_i, which is added to the token's x_i before the maps
    to queries and keys. Multiplied out, the score of query i and key j has four terms:

        (x_i + e_i) W_q · (x_j + e_j) W_k
            = x_i W_q · x_j W_k  +  x_i W_q · e_j W_k  +  e_i W_q · x_j W_k  +  e_i W_q · e_j W_k

    In the second and the fourth term, e_j W_k is replaced by r_δ = e_δ W_r, the vector of the distance through a map of
    its own. The query's own place is then left only in the last two terms. Since only distances are to matter, e_i W_q
    becomes a learned vector that is the same everywhere: u where it meets the content of a key, w where it meets a
    distance:

        q_i · k_j  +  q_i · r_δ  +  u · k_j  +  w · r_δ  =  (q_i + u) · k_j  +  (q_i + w) · r_δ

    Forward, for one sequence and one head. r_δ belongs to a pair (t, s), but every query meets all R distances: all
    products are one matrix product by distance, and `relative_shift` picks those of the pairs.

        a_ts = Σ_d (q_td + u_d) k_sd        b_tj = Σ_d (q_td + w_d) r_jd        z_ts = (a_ts + shift(b)_ts)/√D

        p_ts = softmax_s(z_ts)              y_td = Σ_s p_ts v_sd

    Backward. The product with v and the softmax are those of `attention`: dv_sd = Σ_t p_ts dy_td, dp_ts = Σ_d dy_td
    v_sd, dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts'). The sum in z copies its gradient, da_ts = dz_ts/√D, to both terms,
    and db is the shift's transpose of the same array. Each term is then a product of two factors:

        ∂a_ts/∂(q_td + u_d) = k_sd      ∂a_ts/∂k_sd = q_td + u_d
        ∂b_tj/∂(q_td + w_d) = r_jd      ∂b_tj/∂r_jd = q_td + w_d

        dqu_td = Σ_s da_ts k_sd         dk_sd = Σ_t da_ts (q_td + u_d)
        dqw_td = Σ_j db_tj r_jd         dr_jd = Σ_t db_tj (q_td + w_d)

    q stands in both sums, so dq_td = dqu_td + dqw_td. u is added to every query, so it collects from all of them, and
    w from those of the other term: du_d = Σ_t dqu_td, dw_d = Σ_t dqw_td. And u, w and r serve all sequences b of the
    batch: their gradients are summed over b too.

        dv = probabilities.swapaxes(-1, -2) @ dy
        dp = dy @ v.swapaxes(-1, -2)
        dz = probabilities * (dp - (probabilities * dp).sum(axis=-1, keepdims=True))
        da = dz * scale
        db = relative_shift_backward(da, shift)
        dqu, dqw = da @ k, db @ r
        dk = da.swapaxes(-1, -2) @ (q + content_bias[:, None])
        dr = (db.swapaxes(-1, -2) @ (q + position_bias[:, None])).sum(axis=0)
        dq = dqu + dqw
        du, dw = dqu.sum(axis=(0, 2)), dqw.sum(axis=(0, 2))

    The cache keeps the six arrays and the (T, S) probabilities, each a factor of some product above; the shifted scores
    are not needed, since the shift is linear.
    Source: Dai et al., "Transformer-XL: attentive language models beyond a fixed-length context", 2019, section 3.3.
    """
    check_relative_attention(q, k, v, r, content_bias, position_bias, pattern)
    scale = 1 / math.sqrt(q.shape[-1])
    a = ((q + content_bias[:, None]) * scale) @ k.swapaxes(-1, -2)  # (B, H, T, S)
    b = ((q + position_bias[:, None]) * scale) @ r.swapaxes(-1, -2)  # (B, H, T, R)
    b, shift = relative_shift(b)  # (B, H, T, S)
    probabilities = masked_softmax(widen(a) + widen(b), pattern).astype(q.dtype, copy=False)
    return probabilities @ v, RelativeAttentionCache(q, k, v, r, content_bias, position_bias, shift, probabilities)


@backward
def relative_attention_backward(
    dy: Array, cache: RelativeAttentionCache
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(dq, dk, dv, dr, dcontent_bias, dposition_bias): see `relative_attention`."""
    q, k, v, r, content_bias, position_bias, shift, probabilities = cache
    scale = 1 / math.sqrt(q.shape[-1])
    expect_like("dy", dy, q.shape)
    dv = probabilities.swapaxes(-1, -2) @ dy
    dp = dy @ v.swapaxes(-1, -2)
    probabilities, dp = widen(probabilities), widen(dp)
    dz = probabilities * (dp - (probabilities * dp).sum(axis=-1, keepdims=True))
    dz = dz.astype(dy.dtype, copy=False)
    k, r = (array_module(x).nan_to_num(x) for x in (k, r))  # as in `attention_backward`
    da = dz * scale
    db = relative_shift_backward(da, shift)
    dqu, dqw = da @ k, db @ r
    dk = da.swapaxes(-1, -2) @ (q + content_bias[:, None])
    db, dqu, dqw = widen(db), widen(dqu), widen(dqw)
    dr = (db.swapaxes(-1, -2) @ (q + position_bias[:, None])).sum(axis=0)
    dq = dqu + dqw
    du, dw = dqu.sum(axis=(0, 2)), dqw.sum(axis=(0, 2))
    dq, dr, du, dw = (x.astype(dy.dtype, copy=False) for x in (dq, dr, du, dw))
    return dq, dk, dv, dr, du, dw

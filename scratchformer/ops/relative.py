"""Attention with relative positions: a score depends on the distance between query and key, not on where they are.

Query t has position t + S − T among the S keys (see `patterns`), so its distance from key s is δ = t + S − T − s: 0 at
its own position, positive for earlier keys, negative for later ones. There are R = S + T − 1 distances, from S − 1 (the
last query to the first key) down to −(T − 1) (the first query to the last key). An array "by distance" lists them in
this order: its column j belongs to distance S − 1 − j.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_floating, expect_like, expect_shape
from ..dispatch import backward, operation
from .attention import check_attention, masked_softmax
from .patterns import Pattern


class RelativeShiftCache(NamedTuple):
    shape: tuple[int, ...]  # of x


def first_columns(T: int, xp: Any) -> Array:
    """(T, 1): the column of key 0 in each row t of an array (T, R) by distance, T − 1 − t."""
    return T - 1 - xp.arange(T)[:, None]


def pick(x: Array, columns: Array) -> Array:
    """y_...tj = x_...tc with c = columns_tj, for x (..., T, C) and columns (T, J). Returns y (..., T, J)."""
    columns = array_module(x).broadcast_to(columns, (*x.shape[:-1], columns.shape[1]))
    return array_module(x).take_along_axis(x, columns, axis=-1)


@operation
def relative_shift(x: Array) -> tuple[Array, RelativeShiftCache]:
    """y_ts = x_tj with j = s + T − 1 − t: scores by distance are indexed by key instead.

    x: (..., T, S + T − 1), one score for each query and each distance from S − 1 down to −(T − 1). Returns y
    (..., T, S) and the cache. Raises ValueError if x has fewer columns than rows, which leaves no S ≥ 1.

    Key s is at distance δ = t + S − T − s from query t, and distance δ is in column j = S − 1 − δ = s + T − 1 − t. So
    row t of y is a window of S numbers from row t of x, and each window begins one column to the left of the window
    above it. With T = 3 queries and S = 4 keys, the windows among the six columns are

        | distance  3  2  1  0 −1 −2
        | query 0   ·  ·  x  x  x  x
        | query 1   ·  x  x  x  x  ·
        | query 2   x  x  x  x  ·  ·

    Nothing is computed: the numbers inside the windows are copied, the others are dropped. As a sum over all columns,

        y_ts = x_tj with j = s + T − 1 − t
        y_ts = Σ_j [j = s + T − 1 − t] x_tj

    Backward. Both directions use the same matrix of brackets. Forward sums over j, backward over s:

        ∂y_ts/∂x_tj = [j = s + T − 1 − t]
        dx_tj = Σ_s dy_ts ∂y_ts/∂x_tj = Σ_s [j = s + T − 1 − t] dy_ts

    For given t and j, at most one s in 0 ... S − 1 matches, so no sum has more than one term: each gradient goes back
    to the column that its score came from, and the dropped columns get 0.

        dx_tj = dy_{t, j−(T−1−t)} where 0 ≤ j − (T − 1 − t) < S, 0 elsewhere

    In NumPy:

        s = xp.arange(R) - first_columns(T, xp)
        dx = xp.where((0 <= s) & (s < S), pick(dy, xp.clip(s, 0, S - 1)), 0)

    The cache keeps only the shape of x, since the map is linear.
    Source: Dai et al., "Transformer-XL", 2019, appendix B; Shaw et al., "Self-attention with relative position
    representations", 2018, section 3.2.
    """
    expect_floating(x=x)
    T, S = _sizes(x)
    xp = array_module(x)
    y = pick(x, xp.arange(S) + first_columns(T, xp))
    return y, RelativeShiftCache(tuple(x.shape))


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
    s = xp.arange(R) - first_columns(T, xp)
    dx = xp.where((0 <= s) & (s < S), pick(dy, xp.clip(s, 0, S - 1)), 0)
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
    """Check the arguments of `relative_attention`.

    Raises ValueError if shapes do not fit, TypeError if an array is not floating-point or `pattern` is not a Pattern.
    """
    expect_floating(q=q, k=k, r=r, content_bias=content_bias, position_bias=position_bias)
    expect_shape("q", q, "B H T D")
    B, H, T, D = q.shape
    expect_shape("k", k, "B H S D", B=B, H=H, D=D)  # every query head has keys of its own
    check_attention(q, k, v, pattern)
    array_module(q, r, content_bias, position_bias)
    expect_shape("r", r, "H R D", H=H, R=k.shape[2] + T - 1, D=D)
    expect_shape("content_bias", content_bias, "H D", H=H, D=D)
    expect_shape("position_bias", position_bias, "H D", H=H, D=D)


@operation
def relative_attention(
    q: Array, k: Array, v: Array, r: Array, content_bias: Array, position_bias: Array, pattern: Pattern | None = None
) -> tuple[Array, RelativeAttentionCache]:
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(((q_t + u) · k_s + (q_t + w) · r_δ)/√D), δ the distance from s to t.

    q: (B, H, T, D). k, v: (B, H, S, D). r: (H, S + T − 1, D), a vector for each distance from S − 1 down to −(T − 1),
    shared by all sequences. content_bias, position_bias: (H, D), the u and w of each head. pattern: as in `attention`;
    a causal one never uses the vectors of negative distances. Returns y (B, H, T, D) and the cache. A query that may
    see no key gets y = 0 and passes no gradient on. Raises ValueError if shapes do not fit, TypeError if `pattern` is
    not a Pattern.

    Where it comes from. With absolute positions, a vector e_i for position i is added to the token's vector x_i before
    the projections to queries and keys. Multiplied out, the score (x_i + e_i) W_q · (x_j + e_j) W_k has four terms:
    x_i W_q · x_j W_k, x_i W_q · e_j W_k, e_i W_q · x_j W_k and e_i W_q · e_j W_k. In the second and the fourth, e_j W_k
    is replaced by r_δ = e_δ W_r, the vector of the distance with its own projection W_r. The query's absolute position
    then remains only in the last two terms. Since only distances should matter, its e_i W_q becomes a learned vector,
    the same at every position: u where it multiplies the content of a key, w where it multiplies a distance. The sum of
    the four terms is then (q_i + u) · k_j + (q_i + w) · r_δ.

    Forward. The distance of a pair (t, s) is one of only R. So one matrix product gives the scores of every query with
    all R distances, and `relative_shift` picks column j for each pair. Each head h does this alone. A mask says which
    keys a query may see: m_hts is 1 if query t may see key s, else 0:

        u := content_bias        w := position_bias        p := probabilities
        qu_htd = q_htd + u_hd        a_hts = Σ_d qu_htd k_hsd
        qw_htd = q_htd + w_hd        b_htj = Σ_d qw_htd r_hjd
        z_hts = (a_hts + b_htj)/√D with j = s + T − 1 − t
        Z_ht = Σ_s m_hts exp(z_hts)        p_hts = m_hts exp(z_hts)/Z_ht where Σ_s' m_hts' > 0, 0 elsewhere
        y_htd = Σ_s p_hts v_hsd

    Backward. The product with v and the softmax are as in `attention`:

        dv_hsd = Σ_t p_hts dy_htd        dp_hts = Σ_d dy_htd v_hsd
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')

    The sum in z passes its gradient to both terms, and to the second one through the backward of the shift:

        da_hts = dz_hts/√D        db_htj = Σ_s [j = s + T − 1 − t] da_hts

    Each term is a product of two factors:

        ∂a_hts/∂qu_htd = k_hsd        ∂a_hts/∂k_hsd = qu_htd
        ∂b_htj/∂qw_htd = r_hjd        ∂b_htj/∂r_hjd = qw_htd

    All queries use the same r, u and w, so their gradients are sums over t. All sequences n of the batch share them
    too, which adds a sum over n:

        dqu_htd = Σ_s da_hts k_hsd        dk_hsd = Σ_t da_hts qu_htd
        dqw_htd = Σ_j db_htj r_hjd        dr_hjd = Σ_{n,t} db_nhtj qw_nhtd
        dq_htd = dqu_htd + dqw_htd       du_hd = Σ_{n,t} dqu_nhtd        dw_hd = Σ_{n,t} dqw_nhtd

    In NumPy:

        dv = xp.matrix_transpose(probabilities) @ dy
        dp = widen(dy) @ xp.matrix_transpose(widen(v))
        dz = probabilities * (dp - xp.sum(probabilities * dp, axis=-1, keepdims=True))
        da = dz * scale
        db = relative_shift_backward(da, shift)
        dqu, dqw = da @ k, db @ r
        dk = xp.matrix_transpose(da) @ (q + content_bias[:, None, :])
        dr = xp.sum(xp.matrix_transpose(db) @ (q + position_bias[:, None, :]), axis=0)
        dq = dqu + dqw
        du, dw = xp.sum(dqu, axis=(0, 2)), xp.sum(dqw, axis=(0, 2))

    The cache keeps the six arrays and the (T, S) probabilities, since each is a factor of some product above. The
    shifted scores are not needed, since the shift is linear.
    Source: Dai et al., "Transformer-XL: attentive language models beyond a fixed-length context", 2019, section 3.3.
    """
    check_relative_attention(q, k, v, r, content_bias, position_bias, pattern)
    xp, scale = array_module(q), 1 / math.sqrt(q.shape[-1])
    qu, qw = ((widen(q) + bias[:, None, :]) * scale for bias in (content_bias, position_bias))
    a = qu @ xp.matrix_transpose(widen(k))  # (B, H, T, S)
    b = qw @ xp.matrix_transpose(widen(r))  # (B, H, T, R)
    b, shift = relative_shift(b)  # (B, H, T, S)
    probabilities = cast(masked_softmax(a + b, pattern), q.dtype)
    y = cast(probabilities @ v, q.dtype)
    return y, RelativeAttentionCache(q, k, v, r, content_bias, position_bias, shift, probabilities)


@backward
def relative_attention_backward(
    dy: Array, cache: RelativeAttentionCache
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(dq, dk, dv, dr, dcontent_bias, dposition_bias): see `relative_attention`."""
    q, k, v, r, content_bias, position_bias, shift, probabilities = cache
    xp, shape = array_module(q), q.shape
    scale = 1 / math.sqrt(shape[-1])
    expect_like("dy", dy, shape)
    q = widen(q)
    dv = xp.matrix_transpose(probabilities) @ dy
    dp = widen(dy) @ xp.matrix_transpose(widen(v))
    dz = probabilities * (dp - xp.sum(probabilities * dp, axis=-1, keepdims=True))
    da = dz * scale
    db = relative_shift_backward(da, shift)
    dqu, dqw = da @ k, db @ r
    dk = xp.matrix_transpose(da) @ (q + content_bias[:, None, :])
    dr = xp.sum(xp.matrix_transpose(db) @ (q + position_bias[:, None, :]), axis=0)
    dq = dqu + dqw
    du, dw = xp.sum(dqu, axis=(0, 2)), xp.sum(dqw, axis=(0, 2))
    return tuple(cast(x, dy.dtype) for x in (dq, dk, dv, dr, du, dw))

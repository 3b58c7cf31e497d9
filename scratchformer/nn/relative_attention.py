"""Self-attention with relative positions, on a sequence that may begin with a memory."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_at_least, expect_boolean, expect_real, expect_shape
from ..rng import Key, fold
from .attention import CrossAttention, causal, length_with
from .layer import Param, add_backward, expect_backward
from .pointwise import Linear

RelativeSelfAttentionCache = namedtuple("RelativeSelfAttentionCache", "query key value position attention unify")


class RelativeSelfAttention(CrossAttention):
    """Self-attention that depends on how far apart positions are, not on where they are: see `ops.relative_attention`.

    d_model, heads, wide, bias: see `CrossAttention`. causal: position t sees only positions up to t, in addition to any
    given pattern. Besides the query, key and value projections there is one of distances, `position`: the vector of
    distance δ in each head is r_δ = P_δ W, where P_δ holds the sinusoids of `ops.sinusoidal_positions` at δ. Two biases
    (H, D), initially zero, stand in for the query's absolute position: `content_bias` and `position_bias`. x may have
    any length.

    x: (B, S, C). queries: T, so that only the last T positions have queries and outputs; all by default. The M = S − T
    positions before them are a memory, which provides only keys and values. y: (B, T, C). pattern: for T queries and S
    keys. Raises ValueError if the shapes do not fit, or T is not in 1 ... S.

    Forward, for each sequence. Keys and values come from all S positions, queries from the last T, and row j of P holds
    the sinusoids of distance S − 1 − j. With the columns of head h of each projection,

        wq_chd = query.w_{c,h D + d}        wk_chd = key.w_{c,h D + d}        wv_chd = value.w_{c,h D + d}
        q_htd = Σ_c x_{t + S − T,c} wq_chd        k_hsd = Σ_c x_sc wk_chd        v_hsd = Σ_c x_sc wv_chd
        W_chd = position.w_{c,h D + d}        r_hjd = Σ_c P_jc W_chd
        u := content_bias        w := position_bias

    The score of query t and key s has a part for what the key holds and one for how far away it is. m_ts is 1 if query
    t may see key s, else 0:

        z_hts = (Σ_d (q_htd + u_hd) k_hsd + Σ_d (q_htd + w_hd) r_hjd)/√D with j = s + T − 1 − t
        Z_ht = Σ_s m_ts exp(z_hts)        p_hts = m_ts exp(z_hts)/Z_ht where Σ_s' m_ts' > 0, 0 elsewhere
        a_htd = Σ_s p_hts v_hsd        y_tc = Σ_h Σ_d a_htd unify.w_{h D + d,c} + unify.b_c

    Backward. As far as the scores, it is that of `attention`. g is the gradient of the sum of the two parts:

        da_htd = Σ_c dy_tc unify.w_{h D + d,c}        dv_hsd = Σ_t p_hts da_htd        dp_hts = Σ_d da_htd v_hsd
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')        g_hts = dz_hts/√D

    A query meets the content and the distance of each key, a key only the queries:

        dq_htd = Σ_s g_hts (k_hsd + r_{h,s + T − 1 − t,d})        dk_hsd = Σ_t g_hts (q_htd + u_hd)

    The vector of a distance is used by every pair at this distance, and the two biases by every pair, in all sequences
    b. Their gradients are sums over these pairs:

        dr_hjd = Σ_b Σ_t Σ_s [j = s + T − 1 − t] g_bhts (q_bhtd + w_hd)
        du_hd = Σ_b Σ_t Σ_s g_bhts k_bhsd        dw_hd = Σ_b Σ_t Σ_s g_bhts r_{h,s + T − 1 − t,d}

    x feeds keys and values at all positions and queries at the last T, where its gradient is the sum of both:

        dx_sc = Σ_h Σ_d dk_hsd wk_chd + Σ_h Σ_d dv_hsd wv_chd + Σ_t [s = t + S − T] Σ_h Σ_d dq_htd wq_chd

    So a memory gets a gradient too, from keys and values; a caller for whom it is constant drops this. The sinusoids
    are fixed, so dr leads only to a gradient of W, as in `linear`:

        dW_chd = Σ_j P_jc dr_hjd        dposition.w_{c,h D + d} = dW_chd

    The weights of the other projections get sums over the positions that each was applied to:

        dquery.w_{c,h D + d} = Σ_b Σ_t x_{b,t + S − T,c} dq_bhtd        dunify.w_{h D + d,c} = Σ_b Σ_t a_bhtd dy_btc
        dkey.w_{c,h D + d} = Σ_b Σ_s x_bsc dk_bhsd        dvalue.w_{c,h D + d} = Σ_b Σ_s x_bsc dv_bhsd
        dunify.b_c = Σ_b Σ_t dy_btc

    In code:

        dx = self.key.backward(self.join_heads(dk), cache.key)
        dx = add_backward(dx, self.value, self.join_heads(dv), cache.value)
        last = self.query.backward(self.join_heads(dq), cache.query)
        dx, _ = ops.add(dx, after_zeros(last, dx))
        self.position.backward(self.join_heads(dr[None])[0], cache.position)
        self.content_bias.grad += dcontent_bias
        self.position_bias.grad += dposition_bias

    Source: Dai et al., "Transformer-XL: attentive language models beyond a fixed-length context", 2019, section 3.3.
    """

    def __init__(
        self, d_model: int, heads: int, causal: bool = False, wide: bool = False, bias: bool = False, key: Key = Key(0)
    ) -> None:
        super().__init__(d_model, heads, wide, bias, key)
        expect_boolean(causal=causal)
        self.causal = causal
        self.position = Linear(d_model, heads * self.head_width, bias=False, key=fold(key, "position"))
        self.content_bias = Param(np.zeros((heads, self.head_width), np.float32), "content_bias")
        self.position_bias = Param(np.zeros((heads, self.head_width), np.float32), "position_bias")

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, queries: int | None = None
    ) -> tuple[Array, RelativeSelfAttentionCache]:
        expect_real("x", x)
        expect_shape("x", x, "B S C", C=self.d_model)
        S = x.shape[1]
        T = S if queries is None else queries
        expect_at_least(0, queries=T)
        if not 1 <= T <= S:
            raise ValueError(f"queries: expected a number from 1 to {S}, the length of x, got {T}")
        if self.causal:
            pattern = causal(pattern)
        q, query = self.query.forward(x[:, S - T :])
        k, key = self.key.forward(x)
        v, value = self.value.forward(x)
        r, position = self.position.forward(self.distances(T, S, x))
        y, attention = self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v), r, pattern)
        y, unify = self.unify.forward(self.join_heads(y))
        return y, RelativeSelfAttentionCache(query, key, value, position, attention, unify)

    def backward(self, dy: Array, cache: RelativeSelfAttentionCache) -> Array:
        expect_backward(cache, RelativeSelfAttentionCache, dy=dy)
        expect_shape("dy", dy, "B T C")
        dy = self.unify.backward(dy, cache.unify)
        dq, dk, dv, dr, dcontent_bias, dposition_bias = ops.relative_attention_backward(
            self.split_heads(dy), cache.attention
        )
        dx = self.key.backward(self.join_heads(dk), cache.key)
        dx = add_backward(dx, self.value, self.join_heads(dv), cache.value)
        last = self.query.backward(self.join_heads(dq), cache.query)
        dx, _ = ops.add(dx, after_zeros(last, dx))
        self.position.backward(self.join_heads(dr[None])[0], cache.position)
        self.content_bias.grad += dcontent_bias
        self.position_bias.grad += dposition_bias
        return dx

    def distances(self, T: int, S: int, like: Array) -> Array:
        """The sinusoids (R, C) of all distances, from S − 1 down to −(T − 1), in the dtype of `like`."""
        return ops.sinusoidal_positions(S + T - 1, self.d_model, array_module(like), like.dtype, start=1 - T)[::-1]

    def attend(self, q: Array, k: Array, v: Array, r: Array, pattern: ops.Pattern | None) -> tuple[Array, Any]:
        """Attention of q (B, H, T, D) to k and v (B, H, S, D), with the vectors r (R, H D) of all distances."""
        r = self.split_heads(r[None])[0]  # (H, R, D)
        return ops.relative_attention(q, k, v, r, self.content_bias.data, self.position_bias.data, pattern)

    def extend(self, x: Array, stored: tuple[Array, Array], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones: see `SelfAttention.extend`."""
        (keys, values), total = stored, length_with(x, stored[0], past)
        keys[:, :, past:total] = self.split_heads(self.key(x))
        values[:, :, past:total] = self.split_heads(self.value(x))
        q, r = self.split_heads(self.query(x)), self.position(self.distances(x.shape[1], total, x))
        y, _ = self.attend(q, keys[:, :, :total], values[:, :, :total], r, causal(pattern))
        return self.unify(self.join_heads(y))


def after_zeros(last: Array, like: Array) -> Array:
    """(B, S, C), in which `last` (B, T, C) has zeros before it; `last` itself if T = S. like: an array (B, S, C)."""
    if last.shape == like.shape:
        return last
    padded = array_module(like).zeros_like(like)
    padded[:, like.shape[1] - last.shape[1] :] = last
    return padded

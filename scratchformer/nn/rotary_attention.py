"""Llama's self-attention: rotary positions, and query heads that may share keys and values."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_at_least, expect_boolean, expect_floating, expect_one_of, expect_positive, expect_shape
from ..ops.positions import BASE
from ..rng import Key
from .attention import MultiHead, length_with
from .layer import add_backward, expect_backward
from .pointwise import NormedLinear, RMSNorm

RotarySelfAttentionCache = namedtuple("RotarySelfAttentionCache", "query key value rotated_q rotated_k attention unify")


class RotarySelfAttention(MultiHead):
    """Multi-head self-attention whose queries and keys are rotated according to their positions: see `ops.rotary`.

    d_model: C. heads: H, the number of query heads. kv_heads: G, the number of key and value heads, each shared by H/G
    neighbouring query heads; H by default. head_width: D; C/H by default. base, scaling: of the angles, see
    `ops.rotary_frequencies`. causal: position t sees only positions up to t. `window=W` limits each position to
    neighbours less than W away (with `causal`, to the last W, itself included); without it there is no limit. Both
    apply in addition to any given pattern. bias: whether the query, key and value projections have one. output_bias:
    whether the output projection, `unify`, has one. x, y: (B, T, C), for any T. Raises ValueError if the numbers of
    heads and the widths do not fit together.

    rotary_width: the even number N of numbers of each head that are rotated, the first ones; D by default, 0 for no
    rotation. query_key_norm: "heads" for an RMS norm of each head of the queries and keys before the rotation, with
    `eps` and one γ for all heads; "all" for one of all heads together. `query` and `key` are then a `NormedLinear`.

    Forward, for each sequence: as in `SelfAttention`, with one more step. With G heads of keys and values, and the
    columns of each head,

        wq_chd = query.w_{c,h D + d}        wk_cgd = key.w_{c,g D + d}        wv_cgd = value.w_{c,g D + d}
        q_htd = Σ_c x_tc wq_chd        k_gsd = Σ_c x_sc wk_cgd        v_gsd = Σ_c x_sc wv_cgd

    The step is a rotation R_t of the queries and keys at position t, the same in all heads. It mixes number d with
    number j, its partner in the other half of N := rotary_width numbers, by the angle t θ_i. Numbers after these stay:

        σ_d = −1 where d < N/2, 1 elsewhere
        i_d = d mod (N/2)        j_d = (d + N/2) mod N
        r_tdd' = [d' = d] cos(t θ_i) + [d' = j] σ_d sin(t θ_i) with i = i_d, j = j_d
        R_tdd' = r_tdd' where d < N, [d' = d] elsewhere
        q̂_htd = Σ_d' R_tdd' q_htd'        k̂_gsd = Σ_d' R_sdd' k_gsd'

    Query head h reads key head g. m_ts is 1 if position t may see position s, else 0:

        z_hts = Σ_d q̂_htd k̂_gsd/√D with g = ⌊h G/H⌋
        Z_ht = Σ_s m_ts exp(z_hts)        p_hts = m_ts exp(z_hts)/Z_ht where Σ_s' m_ts' > 0, 0 elsewhere
        a_htd = Σ_s p_hts v_gsd with g = ⌊h G/H⌋        y_tc = Σ_h Σ_d a_htd unify.w_{h D + d,c}

    Backward. As far as the rotated queries and keys, it is that of `attention`. A head of keys and values gets the sum
    over the query heads that share it:

        da_htd = Σ_c dy_tc unify.w_{h D + d,c}        dp_hts = Σ_d da_htd v_gsd with g = ⌊h G/H⌋
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')        dq̂_htd = Σ_s dz_hts k̂_gsd/√D with g = ⌊h G/H⌋
        dk̂_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t dz_hts q̂_htd/√D        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t p_hts da_htd

    The gradient is rotated back: by the transpose of R_t, which is also its inverse.

        dq_htd = Σ_d' R_td'd dq̂_htd'        dk_gsd = Σ_d' R_sd'd dk̂_gsd'

    x feeds all three projections, so its gradient is a sum of three terms:

        dx_tc = Σ_h Σ_d dq_htd wq_chd + Σ_g Σ_d dk_gtd wk_cgd + Σ_g Σ_d dv_gtd wv_cgd

    The weights of each projection get a sum over all positions of all sequences b, by `linear`:

        dquery.w_{c,h D + d} = Σ_b Σ_t x_btc dq_bhtd        dunify.w_{h D + d,c} = Σ_b Σ_t a_bhtd dy_btc
        dkey.w_{c,g D + d} = Σ_b Σ_s x_bsc dk_bgsd        dvalue.w_{c,g D + d} = Σ_b Σ_s x_bsc dv_bgsd

    In code:

        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)
        dq = self.rotate_back(dq, cache.rotated_q)
        dk = self.rotate_back(dk, cache.rotated_k)
        dx = self.query.backward(self.join_heads(dq), cache.query)
        dx = add_backward(dx, self.key, self.join_heads(dk), cache.key)
        dx = add_backward(dx, self.value, self.join_heads(dv), cache.value)

    Source: Touvron et al., "LLaMA: open and efficient foundation language models", 2023, section 2.2; Jiang et al.,
    "Mistral 7B", 2023, section 2, for the window.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        head_width: int | None = None,
        base: float = BASE,
        scaling: Mapping[str, Any] | None = None,
        causal: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        rotary_width: int | None = None,
        query_key_norm: str | None = None,
        eps: float = 1e-6,
        key: Key = Key(0),
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        expect_positive(d_model=d_model, heads=heads, kv_heads=kv_heads)
        expect_boolean(causal=causal, bias=bias, output_bias=output_bias)
        if heads % kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} does not divide heads {heads}")
        if head_width is None and d_model % heads:
            raise ValueError(f"heads: {heads} does not divide d_model {d_model}")
        D = d_model // heads if head_width is None else head_width
        rotary_width = D if rotary_width is None else rotary_width
        expect_at_least(0, rotary_width=rotary_width)
        if rotary_width > D:
            raise ValueError(f"rotary_width: expected at most {D}, the width of a head, got {rotary_width}")
        if rotary_width:
            ops.rotary_frequencies(rotary_width, base, scaling)  # raises ValueError for what it does not support
        if query_key_norm is not None:
            expect_one_of("query_key_norm", query_key_norm, ("heads", "all"))
        if window is not None:
            expect_positive(window=window)
        super().__init__(d_model, heads, kv_heads, D, bias, output_bias, key)
        self.base, self.causal, self.window, self.rotary_width = base, causal, window, int(rotary_width)
        self.scaling = None if scaling is None else dict(scaling)
        if query_key_norm is not None:
            linears: tuple[Any, ...] = self.query, self.key
            widths = [D if query_key_norm == "heads" else linear.w.data.shape[1] for linear in linears]
            self.query, self.key = (
                NormedLinear(linear, RMSNorm(width, eps)) for linear, width in zip(linears, widths, strict=True)
            )

    def forward(self, x: Array, pattern: ops.Pattern | None = None) -> tuple[Array, RotarySelfAttentionCache]:
        expect_floating(x=x)
        expect_shape("x", x, "B T C", C=self.d_model)
        q, query = self.query.forward(x)
        k, key = self.key.forward(x)
        v, value = self.value.forward(x)
        q, rotated_q = self.rotate(q)
        k, rotated_k = self.rotate(k)
        y, attention = ops.attention(q, k, self.split_heads(v), self.seen(pattern, self.causal))
        y, unify = self.unify.forward(self.join_heads(y))
        return y, RotarySelfAttentionCache(query, key, value, rotated_q, rotated_k, attention, unify)

    def backward(self, dy: Array, cache: RotarySelfAttentionCache) -> Array:
        expect_backward(cache, RotarySelfAttentionCache, dy=dy)
        dy = self.unify.backward(dy, cache.unify)
        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)
        dq = self.rotate_back(dq, cache.rotated_q)
        dk = self.rotate_back(dk, cache.rotated_k)
        dx = self.query.backward(self.join_heads(dq), cache.query)
        dx = add_backward(dx, self.key, self.join_heads(dk), cache.key)
        dx = add_backward(dx, self.value, self.join_heads(dv), cache.value)
        return dx

    def extend(self, x: Array, stored: tuple[Array, Array], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C), after `past` positions whose keys and values are stored.

        stored: from `allocate`, filled up to `past`; the rotated keys and the values of x are written after that.
        Causal, in addition to any given pattern. A pattern counts keys from the first stored one.
        """
        (keys, values), total, past = stored, length_with(x, stored[0], past), int(past)
        keys[:, :, past:total], _ = self.rotate(self.key(x), past)
        values[:, :, past:total] = self.split_heads(self.value(x))
        q, _ = self.rotate(self.query(x), past)
        pattern = self.seen(pattern, causal=x.shape[1] > 1)  # a single new position is the last
        y, _ = ops.attention(q, keys[:, :, :total], values[:, :, :total], pattern)
        return self.unify(self.join_heads(y))

    def seen(self, pattern: ops.Pattern | None, causal: bool) -> ops.Pattern | None:
        """`pattern`, restricted to the window and, if `causal`, to earlier positions."""
        window = None if self.window is None else ops.Local(self.window - 1)
        for restriction in (window, ops.Causal() if causal else None):
            if restriction is not None:
                pattern = restriction if pattern is None else restriction & pattern
        return pattern

    def rotate(self, x: Array, start: int = 0) -> tuple[Array, Any]:
        """The heads (B, heads, T, D) of x (B, T, heads · D), rotated by their positions from `start` on; the cache."""
        x, N = self.split_heads(x), self.rotary_width
        if not N:
            return x, None
        y, cache = ops.rotary(x[..., :N], start, self.base, self.scaling)
        return self.before_rest(y, x), cache

    def rotate_back(self, dy: Array, cache: Any) -> Array:
        """The gradient of what `rotate` rotated, in heads."""
        N = self.rotary_width
        return self.before_rest(ops.rotary_backward(dy[..., :N], cache), dy) if N else dy

    def before_rest(self, rotated: Array, x: Array) -> Array:
        """The rotated numbers of each head, and the others of x (B, heads, T, D)."""
        N = self.rotary_width
        if N == x.shape[3]:
            return rotated
        return array_module(x).concatenate([rotated, x[..., N:]], axis=3)

"""Multi-head self-attention and cross-attention."""

from __future__ import annotations

from collections import namedtuple
from operator import index
from typing import Any

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_boolean, expect_floating, expect_positive, expect_shape
from ..rng import Key, fold
from .layer import Layer, add_backward, expect_backward
from .pointwise import Linear

MultiHeadCache = namedtuple("MultiHeadCache", "query key value attention unify")


class MultiHead(Layer):
    """The projections of multi-head attention, and how their columns become heads.

    d_model: C. heads: H, of queries. kv_heads: G, of keys and values. head_width: D. bias: whether the query, key and
    value projections have one. output_bias: whether `unify` has one, the projection from all heads to the output.
    """

    def __init__(
        self, d_model: int, heads: int, kv_heads: int, head_width: int, bias: bool, output_bias: bool, key: Key
    ) -> None:
        heads, kv_heads, head_width = int(heads), int(kv_heads), int(head_width)  # NumPy's small integers overflow
        self.d_model, self.heads, self.kv_heads, self.head_width = int(d_model), heads, kv_heads, head_width
        self.query: Layer = Linear(d_model, heads * head_width, bias, fold(key, "query"))
        self.key: Layer = Linear(d_model, kv_heads * head_width, bias, fold(key, "key"))
        self.value = Linear(d_model, kv_heads * head_width, bias, fold(key, "value"))
        self.unify = Linear(heads * head_width, d_model, output_bias, fold(key, "unify"))

    def allocate(self, x: Array, length: int) -> tuple[Array, Array]:
        """Room for the keys and values (B, G, length, D) of sequences like x (B, any T, C): see `Stack`.

        In memory keys are (B, G, D, length), so that Σ_d q_d K_sd and Σ_s p_s V_sd are both rows times matrices.
        """
        xp, B, G, D = array_module(x), x.shape[0], self.kv_heads, self.head_width
        return xp.empty((B, G, D, length), x.dtype).swapaxes(2, 3), xp.empty((B, G, length, D), x.dtype)

    def split_heads(self, x: Array) -> Array:
        """(B, T, H D) -> (B, H, T, D), a view; and the same for the G heads of keys and values."""
        B, T, width = x.shape
        return x.reshape(B, T, width // self.head_width, self.head_width).transpose(0, 2, 1, 3)

    def join_heads(self, x: Array) -> Array:
        """(B, H, T, D) -> (B, T, H D)."""
        B, H, T, D = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)


class CrossAttention(MultiHead):
    """Each position of x attends to another sequence, the memory: queries come from x, keys and values from the memory.

    d_model: C, the width of x (B, T, C), memory (B, M, C) and y (B, T, C).
    heads: H. wide: False gives "narrow" heads of width D = C/H, which together cost as much as one head of width C;
    True gives every head the full width D = C, at H times the cost. bias: whether the query, key and value projections
    have a bias (the tutorial's have none); the output projection, `unify`, always has one. Raises ValueError if heads
    are narrow and H does not divide C.

    All heads are computed at once. A projection to H D columns is H projections to D columns side by side. So
    (B, T, H D) is reshaped to (B, T, H, D) and transposed to (B, H, T, D), where the heads are a second batch axis.

    Forward. With the columns of head h of each projection,

        wq_chd = query.w_{c,h D + d}        wk_chd = key.w_{c,h D + d}        wv_chd = value.w_{c,h D + d}
        q_bhtd = Σ_c x_btc wq_chd        k_bhsd = Σ_c memory_bsc wk_chd        v_bhsd = Σ_c memory_bsc wv_chd

    Let the text of sequence b of the memory be its first m_b positions, and the rest padding. The pattern `Padding(m)`
    ends the sums there:

        z_bhts = Σ_d q_bhtd k_bhsd/√D        p_bhts = [s < m_b] exp(z_bhts) / Σ_s' [s' < m_b] exp(z_bhts')
        u_bhtd = Σ_s p_bhts v_bhsd        y_btc = Σ_h Σ_d u_bhtd unify.w_{h D + d,c} + unify.b_c

    Backward. Reshaping and transposing only move numbers, and their backward moves them back. By `linear` and
    `attention`,

        du_bhtd = Σ_c dy_btc unify.w_{h D + d,c}        dp_bhts = Σ_d du_bhtd v_bhsd
        dz_bhts = p_bhts (dp_bhts − Σ_s' p_bhts' dp_bhts')        da_bhts = dz_bhts/√D
        dq_bhtd = Σ_s da_bhts k_bhsd        dk_bhsd = Σ_t da_bhts q_bhtd        dv_bhsd = Σ_t p_bhts du_bhtd

    x feeds only the queries. The memory feeds keys and values, so its gradient has two terms:

        dx_btc = Σ_h Σ_d dq_bhtd wq_chd
        dmemory_bsc = Σ_h Σ_d dk_bhsd wk_chd + Σ_h Σ_d dv_bhsd wv_chd

    In code:

        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)
        dmemory = self.key.backward(self.join_heads(dk), cache.key)
        dmemory = add_backward(dmemory, self.value, self.join_heads(dv), cache.value)
        dx = self.query.backward(self.join_heads(dq), cache.query)

    The gradient of a projection, by `linear`, sums over the positions that it was applied to:

        dquery.w_{c,h D + d} = Σ_b Σ_t x_btc dq_bhtd
        dkey.w_{c,h D + d} = Σ_b Σ_s memory_bsc dk_bhsd        dvalue.w_{c,h D + d} = Σ_b Σ_s memory_bsc dv_bhsd
        dunify.w_{h D + d,c} = Σ_b Σ_t u_bhtd dy_btc        dunify.b_c = Σ_b Σ_t dy_btc

    In the padding of the memory, s ≥ m_b, p_bhts = 0 and so da_bhts = 0 for every t. Each term of dk_bhsd and dv_bhsd
    has one of them as a factor, so no gradient reaches the padding. Each position before it collects the gradients of
    all heads and queries:

        dmemory_bsc = [s < m_b] Σ_h Σ_t Σ_d (da_bhts q_bhtd wk_chd + p_bhts du_bhtd wv_chd)

    The padding of x needs no pattern: the loss ignores its y. Where dy_btc = 0 for every c, du_bhtd, dp_bhts and
    da_bhts are 0 too, so such a t adds nothing to any gradient. `backward` returns (dx, dmemory).
    """

    def __init__(self, d_model: int, heads: int, wide: bool = False, bias: bool = False, key: Key = Key(0)) -> None:
        expect_positive(d_model=d_model, heads=heads)
        expect_boolean(wide=wide, bias=bias)
        if d_model % heads and not wide:
            raise ValueError(f"heads: {heads} does not divide d_model {d_model}")
        super().__init__(d_model, heads, heads, d_model if wide else d_model // heads, bias, True, key)

    def forward(self, x: Array, memory: Array, pattern: ops.Pattern | None = None) -> tuple[Array, MultiHeadCache]:
        """x: (B, T, C), memory: (B, M, C), pattern: which queries may see which positions of the memory."""
        expect_floating(x=x, memory=memory)
        expect_shape("x", x, "B T C", C=self.d_model)
        expect_shape("memory", memory, "B M C", B=x.shape[0], C=self.d_model)
        q, query = self.query.forward(x)
        k, key = self.key.forward(memory)
        v, value = self.value.forward(memory)
        y, attention = ops.attention(self.split_heads(q), self.split_heads(k), self.split_heads(v), pattern)
        y, unify = self.unify.forward(self.join_heads(y))
        return y, MultiHeadCache(query, key, value, attention, unify)

    def backward(self, dy: Array, cache: MultiHeadCache, together: bool = False) -> Any:
        """(dx, dmemory), or their sum if x is the memory, `together`."""
        expect_backward(cache, MultiHeadCache, dy=dy)
        dy = self.unify.backward(dy, cache.unify)
        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)
        dmemory = self.key.backward(self.join_heads(dk), cache.key)
        dmemory = add_backward(dmemory, self.value, self.join_heads(dv), cache.value)
        if together:
            return add_backward(dmemory, self.query, self.join_heads(dq), cache.query)
        dx = self.query.backward(self.join_heads(dq), cache.query)
        return dx, dmemory

    def project(self, memory: Array) -> tuple[Array, Array]:
        """The keys and values (B, H, M, D) of a memory (B, M, C), for `attend`."""
        return self.split_heads(self.key(memory)), self.split_heads(self.value(memory))

    def attend(self, x: Array, k: Array, v: Array, pattern: ops.Pattern | None = None) -> Array:
        """The output of `forward` for x (B, T, C), given the keys and values of the memory, from `project`."""
        y, _ = ops.attention(self.split_heads(self.query(x)), k, v, pattern)
        return self.unify(self.join_heads(y))


class SelfAttention(CrossAttention):
    """Multi-head self-attention: `CrossAttention` with x as its own memory.

    causal: position t sees only positions up to t, in addition to any given pattern. The other arguments are those of
    `CrossAttention`. x, y: (B, T, C).

    Forward, for each sequence: as in `CrossAttention`. Let m_ts be 1 if position t may see position s, else 0; with
    `causal`, m_ts = 0 for s > t.

        wq_chd = query.w_{c,h D + d}        wk_chd = key.w_{c,h D + d}        wv_chd = value.w_{c,h D + d}
        q_htd = Σ_c x_tc wq_chd        k_hsd = Σ_c x_sc wk_chd        v_hsd = Σ_c x_sc wv_chd
        z_hts = Σ_d q_htd k_hsd/√D
        Z_ht = Σ_s m_ts exp(z_hts)        p_hts = m_ts exp(z_hts)/Z_ht where Σ_s' m_ts' > 0, 0 elsewhere
        a_htd = Σ_s p_hts v_hsd        y_tc = Σ_h Σ_d a_htd unify.w_{h D + d,c} + unify.b_c

    Backward. All heads are added up in y, so each gets the gradient of y through its own rows of `unify`. Then, inside
    each head, by `attention`:

        da_htd = Σ_c dy_tc unify.w_{h D + d,c}        dp_hts = Σ_d da_htd v_hsd
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')
        dq_htd = Σ_s dz_hts k_hsd/√D        dk_hsd = Σ_t dz_hts q_htd/√D        dv_hsd = Σ_t p_hts da_htd

    Every head uses x three times, for its queries, keys and values. So dx is a sum over the heads and over the three
    uses. `CrossAttention` returns it in two parts: du from the queries, and dmemory from the keys and values.

        du_tc = Σ_h Σ_d dq_htd wq_chd
        dmemory_sc = Σ_h Σ_d dk_hsd wk_chd + Σ_h Σ_d dv_hsd wv_chd
        dx_tc = du_tc + dmemory_tc

    The weights of each projection get a sum over all positions of all sequences b, by `linear`:

        dquery.w_{c,h D + d} = Σ_b Σ_t x_btc dq_bhtd        dkey.w_{c,h D + d} = Σ_b Σ_s x_bsc dk_bhsd
        dvalue.w_{c,h D + d} = Σ_b Σ_s x_bsc dv_bhsd        dunify.w_{h D + d,c} = Σ_b Σ_t a_bhtd dy_btc
        dunify.b_c = Σ_b Σ_t dy_btc

    In code:

        dx = super().backward(dy, cache, together=True)
    """

    def __init__(
        self, d_model: int, heads: int, causal: bool = False, wide: bool = False, bias: bool = False, key: Key = Key(0)
    ) -> None:
        super().__init__(d_model, heads, wide, bias, key)
        expect_boolean(causal=causal)
        self.causal = causal

    def forward(self, x: Array, pattern: ops.Pattern | None = None) -> tuple[Array, MultiHeadCache]:
        if self.causal:
            pattern = causal(pattern)
        return super().forward(x, x, pattern)

    def backward(self, dy: Array, cache: MultiHeadCache) -> Array:
        dx = super().backward(dy, cache, together=True)
        return dx

    def extend(self, x: Array, stored: tuple[Array, Array], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C), after `past` positions whose keys and values are stored.

        stored: from `allocate`, filled up to `past`; the keys and values of x are written after that. Causal, in
        addition to any given pattern. A pattern counts keys from the first stored one. Raises ValueError if there is no
        room for x.
        """
        (keys, values), total = stored, length_with(x, stored[0], past)
        keys[:, :, past:total] = self.split_heads(self.key(x))
        values[:, :, past:total] = self.split_heads(self.value(x))
        q = self.split_heads(self.query(x))
        if x.shape[1] > 1:  # a single new position is the last, with no later one to hide
            pattern = causal(pattern)
        y, _ = ops.attention(q, keys[:, :, :total], values[:, :, :total], pattern)
        return self.unify(self.join_heads(y))


def length_with(x: Array, keys: Array, past: int) -> int:
    """The length of `past` positions and those of x (B, T, C). Raises ValueError if `keys` (B, H, S, D) has no room."""
    total = index(past) + x.shape[1]
    if not 0 <= past <= total <= keys.shape[2]:
        raise ValueError(f"past: expected 0 to {keys.shape[2] - x.shape[1]}, for which there is room, got {past}")
    return total


def causal(pattern: ops.Pattern | None) -> ops.Pattern:
    """`pattern`, restricted so that no position sees a later one; None allows all pairs."""
    return ops.Causal() if pattern is None else ops.Causal() & pattern

"""Multi-head attention: of a sequence to itself, and of one sequence to another."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..ops.checks import expect_boolean, expect_floating, expect_positive, expect_shape
from ..rng import Key
from .layer import Layer
from .linear import Linear


class MultiHeadCache(NamedTuple):
    query: Any
    key: Any
    value: Any
    attention: Any
    unify: Any


class CrossAttention(Layer):
    """Queries from one sequence, keys and values from another: y_t is a mean over the memory, chosen by x_t.

    d_model: C, the width of x (B, T, C), of memory (B, M, C) and of y (B, T, C).
    heads: H. wide: False gives "narrow" heads of width D = C/H, which split the work of one head of width C; True
    gives every head the full width D = C, at H times the cost. bias: of the query, key and value maps (the tutorial
    has none); the map that unifies the heads always has one. Raises ValueError if narrow heads do not divide C.

    All heads are computed at once. A map to H·D columns is H maps to D columns side by side, so that (B, T, H D) is
    cut into (B, T, H, D), and the heads are brought in front of time, (B, H, T, D), as a second batch axis.

    Backward. Cutting and moving axes only places numbers; their backward puts them back. x feeds queries alone. The
    memory feeds keys and values: with wk_chd and wv_chd for head h's columns of the two maps,

        k_bhsd = Σ_c memory_bsc wk_chd        v_bhsd = Σ_c memory_bsc wv_chd

    so its gradient is the sum of what both pass back:

        dmemory = self.key.backward(self.join_heads(dk), cache.key)
        dmemory = dmemory + self.value.backward(self.join_heads(dv), cache.value)

    With both sides padded: of sequence b let n_b places of x be text, and m_b of the M places of the memory, which are
    the S keys. By the pattern `Padding(m)` the sums over the memory end at m_b. With z_bhts = Σ_d q_bhtd k_bhsd/√D,

        p_bhts = [s < m_b] exp(z_bhts) / Σ_s' [s' < m_b] exp(z_bhts')      y_bhtd = Σ_s p_bhts v_bhsd

    and by `attention` the gradients are, with dp_bhts = Σ_d dy_bhtd v_bhsd,

        dz_bhts = p_bhts (dp_bhts − Σ_s' p_bhts' dp_bhts')      da_bhts = dz_bhts/√D
        dq_bhtd = Σ_s da_bhts k_bhsd      dk_bhsd = Σ_t da_bhts q_bhtd      dv_bhsd = Σ_t p_bhts dy_bhtd

    A place s ≥ m_b of the memory has p_bhts = 0, and so da_bhts = 0, for every t. One of the two is a factor of each
    term of dk_bhsd and dv_bhsd, so both gradients are 0 there. No pattern is needed for a place t ≥ n_b of x. Its y is
    a number that nobody uses: a loss that does not count it has dy_bhtd = 0, hence dp_bhts = da_bhts = 0, and it adds
    nothing to any dk, dv or dq. Each place of the memory collects the gradients of all heads and queries:

        dmemory_bsc = [s < m_b] Σ_h Σ_t Σ_d [t < n_b] (p_bhts dy_bhtd wv_chd + da_bhts q_bhtd wk_chd)

    Backward gives (dx, dmemory).
    """

    def __init__(self, d_model: int, heads: int, wide: bool = False, bias: bool = False, key: Key = Key(0)) -> None:
        expect_positive(d_model=d_model, heads=heads)
        expect_boolean(wide=wide, bias=bias)
        if d_model % heads and not wide:
            raise ValueError(f"heads: {heads} does not divide d_model {d_model}")
        self.d_model, self.heads = d_model, heads
        width = d_model * heads if wide else d_model  # H D
        self.query = Linear(d_model, width, bias, key.fold("query"))
        self.key = Linear(d_model, width, bias, key.fold("key"))
        self.value = Linear(d_model, width, bias, key.fold("value"))
        self.unify = Linear(width, d_model, key=key.fold("unify"))

    def forward(self, x: Array, memory: Array, pattern: ops.Pattern | None = None) -> tuple[Array, MultiHeadCache]:
        """x: (B, T, C), memory: (B, M, C), pattern: which queries may see which places of the memory."""
        expect_floating(x=x, memory=memory)
        expect_shape("x", x, "B T C", C=self.d_model)
        expect_shape("memory", memory, "B M C", B=x.shape[0], C=self.d_model)
        q, query = self.query.forward(x)
        k, key = self.key.forward(memory)
        v, value = self.value.forward(memory)
        y, attention = ops.attention(*(self.split_heads(a) for a in (q, k, v)), pattern)
        y, unify = self.unify.forward(self.join_heads(y))
        return y, MultiHeadCache(query, key, value, attention, unify)

    def backward(self, dy: Array, cache: MultiHeadCache) -> tuple[Array, Array]:
        dy = self.unify.backward(dy, cache.unify)
        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)
        dx = self.query.backward(self.join_heads(dq), cache.query)
        dmemory = self.key.backward(self.join_heads(dk), cache.key)
        dmemory = dmemory + self.value.backward(self.join_heads(dv), cache.value)
        return dx, dmemory

    def project(self, memory: Array) -> tuple[Array, Array]:
        """The keys and values (B, H, M, D) of a memory (B, M, C), for `attend`."""
        return self.split_heads(self.key(memory)), self.split_heads(self.value(memory))

    def attend(self, x: Array, k: Array, v: Array, pattern: ops.Pattern | None = None) -> Array:
        """What `forward` gives for x (B, T, C), of a memory whose keys and values are known."""
        y, _ = ops.attention(self.split_heads(self.query(x)), k, v, pattern)
        return self.unify(self.join_heads(y))

    def allocate(self, x: Array, length: int) -> tuple[Array, Array]:
        """Room for the keys and values (B, H, length, D) of sequences like x (B, any T, C): see `Stack`."""
        width = self.query.w.data.shape[1]
        shape = (x.shape[0], self.heads, length, width // self.heads)
        xp = array_module(x)
        return xp.empty(shape, x.dtype), xp.empty(shape, x.dtype)

    def split_heads(self, x: Array) -> Array:
        """(B, T, H D) -> (B, H, T, D), a view."""
        B, T, width = x.shape
        return x.reshape(B, T, self.heads, width // self.heads).transpose(0, 2, 1, 3)

    def join_heads(self, x: Array) -> Array:
        """(B, H, T, D) -> (B, T, H D)."""
        B, H, T, D = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)


class SelfAttention(CrossAttention):
    """Multi-head attention of a sequence to itself: `CrossAttention` whose memory is x.

    causal: position t sees only positions up to t, on top of any pattern that is given. The rest as in
    `CrossAttention`. x, y: (B, T, C).

    Backward. x is both the queries' and the memory's sequence, so its gradient is the sum of the two.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        causal: bool = False,
        wide: bool = False,
        bias: bool = False,
        key: Key = Key(0),
    ) -> None:
        super().__init__(d_model, heads, wide, bias, key)
        expect_boolean(causal=causal)
        self.causal = causal

    def forward(self, x: Array, pattern: ops.Pattern | None = None) -> tuple[Array, MultiHeadCache]:
        if self.causal:
            pattern = causal(pattern)
        return super().forward(x, x, pattern)

    def backward(self, dy: Array, cache: MultiHeadCache) -> Array:
        dx, dmemory = super().backward(dy, cache)
        return dx + dmemory

    def extend(self, x: Array, stored: tuple[Array, Array], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C), whose `past` predecessors have their keys and values stored.

        stored: as `allocate` made it, filled up to `past`; the keys and values of x are written next. Causal, on top of
        any pattern that is given; a pattern counts from the first key that is stored.
        """
        (keys, values), total = stored, past + x.shape[1]
        keys[:, :, past:total] = self.split_heads(self.key(x))
        values[:, :, past:total] = self.split_heads(self.value(x))
        q = self.split_heads(self.query(x))
        if x.shape[1] > 1:  # a last position has no later one
            pattern = causal(pattern)
        y, _ = ops.attention(q, keys[:, :, :total], values[:, :, :total], pattern)
        return self.unify(self.join_heads(y))


def causal(pattern: ops.Pattern | None) -> ops.Pattern:
    """The pattern that also forbids every position to see a later one; None stands for all pairs."""
    return ops.Causal() if pattern is None else ops.Causal() & pattern

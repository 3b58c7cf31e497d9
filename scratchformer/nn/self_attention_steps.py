"""Self-attention one step at a time, as in the tutorial: each class adds one idea to the one before.

- BasicSelfAttention: no parameters; a sequence attends to itself.
- SingleHeadAttention: queries, keys and values, scaling, and a causal mask.
- MultiHeadLoop: several narrow heads, one after another, and an output projection that unifies them.

They are for reading; tests compare each with the next. `attention.SelfAttention` computes all heads at once.
Source: Bloem, "Transformers from scratch", 2019.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_boolean, expect_floating, expect_like, expect_positive, expect_shape
from ..rng import Key, fold
from .layer import Layer, expect_backward
from .pointwise import Linear


class BasicCache(NamedTuple):
    x: Array  # (B, T, C)
    weights: Array  # (B, T, T)
    softmax: Any


class BasicSelfAttention(Layer):
    """y_t = Σ_s w_ts x_s with w_t = softmax_s(x_t · x_s): a mean of all vectors, weighted by their similarity to x_t.

    x: (B, T, C). No parameters, no scaling.

    Forward, for each sequence:

        w := weights
        z_ts = Σ_c x_tc x_sc        w_ts = softmax_s(z_ts)        y_tc = Σ_s w_ts x_sc

    Backward. The gradients of the weights and, through the softmax of each row (see `softmax`), of the scores are

        dw_ts = Σ_c dy_tc x_sc        dz_ts = w_ts (dw_ts − Σ_s' w_ts' dw_ts')

    x is used three times, and its gradient is the sum over the three uses: as a value, as a query, and as a key.

        dx_sc = Σ_t w_ts dy_tc + Σ_t dz_st x_tc + Σ_t dz_ts x_tc

    In matrices:

        dz = ops.softmax_backward(dy @ x.swapaxes(-1, -2), softmax)
        dx = weights.swapaxes(-1, -2) @ dy + dz @ x + dz.swapaxes(-1, -2) @ x
    """

    def forward(self, x: Array) -> tuple[Array, BasicCache]:
        expect_floating(x=x)
        expect_shape("x", x, "B T C")
        weights, cache = ops.softmax(x @ x.swapaxes(-1, -2))
        return weights @ x, BasicCache(x, weights, cache)

    def backward(self, dy: Array, cache: BasicCache) -> Array:
        expect_backward(cache, BasicCache, dy=dy)
        x, weights, softmax = cache
        expect_like("dy", dy, x.shape)
        dz = ops.softmax_backward(dy @ x.swapaxes(-1, -2), softmax)
        dx = weights.swapaxes(-1, -2) @ dy + dz @ x + dz.swapaxes(-1, -2) @ x
        return dx


SingleHeadCache = namedtuple("SingleHeadCache", "query key value attention")


class SingleHeadAttention(Layer):
    """One head: three matrices project x to queries, keys and values.

    d_model: C, the width of x (B, T, C). d_head: D, the width of the head and of y (B, T, D); C by default.
    causal: position t sees only positions up to t.

    Forward, with `attention` of one head:

        q_td = Σ_c x_tc query.w_cd        k_sd = Σ_c x_sc key.w_cd        v_sd = Σ_c x_sc value.w_cd
        z_ts = Σ_d q_td k_sd/√D

    Position t sees the positions s with m_ts = 1; with `causal`, m_ts = 0 for s > t:

        p_ts = m_ts exp(z_ts)/Σ_s' m_ts' exp(z_ts')        y_td = Σ_s p_ts v_sd

    Backward. As in `attention`,

        dv_sd = Σ_t p_ts dy_td        dp_ts = Σ_d dy_td v_sd        dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')
        dq_td = Σ_s dz_ts k_sd/√D        dk_sd = Σ_t dz_ts q_td/√D

    x feeds all three, so its gradient is the sum over the three paths:

        dx_tc = Σ_d dq_td query.w_cd + Σ_d dk_td key.w_cd + Σ_d dv_td value.w_cd

    The weights of each projection get a sum over all positions of all sequences b, by `linear`:

        dquery.w_cd = Σ_b Σ_t x_btc dq_btd
        dkey.w_cd = Σ_b Σ_s x_bsc dk_bsd        dvalue.w_cd = Σ_b Σ_s x_bsc dv_bsd

    In code:

        dq, dk, dv = (d[:, 0] for d in ops.attention_backward(dy[:, None], cache.attention))
        dx = self.query.backward(dq, cache.query) + self.key.backward(dk, cache.key)
        dx = dx + self.value.backward(dv, cache.value)
    """

    def __init__(self, d_model: int, d_head: int | None = None, causal: bool = False, key: Key = Key(0)) -> None:
        d_head = d_model if d_head is None else d_head
        expect_positive(d_model=d_model, d_head=d_head)
        expect_boolean(causal=causal)
        self.query = Linear(d_model, d_head, bias=False, key=fold(key, "query"))
        self.key = Linear(d_model, d_head, bias=False, key=fold(key, "key"))
        self.value = Linear(d_model, d_head, bias=False, key=fold(key, "value"))
        self.causal = causal

    def forward(self, x: Array) -> tuple[Array, SingleHeadCache]:
        expect_floating(x=x)
        expect_shape("x", x, "B T C", C=self.query.w.data.shape[0])
        q, query = self.query.forward(x)
        k, key = self.key.forward(x)
        v, value = self.value.forward(x)
        one_head = (slice(None), None)  # (B, T, D) -> (B, 1, T, D)
        pattern = ops.Causal() if self.causal else None
        y, attention = ops.attention(q[one_head], k[one_head], v[one_head], pattern)
        return y[:, 0], SingleHeadCache(query, key, value, attention)

    def backward(self, dy: Array, cache: SingleHeadCache) -> Array:
        expect_backward(cache, SingleHeadCache, dy=dy)
        dq, dk, dv = (d[:, 0] for d in ops.attention_backward(dy[:, None], cache.attention))
        dx = self.query.backward(dq, cache.query) + self.key.backward(dk, cache.key)
        dx = dx + self.value.backward(dv, cache.value)
        return dx


class MultiHeadLoopCache(NamedTuple):
    heads: list[SingleHeadCache]
    unify: Any


class MultiHeadLoop(Layer):
    """y = [head_1(x), ..., head_H(x)] w + b: narrow heads of width C/H, computed in a loop, concatenated and unified.

    x, y: (B, T, C). Raises ValueError if `heads` does not divide `d_model`.

    Forward, with two heads, whose outputs are u and v. After concatenation, column d of the first head is column 0 + d,
    and column d of the second head is column D + d:

        x1 = x        x2 = x        u = head1(x1)        v = head2(x2)
        y_to = Σ_d u_td unify.w_{0 + d,o} + Σ_d v_td unify.w_{D + d,o} + unify.b_o

    Backward. Concatenation only moves numbers, so each head gets its own columns of the gradient:

        du_td = Σ_o dy_to unify.w_{0 + d,o}        dv_td = Σ_o dy_to unify.w_{D + d,o}

    and each head is multiplied by its own rows of the weights, in all sequences b:

        dunify.w_jo = Σ_b Σ_t u_{b,t,0 + j} dy_bto where j < D, Σ_b Σ_t v_{b,t,j − D} dy_bto elsewhere
        dunify.b_o = Σ_b Σ_t dy_bto

    Both heads read the same x, as x1 and as x2, so dx is the sum over the heads:

        dx1 = head1_backward(du, x1)        dx2 = head2_backward(dv, x2)        dx_tc = dx1_tc + dx2_tc
    """

    def __init__(self, d_model: int, heads: int, causal: bool = False, key: Key = Key(0)) -> None:
        expect_positive(d_model=d_model, heads=heads)
        if d_model % heads:
            raise ValueError(f"heads: {heads} does not divide d_model {d_model}")
        self.heads = [
            SingleHeadAttention(d_model, d_model // heads, causal, fold(key, "head", h)) for h in range(heads)
        ]
        self.unify = Linear(d_model, d_model, key=fold(key, "unify"))

    def forward(self, x: Array) -> tuple[Array, MultiHeadLoopCache]:
        outputs, caches = zip(*(head.forward(x) for head in self.heads), strict=True)
        y, unify = self.unify.forward(array_module(x).concatenate(outputs, axis=-1))
        return y, MultiHeadLoopCache(list(caches), unify)

    def backward(self, dy: Array, cache: MultiHeadLoopCache) -> Array:
        expect_backward(cache, MultiHeadLoopCache, dy=dy)
        d_heads = self.unify.backward(dy, cache.unify)  # (B, T, C)
        columns = array_module(dy).split(d_heads, len(self.heads), axis=-1)
        return sum(head.backward(d, c) for head, d, c in zip(self.heads, columns, cache.heads, strict=True))

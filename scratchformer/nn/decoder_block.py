"""The decoder block: a transformer block that also attends to another sequence."""

from __future__ import annotations

from typing import NamedTuple

from .. import ops
from ..backend import Array
from ..checks import expect_fraction, expect_one_of
from ..dispatch import operation
from ..rng import Key, fold
from .attention import CrossAttention, SelfAttention
from .block import ORDERS, Residual, ResidualCache, Stored
from .layer import Layer, Part, expect_backward
from .pointwise import Dropout, FeedForward, LayerNorm


class DecoderBlockCache(NamedTuple):
    attention: ResidualCache
    cross: ResidualCache
    feedforward: ResidualCache


class DecoderBlock(Layer):
    """Causal self-attention, cross-attention to a memory, and a feed-forward layer, each with a residual and a norm.

    | post-norm, as in the paper:
    |     g = norm1(x + attention(x))        h = norm2(g + cross(g, memory))        y = norm3(h + feedforward(h))
    | pre-norm:
    |     g = x + attention(norm1(x))        h = g + cross(norm2(g), memory)        y = h + feedforward(norm3(h))

    x, y: (B, T, C). memory: (B, M, C), the encoder's output for the other sequence. pattern: which queries may see
    which positions of the memory (usually its `Padding`). The other arguments are those of `TransformerBlock`.

    Backward. Each of the three sums passes its gradient on twice: around its branch and through it. Cross-attention
    passes a second gradient back, to the memory, which is used only there. For the names see `TransformerBlock`.

    Post-norm:

        n = x        a = attention(n)        s_tc = x_tc + a_tc        g = norm1(s)
        w = g        c = cross(w, memory)        r_tc = g_tc + c_tc        h = norm2(r)
        u = h        f = feedforward(u)        o_tc = h_tc + f_tc        y = norm3(o)
        do = norm3_backward(dy, o)        du = feedforward_backward(do, u)        dh_tc = do_tc + du_tc
        dr = norm2_backward(dh, r)        dw = cross_backward(dr, w, memory)        dg_tc = dr_tc + dw_tc
        ds = norm1_backward(dg, s)        dn = attention_backward(ds, n)        dx_tc = ds_tc + dn_tc
        dmemory = cross_backward_memory(dr, w, memory)

    Pre-norm:

        s = x        n = norm1(s)        a = attention(n)        g_tc = x_tc + a_tc
        r = g        w = norm2(r)        c = cross(w, memory)        h_tc = g_tc + c_tc
        o = h        u = norm3(o)        f = feedforward(u)        y_tc = h_tc + f_tc
        du = feedforward_backward(dy, u)        do = norm3_backward(du, o)        dh_tc = dy_tc + do_tc
        dw = cross_backward(dh, w, memory)        dr = norm2_backward(dw, r)        dg_tc = dh_tc + dr_tc
        dn = attention_backward(dg, n)        ds = norm1_backward(dn, s)        dx_tc = dg_tc + ds_tc
        dmemory = cross_backward_memory(dh, w, memory)

    If the memory is padded, its padding has probability 0 for every query, so the keys and values there get no gradient
    (see `attention`). If x is padded, the loss ignores its padding: dy is 0 there, so those queries pass nothing to the
    memory, and because self-attention is causal, no position before the end of x has seen them. `backward` returns
    (dx, dmemory). The encoder's output goes to every block, so a `Stack` adds up the dmemory of its blocks.

    Source: Vaswani et al., "Attention is all you need", 2017, sections 3.1 and 3.2.3, figure 1.
    """

    attention, norm1 = Part("first.branch"), Part("first.norm")
    cross, norm2 = Part("second.branch"), Part("second.norm")
    feedforward, norm3 = Part("third.branch"), Part("third.norm")
    dropout = Part("first.dropout", "second.dropout", "third.dropout")
    norm = Part("first.order", "second.order", "third.order")

    def __init__(
        self,
        d_model: int,
        heads: int,
        norm: str = "post",
        d_ff: int | None = None,
        activation: ops.Activation = "relu",
        dropout: float = 0.0,
        bias: bool = False,
        eps: float = 1e-5,
        key: Key = Key(0),
    ) -> None:
        expect_one_of("norm", norm, ORDERS)
        expect_fraction("dropout", dropout, letter="p")
        branches = (
            SelfAttention(d_model, heads, causal=True, bias=bias, key=fold(key, "attention")),
            CrossAttention(d_model, heads, bias=bias, key=fold(key, "cross")),
            FeedForward(d_model, d_ff, activation, fold(key, "feedforward")),
        )
        shared = Dropout(dropout)
        self.first, self.second, self.third = (
            Residual(branch, LayerNorm(d_model, eps), norm, shared) for branch in branches
        )

    def forward(
        self, x: Array, memory: Array, pattern: ops.Pattern | None = None, key: Key | None = None
    ) -> tuple[Array, DecoderBlockCache]:
        g, attention = self.first.forward(x, key=fold(key, 1))
        h, cross = self.second.forward(g, memory, pattern, key=fold(key, 2))
        y, feedforward = self.third.forward(h, key=fold(key, 3))
        return y, DecoderBlockCache(attention, cross, feedforward)

    def backward(self, dy: Array, cache: DecoderBlockCache) -> tuple[Array, Array]:
        expect_backward(cache, DecoderBlockCache, dy=dy)
        dh = self.third.backward(dy, cache.feedforward)
        dg, dmemory = self.second.backward(dh, cache.cross)
        return self.first.backward(dg, cache.attention), dmemory

    def allocate(self, x: Array, length: int) -> Stored:
        """Room for the keys and values of `length` target positions: see `Stack`."""
        return self.attention.allocate(x, length)

    def extend(
        self, x: Array, stored: Stored, past: int, memory: tuple[Array, Array], pattern: ops.Pattern | None = None
    ) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones, without dropout: see `Stack`.

        memory: the keys and values that `cross.project` returns for the encoder's output. pattern: for the memory.
        """
        return extend_decoder_block(x, self, stored, past, pattern, memory)


@operation
def extend_decoder_block(
    x: Array, block: DecoderBlock, stored: Stored, past: int, pattern: ops.Pattern | None, memory: tuple[Array, Array]
) -> Array:
    """What `DecoderBlock.extend` returns: forward only, with the keys and values of past positions stored."""
    g = block.first.around(lambda n: block.attention.extend(n, stored, past), x)
    h = block.second.around(lambda n: block.cross.attend(n, *memory, pattern), g)
    return block.third.around(block.feedforward, h)

"""The decoder's block: a transformer block that also looks at another sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..rng import Key
from .attention import CrossAttention, SelfAttention
from .dropout import Dropout
from .feedforward import FeedForward
from .layer import Layer
from .layernorm import LayerNorm


class DecoderBlockCache(NamedTuple):
    attention: Any
    dropout1: Any
    norm1: Any
    cross: Any
    dropout2: Any
    norm2: Any
    feedforward: Any
    dropout3: Any
    norm3: Any


class DecoderBlock(Layer):
    """Causal self-attention, attention to the memory, and a feed-forward layer, each with a residual and a norm.

        post-norm, as in the paper:   g = norm1(x + attention(x))          pre-norm:   g = x + attention(norm1(x))
                                      h = norm2(g + cross(g, memory))                  h = g + cross(norm2(g), memory)
                                      y = norm3(h + feedforward(h))                    y = h + feedforward(norm3(h))

    x, y: (B, T, C). memory: (B, M, C), what the encoder made of the other sequence. pattern: which queries may see
    which places of the memory (its `Padding`). The options are those of `TransformerBlock`.

    Backward. The memory enters once, through the keys and values of the cross-attention. With both sequences padded:
    a place after the end of the memory has probability 0 for every query, and by `attention` neither its key nor its
    value gets a gradient; a place after the end of x has a loss that does not count, so its dy is 0, its query passes
    nothing to the memory, and because self-attention is causal no place before the end has looked at it. Backward
    gives (dx, dmemory); the encoder's output goes to every block, so the model adds up their dmemory.

    Source: Vaswani et al., "Attention is all you need", 2017, sections 3.1 and 3.2.3, figure 1.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        norm: str = "post",
        d_ff: int | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = False,
        eps: float = 1e-5,
        key: Key = Key(0),
    ) -> None:
        if norm not in ("post", "pre"):
            raise ValueError(f"norm: expected 'post' or 'pre', got {norm!r}")
        self.norm = norm
        self.attention = SelfAttention(d_model, heads, causal=True, bias=bias, key=key.fold("attention"))
        self.norm1 = LayerNorm(d_model, eps)
        self.cross = CrossAttention(d_model, heads, bias=bias, key=key.fold("cross"))
        self.norm2 = LayerNorm(d_model, eps)
        self.feedforward = FeedForward(d_model, d_ff, activation, key.fold("feedforward"))
        self.norm3 = LayerNorm(d_model, eps)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Array, memory: Array, pattern: ops.Pattern | None = None, key: Key | None = None
    ) -> tuple[Array, DecoderBlockCache]:
        key1, key2, key3 = (None if key is None else key.fold(i) for i in (1, 2, 3))
        if self.norm == "post":
            a, attention = self.attention.forward(x)
            a, dropout1 = self.dropout.forward(a, key1)
            g, norm1 = self.norm1.forward(x + a)
            c, cross = self.cross.forward(g, memory, pattern)
            c, dropout2 = self.dropout.forward(c, key2)
            h, norm2 = self.norm2.forward(g + c)
            f, feedforward = self.feedforward.forward(h)
            f, dropout3 = self.dropout.forward(f, key3)
            y, norm3 = self.norm3.forward(h + f)
        else:
            n, norm1 = self.norm1.forward(x)
            a, attention = self.attention.forward(n)
            a, dropout1 = self.dropout.forward(a, key1)
            g = x + a
            n, norm2 = self.norm2.forward(g)
            c, cross = self.cross.forward(n, memory, pattern)
            c, dropout2 = self.dropout.forward(c, key2)
            h = g + c
            n, norm3 = self.norm3.forward(h)
            f, feedforward = self.feedforward.forward(n)
            f, dropout3 = self.dropout.forward(f, key3)
            y = h + f
        return y, DecoderBlockCache(attention, dropout1, norm1, cross, dropout2, norm2, feedforward, dropout3, norm3)

    def backward(self, dy: Array, cache: DecoderBlockCache) -> tuple[Array, Array]:
        if self.norm == "post":
            dsum = self.norm3.backward(dy, cache.norm3)
            df = self.dropout.backward(dsum, cache.dropout3)
            dh = dsum + self.feedforward.backward(df, cache.feedforward)
            dsum = self.norm2.backward(dh, cache.norm2)
            dc = self.dropout.backward(dsum, cache.dropout2)
            dg, dmemory = self.cross.backward(dc, cache.cross)
            dsum = self.norm1.backward(dsum + dg, cache.norm1)
            da = self.dropout.backward(dsum, cache.dropout1)
            return dsum + self.attention.backward(da, cache.attention), dmemory
        df = self.dropout.backward(dy, cache.dropout3)
        dn = self.feedforward.backward(df, cache.feedforward)
        dh = dy + self.norm3.backward(dn, cache.norm3)
        dc = self.dropout.backward(dh, cache.dropout2)
        dn, dmemory = self.cross.backward(dc, cache.cross)
        dg = dh + self.norm2.backward(dn, cache.norm2)
        da = self.dropout.backward(dg, cache.dropout1)
        dn = self.attention.backward(da, cache.attention)
        return dg + self.norm1.backward(dn, cache.norm1), dmemory

    def extend(
        self, x: Array, keys: Array, values: Array, past: int, memory: tuple[Array, Array], pattern: ops.Pattern
    ) -> Array:
        """The output for new positions x (B, T, C), without dropout or cache.

        keys, values, past: of self-attention, see `SelfAttention.extend`. memory: what `cross.project` made of it.
        """
        if self.norm == "post":
            g = self.norm1(x + self.attention.extend(x, keys, values, past))
            h = self.norm2(g + self.cross.attend(g, *memory, pattern))
            return self.norm3(h + self.feedforward(h))
        g = x + self.attention.extend(self.norm1(x), keys, values, past)
        h = g + self.cross.attend(self.norm2(g), *memory, pattern)
        return h + self.feedforward(self.norm3(h))

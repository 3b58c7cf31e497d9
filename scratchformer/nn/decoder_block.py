"""The decoder's block: a transformer block that also looks at another sequence."""

from __future__ import annotations

from typing import NamedTuple

from .. import ops
from ..backend import Array
from ..rng import Key
from .attention import CrossAttention, SelfAttention
from .dropout import Dropout
from .feedforward import FeedForward
from .layer import Layer
from .layernorm import LayerNorm
from .residual import Residual, ResidualCache
from .stack import Stored


class DecoderBlockCache(NamedTuple):
    attention: ResidualCache
    cross: ResidualCache
    feedforward: ResidualCache


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
    nothing to the memory, and because self-attention is causal no place before the end has looked at it. Each branch
    is a `Residual`. Backward gives (dx, dmemory); the encoder's output goes to every block, so a `Stack` of them adds
    up their dmemory.

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
        self.norm = norm
        self.attention = SelfAttention(d_model, heads, causal=True, bias=bias, key=key.fold("attention"))
        self.norm1 = LayerNorm(d_model, eps)
        self.cross = CrossAttention(d_model, heads, bias=bias, key=key.fold("cross"))
        self.norm2 = LayerNorm(d_model, eps)
        self.feedforward = FeedForward(d_model, d_ff, activation, key.fold("feedforward"))
        self.norm3 = LayerNorm(d_model, eps)
        self.dropout = Dropout(dropout)
        self.branches()  # raises what is wrong with the order

    def branches(self) -> tuple[Residual, Residual, Residual]:
        """The three branches, made of the layers that the block has now."""
        return (
            Residual(self.attention, self.norm1, self.norm, self.dropout),
            Residual(self.cross, self.norm2, self.norm, self.dropout),
            Residual(self.feedforward, self.norm3, self.norm, self.dropout),
        )

    def forward(
        self, x: Array, memory: Array, pattern: ops.Pattern | None = None, key: Key | None = None
    ) -> tuple[Array, DecoderBlockCache]:
        key1, key2, key3 = (None if key is None else key.fold(i) for i in (1, 2, 3))
        first, second, third = self.branches()
        g, attention = first.forward(x, key=key1)
        h, cross = second.forward(g, memory, pattern, key=key2)
        y, feedforward = third.forward(h, key=key3)
        return y, DecoderBlockCache(attention, cross, feedforward)

    def backward(self, dy: Array, cache: DecoderBlockCache) -> tuple[Array, Array]:
        first, second, third = self.branches()
        dh = third.backward(dy, cache.feedforward)
        dg, dmemory = second.backward(dh, cache.cross)
        return first.backward(dg, cache.attention), dmemory

    def allocate(self, x: Array, length: int) -> Stored:
        """Room for the keys and values of `length` target positions: see `Stack`."""
        return self.attention.allocate(x, length)

    def extend(
        self, x: Array, stored: Stored, past: int, memory: tuple[Array, Array], pattern: ops.Pattern | None = None
    ) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones, without dropout: see `Stack`.

        memory: what `cross.project` made of the encoder's output. pattern: of the memory.
        """
        first, second, third = self.branches()
        g = first.around(lambda n: self.attention.extend(n, stored, past), x)
        h = second.around(lambda n: self.cross.attend(n, *memory, pattern), g)
        return third.around(self.feedforward, h)

"""The transformer block."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..dispatch import operation
from ..rng import Key
from .attention import SelfAttention
from .dropout import Dropout
from .feedforward import FeedForward
from .layer import Layer
from .layernorm import LayerNorm


class BlockCache(NamedTuple):
    attention: Any
    dropout1: Any
    norm1: Any
    feedforward: Any
    dropout2: Any
    norm2: Any


class TransformerBlock(Layer):
    """Self-attention and a feed-forward layer, each with a residual connection and a layer norm.

        post-norm, as in the tutorial:      h = norm1(x + attention(x))        y = norm2(h + feedforward(h))
        pre-norm, as in GPT-2:              h = x + attention(norm1(x))        y = h + feedforward(norm2(h))

    x, y: (B, T, C). Dropout acts on what attention and feed-forward return, before it is added.
    d_ff, activation: see `FeedForward`. causal, wide, bias: see `SelfAttention`.

    Backward. A residual h = x + f(x) copies x into two branches, so its gradient is dx = dh + (what f passes back).
    Post-norm: dh reaches x only through a norm. Pre-norm: dy passes down the sum unchanged, whatever the branches do.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        norm: str = "post",
        causal: bool = False,
        wide: bool = False,
        d_ff: int | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = False,
        key: Key = Key(0),
    ) -> None:
        if norm not in ("post", "pre"):
            raise ValueError(f"norm: expected 'post' or 'pre', got {norm!r}")
        self.norm = norm
        self.attention = SelfAttention(d_model, heads, causal, wide, bias, key.fold("attention"))
        self.norm1 = LayerNorm(d_model)
        self.feedforward = FeedForward(d_model, d_ff, activation, key.fold("feedforward"))
        self.norm2 = LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None) -> tuple[Array, BlockCache]:
        key1, key2 = (None, None) if key is None else (key.fold(1), key.fold(2))
        if self.norm == "post":
            a, attention = self.attention.forward(x, pattern)
            a, dropout1 = self.dropout.forward(a, key1)
            h, norm1 = self.norm1.forward(x + a)
            f, feedforward = self.feedforward.forward(h)
            f, dropout2 = self.dropout.forward(f, key2)
            y, norm2 = self.norm2.forward(h + f)
        else:
            n, norm1 = self.norm1.forward(x)
            a, attention = self.attention.forward(n, pattern)
            a, dropout1 = self.dropout.forward(a, key1)
            h = x + a
            n, norm2 = self.norm2.forward(h)
            f, feedforward = self.feedforward.forward(n)
            f, dropout2 = self.dropout.forward(f, key2)
            y = h + f
        return y, BlockCache(attention, dropout1, norm1, feedforward, dropout2, norm2)

    def backward(self, dy: Array, cache: BlockCache) -> Array:
        if self.norm == "post":
            dsum = self.norm2.backward(dy, cache.norm2)
            df = self.dropout.backward(dsum, cache.dropout2)
            dh = dsum + self.feedforward.backward(df, cache.feedforward)
            dsum = self.norm1.backward(dh, cache.norm1)
            da = self.dropout.backward(dsum, cache.dropout1)
            return dsum + self.attention.backward(da, cache.attention)
        df = self.dropout.backward(dy, cache.dropout2)
        dn = self.feedforward.backward(df, cache.feedforward)
        dh = dy + self.norm2.backward(dn, cache.norm2)
        da = self.dropout.backward(dh, cache.dropout1)
        dn = self.attention.backward(da, cache.attention)
        return dh + self.norm1.backward(dn, cache.norm1)

    def extend(self, x: Array, keys: Array, values: Array, past: int) -> Array:
        """The output for new positions x (B, T, C), without dropout or cache: see `SelfAttention.extend`."""
        return extend_block(x, self, keys, values, past)


@operation
def extend_block(x: Array, block: TransformerBlock, keys: Array, values: Array, past: int) -> Array:
    """What `TransformerBlock.extend` returns: a forward alone, with the keys and values of the past stored."""
    if block.norm == "post":
        h = block.norm1(x + block.attention.extend(x, keys, values, past))
        return block.norm2(h + block.feedforward(h))
    h = x + block.attention.extend(block.norm1(x), keys, values, past)
    return h + block.feedforward(block.norm2(h))

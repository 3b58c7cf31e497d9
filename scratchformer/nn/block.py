"""The transformer block."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..dispatch import operation
from ..ops.checks import expect_boolean, expect_floating, expect_shape
from ..rng import Key
from .attention import SelfAttention
from .dropout import Dropout
from .feedforward import FeedForward
from .layer import Layer
from .layernorm import LayerNorm
from .relative_attention import RelativeSelfAttention


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

    x, y: (B, T, C). Dropout acts on what attention and feed-forward return, before it is added (the tutorial's acts on
    h and y, after the norms).
    d_ff, activation: see `FeedForward`. causal, wide, bias: see `SelfAttention`. eps: of the norms. relative: attention
    is a `RelativeSelfAttention`. Then a block may be given a memory (B, M, C), vectors that stood here before x and are
    now constants: attention sees [memory, x] (normed alike, with pre-norm) in place of x.

    Backward. A residual h = x + f(x) copies x into two branches, so its gradient is dx = dh + (what f passes back).
    Post-norm: dh reaches x only through a norm. Pre-norm: dy passes down the sum unchanged, whatever the branches do.
    A memory gets no gradient: of what comes back for [memory, x] the last T places are taken. Parameters do get
    theirs from it, since the maps to keys and values, and the norm before them, are applied to the memory too.
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
        eps: float = 1e-5,
        key: Key = Key(0),
        relative: bool = False,
    ) -> None:
        if norm not in ("post", "pre"):
            raise ValueError(f"norm: expected 'post' or 'pre', got {norm!r}")
        expect_boolean(relative=relative)
        self.norm = norm
        attention = RelativeSelfAttention if relative else SelfAttention
        self.attention = attention(d_model, heads, causal, wide, bias, key.fold("attention"))
        self.norm1 = LayerNorm(d_model, eps)
        self.feedforward = FeedForward(d_model, d_ff, activation, key.fold("feedforward"))
        self.norm2 = LayerNorm(d_model, eps)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None, memory: Array | None = None
    ) -> tuple[Array, BlockCache]:
        key1, key2 = (None, None) if key is None else (key.fold(1), key.fold(2))
        seen, queries = x, {}
        if memory is not None:
            seen, queries = self.behind(memory, x), {"queries": x.shape[1]}
        if self.norm == "post":
            a, attention = self.attention.forward(seen, pattern, **queries)
            a, dropout1 = self.dropout.forward(a, key1)
            h, norm1 = self.norm1.forward(x + a)
            f, feedforward = self.feedforward.forward(h)
            f, dropout2 = self.dropout.forward(f, key2)
            y, norm2 = self.norm2.forward(h + f)
        else:
            n, norm1 = self.norm1.forward(seen)
            a, attention = self.attention.forward(n, pattern, **queries)
            a, dropout1 = self.dropout.forward(a, key1)
            h = x + a
            n, norm2 = self.norm2.forward(h)
            f, feedforward = self.feedforward.forward(n)
            f, dropout2 = self.dropout.forward(f, key2)
            y = h + f
        return y, BlockCache(attention, dropout1, norm1, feedforward, dropout2, norm2)

    def behind(self, memory: Array, x: Array) -> Array:
        """[memory, x]: (B, M + T, C)."""
        if not isinstance(self.attention, RelativeSelfAttention):
            raise ValueError("memory: expected None, since only a relative block can take one")
        expect_floating(x=x, memory=memory)
        expect_shape("x", x, "B T C")
        expect_shape("memory", memory, "B M C", B=x.shape[0], C=x.shape[2])
        return array_module(memory, x).concatenate([memory, x], axis=1)

    def backward(self, dy: Array, cache: BlockCache) -> Array:
        T = dy.shape[1]
        if self.norm == "post":
            dsum = self.norm2.backward(dy, cache.norm2)
            df = self.dropout.backward(dsum, cache.dropout2)
            dh = dsum + self.feedforward.backward(df, cache.feedforward)
            dsum = self.norm1.backward(dh, cache.norm1)
            da = self.dropout.backward(dsum, cache.dropout1)
            return dsum + self.attention.backward(da, cache.attention)[:, -T:]
        df = self.dropout.backward(dy, cache.dropout2)
        dn = self.feedforward.backward(df, cache.feedforward)
        dh = dy + self.norm2.backward(dn, cache.norm2)
        da = self.dropout.backward(dh, cache.dropout1)
        dn = self.attention.backward(da, cache.attention)
        return dh + self.norm1.backward(dn, cache.norm1)[:, -T:]

    def extend(self, x: Array, keys: Array, values: Array, past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output for new positions x (B, T, C), without dropout or cache: see `SelfAttention.extend`."""
        return extend_block(x, self, keys, values, past, pattern)


@operation
def extend_block(
    x: Array, block: TransformerBlock, keys: Array, values: Array, past: int, pattern: ops.Pattern | None = None
) -> Array:
    """What `TransformerBlock.extend` returns: a forward alone, with the keys and values of the past stored."""
    if block.norm == "post":
        h = block.norm1(x + block.attention.extend(x, keys, values, past, pattern))
        return block.norm2(h + block.feedforward(h))
    h = x + block.attention.extend(block.norm1(x), keys, values, past, pattern)
    return h + block.feedforward(block.norm2(h))


@operation
def extend_output(x: Array, output: Layer) -> Array:
    """The logits (B, T, V) of x (B, T, C) by a model's output layer, without a cache."""
    return output(x)

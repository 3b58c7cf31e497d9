"""The transformer block."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..checks import (
    expect_boolean,
    expect_floating,
    expect_fraction,
    expect_instance,
    expect_one_of,
    expect_shape,
)
from ..dispatch import operation
from ..rng import Key, fold
from .attention import SelfAttention
from .dropout import Dropout
from .feedforward import FeedForward
from .layer import Layer, Part, expect_backward
from .layernorm import LayerNorm
from .relative_attention import RelativeSelfAttention
from .residual import ORDERS, Residual, ResidualCache
from .stack import Stored, allocate_inputs, extend_inputs, extends


class BlockCache(NamedTuple):
    attention: ResidualCache
    feedforward: ResidualCache


class Block(Layer):
    """Two residual branches, self-attention and then a feed-forward layer, each with its own norm.

    attention: a layer such as `SelfAttention`, with `forward(x, pattern)`; generation uses its `allocate` and `extend`
    if it has them (see `Stack`). feedforward: a layer that acts on each position separately. norm1, norm2: the norms of
    the two branches. norm: their order, "post" or "pre", see `Residual`. dropout: the probability of dropout on the
    output of a branch, before the sum.

    x, y: (B, T, C). For the mathematics see `Residual`.
    """

    attention, norm1 = Part("first.branch"), Part("first.norm")
    feedforward, norm2 = Part("second.branch"), Part("second.norm")
    dropout = Part("first.dropout", "second.dropout")
    norm = Part("first.order", "second.order")

    def __init__(
        self,
        attention: Layer,
        feedforward: Layer,
        norm1: Layer,
        norm2: Layer,
        norm: str = "post",
        dropout: float = 0.0,
    ) -> None:
        for name, layer in dict(attention=attention, feedforward=feedforward, norm1=norm1, norm2=norm2).items():
            expect_instance(name, layer, Layer)
        expect_one_of("norm", norm, ORDERS)
        expect_fraction("dropout", dropout, letter="p")
        shared = Dropout(dropout)
        self.first = Residual(attention, norm1, norm, shared)
        self.second = Residual(feedforward, norm2, norm, shared)

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None, **options: Any
    ) -> tuple[Array, BlockCache]:
        """options: passed on to the attention."""
        h, attention = self.first.forward(x, pattern, key=fold(key, 1), **options)
        y, feedforward = self.second.forward(h, key=fold(key, 2))
        return y, BlockCache(attention, feedforward)

    def backward(self, dy: Array, cache: BlockCache) -> Array:
        expect_backward(cache, BlockCache, dy=dy)
        return self.first.backward(self.second.backward(dy, cache.feedforward), cache.attention)

    def allocate(self, x: Array, length: int) -> Stored:
        """Room for what the attention stores for `length` positions of sequences like x (B, any T, C)."""
        return (self.attention.allocate if extends(self.attention) else allocate_inputs)(x, length)

    def extend(self, x: Array, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones, without dropout: see `Stack`."""
        if not extends(self.attention):
            return extend_inputs(self, x, stored, past, pattern=pattern)
        return extend_block(x, self, stored, past, pattern)


class TransformerBlock(Block):
    """Self-attention and a feed-forward layer, each with a residual connection and a layer norm.

    Post-norm, as in the tutorial:

        h = norm1(x + attention(x))        y = norm2(h + feedforward(h))

    Pre-norm, as in GPT-2:

        h = x + attention(norm1(x))        y = h + feedforward(norm2(h))

    x, y: (B, T, C). Dropout applies to the outputs of attention and feed-forward layer, before the sum (the tutorial
    applies it to h and y, after the norms).
    d_ff, activation: see `FeedForward`. causal, wide, bias: see `SelfAttention`. eps: of the norms. relative: whether
    attention is a `RelativeSelfAttention`. If so, `forward` takes a memory (B, M, C), the inputs of this block at the M
    positions before x, now constants. Attention then sees [memory, x] instead of x (with pre-norm, both normalised).

    Backward. Each half is a `Residual` and passes the gradient of its output back to its input:

        dh_tc = Σ_c' dy_tc' ∂y_tc'/∂h_tc        (the feed-forward layer and the norm act on each position)
        dx_sc = Σ_t Σ_c' dh_tc' ∂h_tc'/∂x_sc        (attention mixes positions)

    The memory gets no gradient, but it contributes to the gradients of the parameters: the key and value projections,
    and the norm before them, are applied to it too.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        norm: str = "post",
        causal: bool = False,
        wide: bool = False,
        d_ff: int | None = None,
        activation: ops.Activation = "relu",
        dropout: float = 0.0,
        bias: bool = False,
        eps: float = 1e-5,
        key: Key = Key(0),
        relative: bool = False,
    ) -> None:
        expect_boolean(relative=relative)
        attention = RelativeSelfAttention if relative else SelfAttention
        super().__init__(
            attention(d_model, heads, causal, wide, bias, fold(key, "attention")),
            FeedForward(d_model, d_ff, activation, fold(key, "feedforward")),
            LayerNorm(d_model, eps),
            LayerNorm(d_model, eps),
            norm,
            dropout,
        )

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None, memory: Array | None = None
    ) -> tuple[Array, BlockCache]:
        if memory is None:
            return super().forward(x, pattern, key)
        return super().forward(self.after(memory, x), pattern, key, queries=x.shape[1])

    allocate, extend = Block.allocate, Block.extend  # without a memory `forward` is that of `Block`

    def after(self, memory: Array, x: Array) -> Array:
        """[memory, x]: (B, M + T, C)."""
        if not isinstance(self.attention, RelativeSelfAttention):
            raise ValueError("memory: expected None, since only a relative block can take one")
        expect_floating(x=x, memory=memory)
        expect_shape("x", x, "B T C")
        expect_shape("memory", memory, "B M C", B=x.shape[0], C=x.shape[2])
        return array_module(memory, x).concatenate([memory, x], axis=1)


@operation
def extend_block(x: Array, block: Block, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
    """What `Block.extend` returns: forward only, with the keys and values of past positions stored."""
    h = block.first.around(lambda n: block.attention.extend(n, stored, past, pattern), x)
    return block.second.around(block.feedforward, h)

"""The body of classifiers and language models: from token ids, or other units, to a vector for each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar, NamedTuple

from .. import nn, ops
from ..backend import Array, array_module
from ..checks import (
    expect_boolean,
    expect_floating,
    expect_fraction,
    expect_instance,
    expect_number,
    expect_one_of,
    expect_positive,
    expect_shape,
)
from ..nn.attention import causal as and_causal
from ..nn.block import StackCache, Stored
from ..nn.embedding import EmbeddingSumCache
from ..nn.layer import Part, expect_backward, repeated
from ..rng import Key, fold
from ..shell.text import shown
from .model import Model, named


class BodyCache(NamedTuple):
    embedding: EmbeddingSumCache
    stack: StackCache


class Body(Model):
    """Token embedding + positions, dropout, blocks, and a final norm: an `EmbeddingSum` and a `Stack`.

    ids: (B, T) with T ≤ max_length. Returns (B, T, C). With units=I and no vocab_size, a sequence consists not of
    tokens but of vectors (B, T, I), and a linear layer replaces the token embedding. `backward` returns the gradient of
    these units, or None for ids.

    positions: "learned", "sinusoidal", "relative" (in the attention of every block), "none", or a layer that adds
    position embeddings. dropout: after the embedding, and an option of blocks that have it. causal: no position
    sees a later one. recompute: gradient checkpointing of every block. embedding_std: the standard deviation of the
    initial token and position embeddings (1 as in the tutorial).

    block: a class of layers, or a function that creates one, called as `block(d_model, heads, key=key, **options)` for
    every block; `Stack` says what a block needs. options: all arguments that the body does not take itself; for the
    default, `TransformerBlock`, these are norm, wide, d_ff, activation, bias, eps.
    by_block: options that vary from block to block, each with a list of its values: `{"window": [8, 8, None]}`.
    final_norm: creates the norm after the last block, called as `final_norm(d_model)`. The default is a `LayerNorm` if
    the blocks are pre-norm (`block.norm` is "pre"), and otherwise none. A model can be saved if all these are classes.
    """

    fixed: ClassVar[Mapping[str, str]] = {"relative": 'has it from positions="relative"'}
    tokens, positions = Part("embedding.embeddings.0"), Part("embedding.positions")
    dropout = Part("embedding.dropout")
    blocks, final_norm, recompute = Part("stack.blocks"), Part("stack.norm"), Part("stack.recompute")

    def __init__(
        self,
        vocab_size: int | None,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        positions: str | nn.Layer = "learned",
        dropout: float = 0.0,
        causal: bool = False,
        recompute: bool = False,
        embedding_std: float = 1.0,
        units: int | None = None,
        block: Callable[..., nn.Layer] = nn.TransformerBlock,
        final_norm: Callable[[int], nn.Layer] | None = None,
        by_block: Mapping[str, Sequence[Any]] | None = None,
        key: Key = Key(0),
        **options: Any,
    ) -> None:
        kinds = {
            "learned": lambda: nn.PositionEmbedding(max_length, d_model, embedding_std, fold(key, "positions")),
            "sinusoidal": nn.SinusoidalPositions,
            "relative": lambda: None,
            "none": lambda: None,
        }
        if not isinstance(positions, nn.Layer):
            expect_one_of("positions", positions, kinds)
        if (vocab_size is None) == (units is None):
            raise ValueError(f"vocab_size, units: expected one of the two, got {vocab_size} and {units}")
        expect_positive(d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        expect_boolean(recompute=recompute, causal=causal)
        expect_number("embedding_std", embedding_std)
        expect_fraction("dropout", dropout, letter="p")
        self.max_length, self.d_model, self.units, self.causal = int(max_length), int(d_model), units, causal
        tokens: nn.Layer
        if vocab_size is not None:
            tokens = nn.TokenEmbedding(vocab_size, d_model, embedding_std, fold(key, "tokens"))
        elif units is not None:
            tokens = nn.Linear(units, d_model, key=fold(key, "tokens"))
        layer = positions if isinstance(positions, nn.Layer) else kinds[positions]()
        self.embedding = nn.EmbeddingSum([tokens], layer, dropout=nn.Dropout(dropout))
        if positions == "relative":
            options["relative"] = True
        drops = {"dropout": dropout} if dropout or "dropout" in named(block) else {}
        varied = expect_varied(by_block or {}, block, depth)

        def block_at(i: int) -> nn.Layer:
            given = options | {name: values[i] for name, values in varied.items()}
            return block(d_model, heads, key=fold(key, "block", i), **given, **drops)

        blocks = repeated(block_at, depth)
        if final_norm is not None:
            norm: nn.Layer | None = final_norm(d_model)
        else:
            pre_norm = options.get("norm", getattr(blocks[0], "norm", None)) == "pre"
            norm = nn.LayerNorm(d_model, options.get("eps", 1e-5)) if pre_norm else None
        self.stack = nn.Stack(blocks, norm, recompute)

    @classmethod
    def passes_to(cls, options: Mapping[str, Any]) -> Callable:
        return options.get("block", nn.TransformerBlock)

    def forward(
        self, ids: Array, pattern: ops.Pattern | None = None, key: Key | None = None, memory: Array | None = None
    ) -> tuple[Array, BodyCache]:
        """memory: (B, depth, M, C), the memory of each block: see `TransformerBlock`."""
        self.check(ids)
        if memory is not None:
            expect_shape("memory", memory, "B depth M C", B=ids.shape[0], depth=len(self.blocks), C=self.d_model)
        x, embedding = self.embedding.forward(ids, key=fold(key, "embedding"))
        pattern = and_causal(pattern) if self.causal else pattern
        x, stack = self.stack.forward(x, key=fold(key, "block"), memories=memory, pattern=pattern)
        return x, BodyCache(embedding, stack)

    def backward(self, dx: Array, cache: BodyCache) -> Array | None:
        expect_backward(cache, BodyCache, dx=dx)
        return self.embedding.backward(self.stack.backward(dx, cache.stack), cache.embedding)

    def allocate(self, batch_size: int, length: int | None = None) -> list[Stored]:
        """Room for what `extend` stores in each block for `batch_size` sequences of up to `length` positions.

        length: None for the longest.
        """
        if not self.causal:
            raise ValueError("causal: this body is not causal, so it cannot generate")
        length = self.max_length if length is None else length
        expect_positive(batch_size=batch_size, length=length)
        weights = self.parameters()[0].data
        xp = array_module(weights)
        return self.stack.allocate(xp.empty((batch_size, 0, self.d_model), weights.dtype), length)

    def extend(self, ids: Array, stored: list[Stored], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The vectors (B, T, C) of new tokens ids (B, T) after `past` stored ones: see `Stack`."""
        past = index(past)
        self.check(ids, past)
        x, _ = self.embedding.forward(ids, start=past)
        return self.stack.extend(x, stored, past, pattern=pattern)

    def check(self, ids: Array, past: int = 0) -> None:
        """Raise ValueError unless ids are (B, T), or units (B, T, I), with T ≥ 1 and `past` + T ≤ max_length."""
        if self.units is not None:
            name, what, letters, sizes = "units", "units", "B T I", {"I": self.units}
            expect_floating(units=ids)
        else:
            name, what, letters, sizes = "ids", "tokens", "B T", {}
        expect_shape(name, ids, letters, **sizes)
        expected = f"{name}: expected ({letters.replace(' ', ', ')}) with T"
        if not ids.shape[1]:
            raise ValueError(f"{expected} >= 1, got {tuple(ids.shape)}")
        if past + ids.shape[1] > self.max_length:
            raise ValueError(f"{expected} up to {self.max_length}, got {past + ids.shape[1]} {what}")


def expect_varied(by_block: Any, block: Callable, depth: int) -> Mapping[str, Sequence[Any]]:
    """Raise TypeError or ValueError unless `by_block` has a value for each block of some options; returns it."""
    expect_instance("by_block", by_block, Mapping)
    known = named(block)
    for name, values in by_block.items():
        if name not in known:
            raise TypeError(f"by_block: no option {name!r}; expected one of {', '.join(known)}")
        if not isinstance(values, list | tuple) or len(values) != depth:
            raise ValueError(f"by_block: {name}: expected a list of {depth}, one for each block, got {shown(values)}")
    return by_block

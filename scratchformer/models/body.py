"""The body of classifier and language model: from token ids, or other units, to a vector for each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..nn import (
    Dropout,
    EmbeddingSum,
    Layer,
    LayerNorm,
    Linear,
    PositionEmbedding,
    SinusoidalPositions,
    Stack,
    TokenEmbedding,
    TransformerBlock,
)
from ..nn.attention import causal as and_causal
from ..nn.embedding_sum import EmbeddingSumCache
from ..nn.layer import repeated
from ..nn.stack import StackCache, Stored
from ..ops.checks import (
    expect_boolean,
    expect_floating,
    expect_fraction,
    expect_number,
    expect_one_of,
    expect_positive,
    expect_shape,
)
from ..rng import Key, fold
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
    final_norm: creates the norm after the last block, called as `final_norm(d_model)`. The default is a `LayerNorm` if
    the blocks are pre-norm (`block.norm` is "pre"), and otherwise none. A model can be saved if these two are classes.
    """

    fixed: ClassVar[Mapping[str, str]] = {"relative": 'has it from positions="relative"'}

    def __init__(
        self,
        vocab_size: int | None,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        positions: str | Layer = "learned",
        dropout: float = 0.0,
        causal: bool = False,
        recompute: bool = False,
        embedding_std: float = 1.0,
        units: int | None = None,
        block: Callable[..., Layer] = TransformerBlock,
        final_norm: Callable[[int], Layer] | None = None,
        key: Key = Key(0),
        **options: Any,
    ) -> None:
        kinds = {
            "learned": lambda: PositionEmbedding(max_length, d_model, embedding_std, fold(key, "positions")),
            "sinusoidal": SinusoidalPositions,
            "relative": lambda: None,
            "none": lambda: None,
        }
        if not isinstance(positions, Layer):
            expect_one_of("positions", positions, kinds)
        if (vocab_size is None) == (units is None):
            raise ValueError(f"vocab_size, units: expected one of the two, got {vocab_size} and {units}")
        expect_positive(d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        expect_boolean(recompute=recompute, causal=causal)
        expect_number("embedding_std", embedding_std)
        self.max_length, self.units, self.d_model = max_length, units, d_model
        self.causal, self.recompute, self.relative = causal, recompute, positions == "relative"
        self.tokens: Any
        if vocab_size is not None:
            self.tokens = TokenEmbedding(vocab_size, d_model, embedding_std, fold(key, "tokens"))
        elif units is not None:
            self.tokens = Linear(units, d_model, key=fold(key, "tokens"))
        self.positions = positions if isinstance(positions, Layer) else kinds[positions]()
        expect_fraction("dropout", dropout, letter="p")
        self.dropout = Dropout(dropout)
        own = options | ({"dropout": dropout} if dropout or "dropout" in named(block) else {})
        own |= {"relative": True} if self.relative else {}
        self.blocks = repeated(lambda i: block(d_model, heads, key=fold(key, "block", i), **own), depth)
        self.final_norm: Layer | None
        if final_norm is None:
            pre_norm = options.get("norm", getattr(self.blocks[0], "norm", None)) == "pre"
            self.final_norm = LayerNorm(d_model, options.get("eps", 1e-5)) if pre_norm else None
        else:
            self.final_norm = final_norm(d_model)

    @classmethod
    def passes_to(cls, options: Mapping[str, Any]) -> Callable:
        return options.get("block", TransformerBlock)

    @property
    def embedding(self) -> EmbeddingSum:
        return EmbeddingSum([self.tokens], self.positions, dropout=self.dropout)

    @property
    def stack(self) -> Stack:
        return Stack(self.blocks, self.final_norm, self.recompute)

    def forward(
        self,
        ids: Array,
        pattern: ops.Pattern | None = None,
        key: Key | None = None,
        memory: Array | None = None,
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
        return self.embedding.backward(self.stack.backward(dx, cache.stack), cache.embedding)

    def allocate(self, batch_size: int) -> list[Stored]:
        """Room for what `extend` stores in each block for `batch_size` sequences of the longest length."""
        if not self.causal:
            raise ValueError("causal: this body is not causal, so it cannot generate")
        expect_positive(batch_size=batch_size)
        weights = self.parameters()[0].data
        return self.stack.allocate(
            array_module(weights).empty((batch_size, 0, self.d_model), weights.dtype), self.max_length
        )

    def extend(self, ids: Array, stored: list[Stored], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The vectors (B, T, C) of new tokens ids (B, T) after `past` stored ones: see `Stack`."""
        self.check(ids, past)
        x, _ = self.embedding.forward(ids, start=past)
        return self.stack.extend(x, stored, past, pattern=pattern)

    def check(self, ids: Array, past: int = 0) -> None:
        """Raise ValueError unless ids are (B, T), or units (B, T, I), with T ≥ 1 and `past` + T ≤ max_length."""
        name, letters, what = ("ids", "B T", "tokens") if self.units is None else ("units", "B T I", "units")
        if self.units is not None:
            expect_floating(units=ids)
        expect_shape(name, ids, letters, **({} if self.units is None else {"I": self.units}))
        expected = f"{name}: expected ({letters.replace(' ', ', ')}) with T"
        if not ids.shape[1]:
            raise ValueError(f"{expected} >= 1, got {tuple(ids.shape)}")
        if past + ids.shape[1] > self.max_length:
            raise ValueError(f"{expected} up to {self.max_length}, got {past + ids.shape[1]} {what}")

"""The body of classifier and language model: from token ids, or other units, to a vector for each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..nn import (
    Dropout,
    EmbeddingBag,
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
    expect_ids,
    expect_number,
    expect_one_of,
    expect_positive,
    expect_shape,
)
from ..ops.ngrams import expect_buckets, expect_orders
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

    ngrams: lengths n of n-grams, such as (2, 3, 4). A position then also gets a vector for the n ids that end there:
    a hash of them chooses one of `buckets` vectors for each n (see `ops.ngram_buckets`). So the first block already
    knows what often follows a few tokens, which attention would have to learn to gather. Source: Clark et al.,
    "Canine", 2022, section 3.2, for hashing; Pagnoni et al., "Byte latent transformer", 2024, section 3.2.1.

    recall: lengths n of n-grams, such as (3, 4, 4, 6). For each n a position also gets a vector for the token that
    followed the previous occurrence of its last n tokens, or a vector for "none". Repeat n to use older occurrences too
    (see `ops.recall`, also for sources). Pass ids as (B, T, 1 + len(recall)) from `data.recalling` to search the whole
    text before each token. With ids (B, T), only these T tokens are searched, and in generation the stored ones.

    features: how many numbers come with each token, which `forward` then takes as features (B, T, I). A linear map of
    them is added to the token's vector, and `backward` returns their gradient.

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
        ngrams: Sequence[int] | None = None,
        buckets: int = 16_384,
        recall: Sequence[int] | None = None,
        features: int | None = None,
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
        if vocab_size is None and (ngrams is not None or recall is not None):
            raise ValueError(
                f"{'ngrams' if recall is None else 'recall'}: expected None for units, since it needs token ids"
            )
        self.orders, self.buckets, self.ngrams = ngrams or (), buckets, None
        expect_buckets(buckets, 1)
        if ngrams is not None:
            expect_orders(ngrams, "ngrams")
            expect_buckets(buckets, len(ngrams))
            self.ngrams = EmbeddingBag(len(ngrams) * buckets, d_model, embedding_std, fold(key, "ngrams"))
        self.recall_orders, self.recall = recall or (), None
        if recall is not None and vocab_size is not None:
            expect_orders(recall, "recall")
            self.recall_values = vocab_size + 1  # 0 for no previous occurrence, or 1 + a token id
            rows = len(recall) * self.recall_values
            self.recall = EmbeddingBag(rows, d_model, embedding_std, fold(key, "recall"))
        self.features = None
        if features is not None:
            expect_positive(features=features)
            self.features = Linear(features, d_model, False, fold(key, "features"))
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
        embeddings = [e for e in (self.tokens, self.ngrams, self.recall, self.features) if e is not None]
        return EmbeddingSum(embeddings, self.positions, dropout=self.dropout)

    def inputs(self, ids: Array, before: Array | None = None, features: Array | None = None) -> list[Array]:
        """The inputs of the embeddings, without those that the body lacks: ids (B, T), the buckets of n-grams (B, T,
        N), the rows of the table for recall (B, T, K), and features (B, T, I).

        ids: (B, T), or (B, T, 1 + K) from `data.recalling`. before: (B, P), the ids that precede them.
        """
        xp = array_module(ids)
        ids, recalled = (ids, None) if ids.ndim == 2 or self.units is not None else (ids[:, :, 0], ids[:, :, 1:])
        seen, found = ids if before is None else xp.concatenate([before, ids], axis=1), [ids]
        if self.ngrams is not None:
            reach = ids.shape[1] + max(self.orders) - 1
            found.append(ops.ngram_buckets(seen[:, -reach:], self.orders, self.buckets)[:, -ids.shape[1] :])
        if self.recall is not None:
            if recalled is None:
                recalled = ops.recall(seen, self.recall_orders)[:, -ids.shape[1] :]
            found.append(recalled + xp.arange(recalled.shape[2], dtype=np.int32) * self.recall_values)
        if self.features is not None:
            B, T = ids.shape[:2]
            expect_shape("features", features, "B T I", B=B, T=T, I=len(self.features.w.data))
            found.append(features)
        elif features is not None:
            raise ValueError("features: expected none, since the model was made without features=I")
        return found

    @property
    def stack(self) -> Stack:
        return Stack(self.blocks, self.final_norm, self.recompute)

    def forward(
        self,
        ids: Array,
        pattern: ops.Pattern | None = None,
        key: Key | None = None,
        memory: Array | None = None,
        features: Array | None = None,
    ) -> tuple[Array, BodyCache]:
        """memory: (B, depth, M, C), the memory of each block: see `TransformerBlock`. features: (B, T, I)."""
        self.check(ids, rows=self.recall is not None)
        if memory is not None:
            expect_shape("memory", memory, "B depth M C", B=ids.shape[0], depth=len(self.blocks), C=self.d_model)
        x, embedding = self.embedding.forward(*self.inputs(ids, features=features), key=fold(key, "embedding"))
        pattern = and_causal(pattern) if self.causal else pattern
        x, stack = self.stack.forward(x, key=fold(key, "block"), memories=memory, pattern=pattern)
        return x, BodyCache(embedding, stack)

    def backward(self, dx: Array, cache: BodyCache) -> Array | None:
        return self.embedding.backward(self.stack.backward(dx, cache.stack), cache.embedding)

    def allocate(self, batch_size: int) -> list[Stored]:
        """Room for what `extend` stores in each block for `batch_size` sequences of the longest length."""
        if not self.causal:
            raise ValueError("causal: this body is not causal, so it cannot generate")
        if self.features is not None:
            raise ValueError("features: a new token has none, so this body cannot generate")
        expect_positive(batch_size=batch_size)
        weights = self.parameters()[0].data
        xp = array_module(weights)
        stored = self.stack.allocate(xp.empty((batch_size, 0, self.d_model), weights.dtype), self.max_length)
        if self.ngrams is not None or self.recall is not None:
            stored.append((xp.zeros((batch_size, self.max_length), np.int32),))  # the ids
        return stored

    def extend(self, ids: Array, stored: list[Stored], past: int, pattern: ops.Pattern | None = None) -> Array:
        """The vectors (B, T, C) of new tokens ids (B, T) after `past` stored ones: see `Stack`."""
        self.check(ids, past, rows=self.recall is not None)
        before = None
        if self.ngrams is not None or self.recall is not None:
            *stored, (seen,) = stored
            seen[:, past : past + ids.shape[1]] = ids if ids.ndim == 2 else ids[:, :, 0]
            reach = past if self.recall is not None else max(self.orders) - 1
            before = seen[:, max(0, past - reach) : past]
        x, _ = self.embedding.forward(*self.inputs(ids, before), start=past)
        return self.stack.extend(x, stored, past, pattern=pattern)

    def check(self, ids: Array, past: int = 0, rows: bool = False) -> None:
        """Raise ValueError unless ids are (B, T), or units (B, T, I), with T ≥ 1 and `past` + T ≤ max_length.

        rows: whether ids may also be (B, T, 1 + K) from `data.recalling`; IndexError for one that is out of range.
        """
        name, letters, what = ("ids", "B T", "tokens") if self.units is None else ("units", "B T I", "units")
        sizes = {} if self.units is None else {"I": self.units}
        if self.units is not None:
            expect_floating(units=ids)
        elif rows and getattr(ids, "ndim", 2) == 3:
            letters, sizes = "B T J", {"J": 1 + len(self.recall_orders)}
            expect_shape(name, ids, letters, **sizes)
            expect_ids("ids recalled", ids[:, :, 1:], self.recall_values)
        expect_shape(name, ids, letters, **sizes)
        expected = f"{name}: expected ({letters.replace(' ', ', ')}) with T"
        if not ids.shape[1]:
            raise ValueError(f"{expected} >= 1, got {tuple(ids.shape)}")
        if past + ids.shape[1] > self.max_length:
            raise ValueError(f"{expected} up to {self.max_length}, got {past + ids.shape[1]} {what}")

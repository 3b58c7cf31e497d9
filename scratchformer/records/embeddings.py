"""Embeddings that a body can add to those of its tokens: of n-grams, of what followed them before, of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_ids, expect_positive, expect_shape
from ..models.body import Reading
from ..nn import Layer, Linear, TokenEmbedding
from ..nn.layer import expect_backward
from ..rng import Key
from .ngrams import expect_buckets, expect_orders, ngram_buckets, recall
from .recall import RecalledTexts


class EmbeddingBagCache(NamedTuple):
    columns: list  # the cache of `embedding` for each k


class EmbeddingBag(Layer):
    """y_t = Σ_k table[ids_tk]: at each position the sum of the vectors of several ids, such as those of its n-grams.

    std: the standard deviation of the initial values, which are normal. ids: (B, T, K), integers. Returns (B, T, C).
    ids have no gradient, so `backward` returns None.

    Forward:

        y_btc = Σ_k table_vc with v = ids_btk

    Backward. Every term of the sum has the gradient dy, which goes to the row that was looked up:

        dtable_vc = Σ_b Σ_t Σ_k [ids_btk = v] dy_btc

    This is `embedding` for each k, and all add to the same gradient:

        ops.embedding_backward(dy, column, out=self.table.grad)
    """

    def __init__(self, vocab_size: int, d_model: int, std: float = 1.0, key: Key = Key(0)) -> None:
        self.table = TokenEmbedding(vocab_size, d_model, std, key).table

    def forward(self, ids: Array) -> tuple[Array, EmbeddingBagCache]:
        expect_shape("ids", ids, "B T K")
        if not ids.shape[2]:
            raise ValueError(f"ids: expected (B, T, K) with K >= 1, got {tuple(ids.shape)}")
        (y, first), *others = (ops.embedding(ids[:, :, k], self.table.data) for k in range(ids.shape[2]))
        for vectors, _ in others:
            y, _ = ops.add(y, vectors)
        return y, EmbeddingBagCache([first, *(column for _, column in others)])

    def backward(self, dy: Array, cache: EmbeddingBagCache) -> None:
        expect_backward(cache, EmbeddingBagCache, dy=dy)
        for column in cache.columns:
            ops.embedding_backward(dy, column, out=self.table.grad)


class NGrams(EmbeddingBag):
    """A vector for the n ids that end at a position, for each n of `orders`, such as (2, 3, 4).

    A hash of the ids chooses one of `buckets` vectors for each n (see `ngram_buckets`). So the first block already
    knows what often follows a few tokens, which attention would have to learn to gather. Source: Clark et al.,
    "Canine", 2022, section 3.2, for hashing; Pagnoni et al., "Byte latent transformer", 2024, section 3.2.1.
    """

    name, columns, width = "ngrams", 0, None

    def __init__(
        self,
        vocab_size: int | None,
        d_model: int,
        orders: Sequence[int],
        buckets: int = 16_384,
        std: float = 1.0,
        key: Key = Key(0),
    ) -> None:
        expect_tokens(self.name, vocab_size)
        expect_orders(orders, self.name)
        expect_buckets(buckets, len(orders))
        super().__init__(len(orders) * int(buckets), d_model, std, key)
        self.orders, self.buckets, self.reach = orders, buckets, max(orders) - 1

    def forward(self, text: Reading) -> tuple[Array, EmbeddingBagCache]:
        ids, T = text.ids, text.ids.shape[1]
        if text.before is not None:
            ids = array_module(ids).concatenate([text.before, ids], axis=1)[:, -(T + self.reach) :]
        return super().forward(ngram_buckets(ids, self.orders, self.buckets)[:, -T:])


class Recall(EmbeddingBag):
    """For each n of `orders`, such as (3, 4, 4, 6), a vector for the token that followed the previous occurrence of the
    last n tokens, or a vector for "none".

    Repeat n to use older occurrences too (see `recall`, also for sources). ids (B, T, 1 + len(orders)) from
    `recalling` have what was recalled from the whole text before each token. With ids (B, T), only these T tokens
    are searched, and in generation the stored ones.
    """

    name, reach, width = "recall", None, None

    def __init__(
        self, vocab_size: int | None, d_model: int, orders: Sequence[int], std: float = 1.0, key: Key = Key(0)
    ) -> None:
        self.values = 1 + expect_tokens(self.name, vocab_size)  # 0 for no earlier occurrence, or 1 + a token id
        expect_orders(orders, self.name)
        super().__init__(len(orders) * self.values, d_model, std, key)
        self.orders, self.columns = orders, len(orders)

    def expect_columns(self, columns: Array) -> None:
        """Raise TypeError or IndexError unless `columns` (B, T, K) are integers in range."""
        expect_ids("ids recalled", columns, self.values)

    def texts_after(self, before: Sequence[np.ndarray]) -> RecalledTexts:
        """Texts that begin with `before`, tokens (n,) each, and grow in generation."""
        return RecalledTexts(self.orders, before)

    def forward(self, text: Reading) -> tuple[Array, EmbeddingBagCache]:
        recalled, xp = text.columns, array_module(text.ids)
        if recalled is None:
            ids = text.ids if text.before is None else xp.concatenate([text.before, text.ids], axis=1)
            recalled = recall(ids, self.orders)[:, -text.ids.shape[1] :]
        return super().forward(recalled + xp.arange(recalled.shape[2], dtype=np.int32) * self.values)


class Features(Linear):
    """A linear map of I numbers that come with each token, as features (B, T, I). width: I."""

    name: ClassVar[str] = "features"
    reach, columns = 0, 0

    def __init__(self, vocab_size: int | None, d_model: int, width: int, std: float = 1.0, key: Key = Key(0)) -> None:
        expect_positive(features=width)
        super().__init__(width, d_model, False, key)
        self.width = width

    def forward(self, text: Any) -> tuple[Array, tuple]:
        B, T = text.ids.shape[:2]
        expect_shape("features", text.features, "B T I", B=B, T=T, I=self.width)
        return super().forward(text.features)


def expect_tokens(name: str, vocab_size: int | None) -> int:
    """The size of the vocabulary. Raises ValueError if there is none, since the sequences are of units."""
    if vocab_size is None:
        raise ValueError(f"{name}: expected None for units, since it needs token ids")
    return int(vocab_size)

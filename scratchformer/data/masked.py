"""Batches for pre-training on unlabelled text: hidden tokens, and pairs of texts that are consecutive or unrelated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..checks import expect_at_least, expect_ids, expect_positive, expect_shape
from ..rng import Key, expect_key
from .batching import Labelled, batches_by_length, count_of, split_rows
from .subwords import BERT_SPECIALS, Subwords

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens shown as [MASK] and as a random token; the rest are kept


def places_of(n: int, share: float) -> int:
    """How many of n tokens are chosen."""
    return max(1, round(share * n))


def single_texts(dataset: Labelled, vocabulary: Subwords) -> Labelled:
    """The texts of `dataset` as rows "[CLS] text [SEP]", as a classifier reads them; "<s> text </s>" for a RoBERTa.

    Batches that cut them should `keep` "both" ends (see `LabelledBatches`): otherwise long ones lose [CLS] or [SEP].
    """
    first, last = ([vocabulary[token]] for token in vocabulary.around)
    return replace(dataset, ids=[np.concatenate([first, ids, last], dtype=np.int32) for ids in dataset.ids])


class MaskedBatch(NamedTuple):
    """Rows "[CLS] A [SEP] B [SEP]" with hidden tokens.

    `ids` (B, T) int32; `lengths` (B,) int64, all T; `segments` (B, T) int32, 0 up to the first [SEP] and 1 after it;
    `places` (B, K) int64, the chosen positions, in ascending order; `targets` (B, K) int32, the original tokens there;
    `unrelated` (B,) int64, 1 if text B is from another row, 0 if it continues A.
    """

    ids: np.ndarray
    lengths: np.ndarray
    segments: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    unrelated: np.ndarray

    @property
    def weight(self) -> int:
        """The number of chosen positions, which all count. Every row has K, so a micro-batch has the same share of the
        positions as of the rows, and one weight serves both means of the loss.
        """
        return count_of(self.targets)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads."""
        return int(self.lengths.sum())

    def stretched(self, rows: int, length: int) -> MaskedBatch:
        """A batch of the largest size, `rows` rows of `length` tokens, filled by repeating this one."""
        share = self.places.shape[1] / (self.ids.shape[1] - 3)
        places = places_of(length - 3, share)
        widths = (length, None, length, places, places, None)
        stretched = (
            np.resize(x[:rows], (rows, width) if width else rows) for x, width in zip(self, widths, strict=True)
        )
        return MaskedBatch(*stretched)._replace(lengths=np.full(rows, length))

    def split(self, size: int) -> list[MaskedBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows."""
        return split_rows(self, size)


class MaskedBatches:
    """Pre-training batches from texts, each a pure function of a key and a step number.

    texts: sequences of token ids. vocabulary: the one that encoded them, with BERT's special tokens. batch_size: B, at
    least 2. max_length: of a row, including its three special tokens. short_length, short_steps: in the first
    `short_steps` batches (0 by default) rows have at most `short_length` tokens, since the cost of attention
    grows with the square of the length and most dependencies are local. chosen: the share of the tokens to predict.

    Every text occurs once per epoch, in batches of similar length (see `LabelledBatches`). Two exceptions: fewer than B
    texts are left out, and in the epoch in which rows become longer, the remaining steps are planned again. A row is a
    piece of n tokens of a text, from a random start; n is the same for all rows of a batch, at most max_length − 3 and
    at most the length of the shortest text, so there is no padding. The piece is cut at a random point into A and B. In
    half of the rows, B is replaced by the B of another row. So in both kinds of row, B begins within a text and has the
    same length.

    round(chosen · n) of the n tokens are chosen, at least one; special tokens never are. 80% of them are shown as
    [MASK], 10% as a token drawn from the vocabulary without the special tokens, and 10% unchanged. The model cannot
    tell which of the tokens it sees are right, so its vector for every token must take the context into account. The
    choice is new at every step.

    `len()` is the number of batches in an epoch. Raises ValueError for fewer than B texts, for a text of fewer than two
    tokens, naming its index, and unless 0 < chosen < 1; IndexError for an id that is not in the vocabulary.

    Source: Devlin et al., "BERT", 2019, section 3.1 and appendices A.1 and A.2 (nine tenths of the steps with short
    rows). The choice is new at every step as in Liu et al., "RoBERTa", 2019, section 4.1. For more than 15% chosen, see
    Wettig et al., "Should you mask 15% in masked language modeling?", 2023.
    """

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        vocabulary: Subwords,
        batch_size: int,
        max_length: int,
        key: Key,
        short_length: int | None = None,
        short_steps: int = 0,
        chosen: float = 0.15,
    ) -> None:
        short_length = max_length if short_length is None else short_length
        expect_positive(batch_size=batch_size, max_length=max_length, short_length=short_length)
        expect_at_least(0, short_steps=short_steps)
        expect_key(key)
        if batch_size < 2:
            raise ValueError(f"batch_size: expected at least 2, since rows exchange texts, got {batch_size}")
        if not 5 <= short_length <= max_length:
            raise ValueError(
                "short_length, max_length: expected 5 <= short_length <= max_length, for [CLS], [SEP], [SEP] and two "
                f"texts, got {short_length}, {max_length}"
            )
        if not 0 < chosen < 1:
            raise ValueError(f"chosen: expected 0 < chosen < 1, the share of the tokens to predict, got {chosen}")
        if len(texts) < batch_size:
            raise ValueError(f"texts: expected at least batch_size = {batch_size}, got {len(texts)}")
        for i, text in enumerate(texts):
            expect_shape(f"texts: number {i}", text, "T")
            expect_ids(f"texts: number {i}", text, len(vocabulary))
        self.lengths = np.array([len(text) for text in texts])
        if self.lengths.min() < 2:
            i = int(np.argmin(self.lengths))
            raise ValueError(f"texts: expected at least 2 tokens in each, got {self.lengths[i]} in number {i}")
        self.texts, self.batch_size, self.max_length, self.key = texts, batch_size, max_length, key
        self.cls, self.sep, self.mask = (vocabulary[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
        special = [vocabulary[token] for token in BERT_SPECIALS]
        self.ordinary = np.setdiff1d(np.arange(len(vocabulary)), special).astype(np.int32)
        self.short_length, self.short_steps, self.chosen = short_length, short_steps, chosen
        self.plan = lru_cache(1)(self._plan)  # kept for the current epoch

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size

    def batch(self, step: int) -> MaskedBatch:
        """The batch of training step `step`, always the same one."""
        epoch, place = divmod(step, len(self))
        longest = (self.short_length if step < self.short_steps else self.max_length) - 3
        rows, generator = self.plan(epoch, longest)[place], self.key.fold("batch", step).generator()
        n = min(longest, self.lengths[rows].min())
        starts = generator.integers(0, self.lengths[rows] - n + 1)
        words = np.stack([self.texts[row][start : start + n] for row, start in zip(rows, starts, strict=True)])
        words = words.astype(np.int32, copy=False)
        return self._masked(*self._paired(words, generator), generator)

    def _plan(self, epoch: int, longest: int) -> list[np.ndarray]:
        """The texts of each batch of an epoch, whose pieces have at most `longest` tokens."""
        shown = np.minimum(self.lengths, longest)
        return batches_by_length(shown, self.batch_size, self.key.fold(epoch), whole=True)

    def _paired(
        self, words: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Cut pieces (B, n) into A and B. Returns the tokens (B, n), their positions in the row (B, n), the lengths of
        A (B, 1), and `unrelated` (B,).
        """
        B, n = words.shape
        cut = generator.integers(1, n, (B, 1))
        unrelated = generator.integers(0, 2, (B,))
        second = np.arange(n) >= cut
        words = np.where(second & (unrelated[:, None] == 1), np.roll(words, 1, axis=0), words)
        return words, np.arange(n) + 1 + second, cut, unrelated

    def _masked(
        self,
        words: np.ndarray,
        at: np.ndarray,
        cut: np.ndarray,
        unrelated: np.ndarray,
        generator: np.random.Generator,
    ) -> MaskedBatch:
        B, n = words.shape
        T = n + 3
        ids = np.full((B, T), self.sep, np.int32)
        ids[:, 0] = self.cls
        np.put_along_axis(ids, at, words, axis=1)
        chosen = np.argsort(generator.random((B, n)), axis=1)[:, : places_of(n, self.chosen)]
        chosen.sort(axis=1)
        places, targets = (np.take_along_axis(x, chosen, axis=1) for x in (at, words))
        kind = generator.random(places.shape)
        replacement = self.ordinary[generator.integers(0, len(self.ordinary), places.shape)]
        shown = np.where(kind < MASKED + REPLACED, replacement, targets)
        np.put_along_axis(ids, places, np.where(kind < MASKED, self.mask, shown), axis=1)
        segments = (np.arange(T) > cut + 1).astype(np.int32)
        return MaskedBatch(ids, np.full(B, T), segments, places, targets, unrelated)

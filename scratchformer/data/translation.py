"""Batches of sentence pairs, of about as many tokens each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..ops import IGNORED
from ..rng import Key
from .batching import count_of, slices, width_of
from .download import DataError
from .multi30k import Pairs
from .subwords import BEGIN, END, PAD, Subwords


class TranslationBatch(NamedTuple):
    """Sentence pairs for an encoder-decoder.

    source: (B, S) int32, PAD after the end. lengths: (B,) int64, of the sources. target: (B, T) int32, what the
    decoder is given: BEGIN and the target's tokens. targets: (B, T) int32, what it is to predict: the target's tokens
    and END, and after them IGNORED.
    """

    source: np.ndarray
    lengths: np.ndarray
    target: np.ndarray
    targets: np.ndarray

    @property
    def weight(self) -> int:
        """The number of predictions that count."""
        return count_of(self.targets)

    @property
    def tokens(self) -> int:
        """The number of tokens on both sides, padding not counted."""
        return int(self.lengths.sum()) + self.weight

    def stretched(self, rows: int, length: int) -> TranslationBatch:
        """A batch of `rows` pairs of `length` tokens, these ones repeated: as large as batches may be."""
        source, target, targets = (
            np.resize(x[:rows], (rows, length)) for x in (self.source, self.target, self.targets)
        )
        return TranslationBatch(source, np.full(rows, length), target, np.maximum(targets, 0))

    def split(self, size: int) -> list[TranslationBatch]:
        """The same rows in order, as micro-batches of at most `size` rows, each as wide as its longest."""
        parts = []
        for rows in slices(len(self.lengths), size):
            source, lengths, target, targets = (a[rows] for a in self)
            width = width_of(targets)
            parts.append(TranslationBatch(source[:, : lengths.max()], lengths, target[:, :width], targets[:, :width]))
        return parts


class TokenPairs(NamedTuple):
    """Sentence pairs as token ids, int32 (S,) and (T,) each; the sources end with END."""

    source: list[np.ndarray]
    target: list[np.ndarray]


def encode_pairs(subwords: Subwords, pairs: Pairs, max_length: int, part: str = "pairs") -> TokenPairs:
    """The pairs as token ids. Raises DataError for a sentence of more than `max_length` tokens, with END, for no pairs,
    and unless there are as many targets as sources; part: what the message calls them.
    """
    if not pairs.source:
        raise DataError(f"{part}: expected sentences, got none")
    if len(pairs.source) != len(pairs.target):
        raise DataError(f"{part}: {len(pairs.source):,} sources, but {len(pairs.target):,} targets")
    end = np.array([subwords[END]], np.int32)
    source = [np.append(ids, end) for ids in subwords.encode_all(pairs.source)]
    target = subwords.encode_all(pairs.target)
    for side, sentences in (("source", source), ("target", target)):
        longest = max(range(len(sentences)), key=lambda i: len(sentences[i]))
        found, expected = len(sentences[longest]) + (side == "target"), f"expected at most {max_length} tokens with END"
        if found > max_length:
            raise DataError(f"{part}: {side} sentence {longest + 1}: {expected}, got {found}")
    return TokenPairs(source, target)


class TranslationBatches:
    """Training batches: every pair once an epoch, those of like length together, about `tokens` tokens a side.

    Pairs are sorted by the length of the target and then of the source, equal ones in random order, and cut where
    rows × the longest side would exceed `tokens`; then the batches are shuffled. Both by `key` and the epoch, so that
    batch n is a function of n. The cuts depend on the lengths alone, so that every epoch has as many batches: `len()`.
    Raises ValueError if there are no pairs, or one is longer than `tokens`.
    """

    def __init__(self, pairs: TokenPairs, tokens: int, subwords: Subwords, key: Key) -> None:
        self.pairs, self.key, self.subwords = pairs, key, subwords
        self.source_lengths, self.target_lengths = lengths_of(pairs)
        longest = np.maximum(self.source_lengths, self.target_lengths)
        if not len(longest) or longest.max() > tokens:
            raise ValueError(f"tokens: expected pairs of at most {tokens} tokens, got one of {max(longest, default=0)}")
        order = np.lexsort((self.source_lengths, self.target_lengths))
        self.cuts = cut_by_tokens(longest[order], tokens)
        self._plan: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self.cuts)

    def epoch(self, step: int) -> int:
        """The epoch that training step `step` belongs to, from 0."""
        return step // len(self)

    def batch(self, step: int) -> TranslationBatch:
        """The batch of training step `step`, the same whenever it is asked for."""
        epoch, place = divmod(step, len(self))
        plan = self._plan  # read once: another thread may ask for another epoch
        if plan is None or plan[0] != epoch:
            draw = self.key.fold(epoch).generator()
            order = np.lexsort((draw.random(len(self.source_lengths)), self.source_lengths, self.target_lengths))
            plan = self._plan = (epoch, [order[self.cuts[i]] for i in draw.permutation(len(self.cuts))])
        return translation_batch(self.pairs, plan[1][place], self.subwords)


def pairs_in_order(pairs: TokenPairs, tokens: int, subwords: Subwords) -> Iterator[TranslationBatch]:
    """Batches for evaluation: every pair once, the shortest first; `tokens` as for `TranslationBatches`."""
    source, target = lengths_of(pairs)
    order = np.lexsort((source, target))
    cuts = cut_by_tokens(np.maximum(source, target)[order], tokens)
    return (translation_batch(pairs, order[cut], subwords) for cut in cuts)


def lengths_of(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """How long the sides of each pair are in a batch, with END."""
    return np.array([len(s) for s in pairs.source]), np.array([len(t) + 1 for t in pairs.target])


def cut_by_tokens(lengths: np.ndarray, tokens: int) -> list[slice]:
    """Consecutive slices of `lengths` (n,), each of as many as keep number × longest up to `tokens`."""
    cuts, start, longest = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if i > start and (i + 1 - start) * longest > tokens:
            cuts.append(slice(start, i))
            start, longest = i, length
    return [*cuts, slice(start, len(lengths))]


def translation_batch(pairs: TokenPairs, rows: Sequence[int] | np.ndarray, subwords: Subwords) -> TranslationBatch:
    """The pairs with the numbers `rows` as a batch."""
    begin, end, pad = (np.array([subwords[token]], np.int32) for token in (BEGIN, END, PAD))
    source = [pairs.source[i] for i in rows]
    target = [np.concatenate([begin, pairs.target[i]]) for i in rows]
    targets = [np.concatenate([pairs.target[i], end]) for i in rows]
    lengths = np.array([len(s) for s in source])
    return TranslationBatch(padded(source, pad), lengths, padded(target, pad), padded(targets, IGNORED))


def padded(sentences: Sequence[np.ndarray], filler: np.ndarray | int) -> np.ndarray:
    """(B, longest) int32, with `filler` after the end of each sentence."""
    lengths = np.array([len(s) for s in sentences])
    rows = np.full((len(sentences), lengths.max()), filler, np.int32)
    rows[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(sentences)
    return rows

"""Batches of sentence pairs, each with about the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..checks import expect_positive
from ..ops import IGNORED
from ..rng import Key, expect_key
from ..shell.reading import DataError
from .batching import count_of, padded, slices, width_of
from .pairs import Pairs
from .subwords import BEGIN, END, PAD, Subwords


class TranslationBatch(NamedTuple):
    """Sentence pairs for an encoder-decoder.

    source: (B, S) int32, with PAD after the end. lengths: (B,) int64, of the sources. target: (B, T) int32, the
    decoder's input: BEGIN, then the tokens of the target. targets: (B, T) int32, what it should predict: the tokens of
    the target, END, then IGNORED.
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
        """The number of tokens on both sides, without padding."""
        return int(self.lengths.sum()) + self.weight

    def stretched(self, rows: int, length: int) -> TranslationBatch:
        """A batch of the largest size, `rows` pairs of `length` tokens, filled by repeating this one."""
        source, target, targets = (
            np.resize(x[:rows], (rows, length)) for x in (self.source, self.target, self.targets)
        )
        return TranslationBatch(source, np.full(rows, length), target, np.maximum(targets, 0))

    def split(self, size: int) -> list[TranslationBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows, each as wide as its longest row."""
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
    """The pairs as token ids. Raises DataError if there are no pairs, if sources and targets differ in number, or if a
    sentence has more than `max_length` tokens with END; `part` names the pairs in the message.
    """
    expect_positive(max_length=max_length)
    if not pairs.source:
        raise DataError(f"{part}: expected sentences, got none")
    if len(pairs.source) != len(pairs.target):
        raise DataError(f"{part}: {len(pairs.source):,} sources, but {len(pairs.target):,} targets")
    source = [np.append(ids, np.int32(subwords[END])) for ids in subwords.encode_all(pairs.source)]
    target = subwords.encode_all(pairs.target)
    for side, sentences in (("source", source), ("target", target)):
        longest = max(range(len(sentences)), key=lambda i: len(sentences[i]))
        length = len(sentences[longest]) + (side == "target")
        if length > max_length:
            where = f"{part}: {side} sentence {longest + 1}"
            raise DataError(f"{where}: expected at most {max_length} tokens with END, got {length}")
    return TokenPairs(source, target)


class TranslationBatches:
    """Training batches of pairs of similar length: every pair once per epoch, up to `tokens` tokens per side.

    Pairs are sorted by target length, then source length, ties in random order. They are cut where rows × the longest
    side would exceed `tokens`, and the batches are shuffled. All randomness comes from `key` and the epoch, so batch n
    is a function of n. The cuts depend only on the lengths, so every epoch has the same number of batches, `len()`.
    Raises ValueError if one is longer than `tokens`.
    """

    def __init__(
        self,
        pairs: TokenPairs,
        tokens: int,
        subwords: Subwords,
        key: Key,
    ) -> None:
        expect_positive(tokens=tokens)
        expect_key(key)
        self.pairs, self.key, self.subwords = pairs, key, subwords
        self.source_lengths, self.target_lengths = lengths_of(pairs)
        longest = np.maximum(self.source_lengths, self.target_lengths)
        if longest.max() > tokens:
            raise ValueError(f"tokens: expected pairs of at most {tokens} tokens, got one of {longest.max()}")
        order = np.lexsort((self.source_lengths, self.target_lengths))
        self.cuts = cut_by_tokens(longest[order], tokens)
        self.plan = lru_cache(1)(self._plan)  # kept for the current epoch

    def __len__(self) -> int:
        return len(self.cuts)

    def batch(self, step: int) -> TranslationBatch:
        """The batch of training step `step`, always the same one."""
        epoch, place = divmod(step, len(self))
        return translation_batch(self.pairs, self.plan(epoch)[place], self.subwords)

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The pairs of each batch of an epoch."""
        draw = self.key.fold(epoch).generator()
        order = np.lexsort((draw.random(len(self.source_lengths)), self.source_lengths, self.target_lengths))
        return [order[self.cuts[i]] for i in draw.permutation(len(self.cuts))]


def pairs_in_order(pairs: TokenPairs, tokens: int, subwords: Subwords) -> Iterator[TranslationBatch]:
    """Batches for evaluation: every pair once, shortest first; the rest as for `TranslationBatches`."""
    expect_positive(tokens=tokens)
    source, target = lengths_of(pairs)
    order = np.lexsort((source, target))
    cuts = cut_by_tokens(np.maximum(source, target)[order], tokens)
    return (translation_batch(pairs, order[cut], subwords) for cut in cuts)


def lengths_of(pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the sources and of the targets, including END."""
    return np.array([len(s) for s in pairs.source]), np.array([len(t) + 1 for t in pairs.target])


def cut_by_tokens(lengths: np.ndarray, tokens: int) -> list[slice]:
    """Consecutive slices of `lengths` (n,), each as long as possible while number × longest is at most `tokens`."""
    cuts, start, longest = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if i > start and (i + 1 - start) * longest > tokens:
            cuts.append(slice(start, i))
            start, longest = i, length
    return [*cuts, slice(start, len(lengths))]


def translation_batch(pairs: TokenPairs, rows: Sequence[int] | np.ndarray, subwords: Subwords) -> TranslationBatch:
    """The pairs with the indices `rows`, as a batch."""
    begin, end = (np.array([subwords[token]], np.int32) for token in (BEGIN, END))
    pad = subwords[PAD]
    source = [pairs.source[i] for i in rows]
    target = [np.concatenate([begin, pairs.target[i]]) for i in rows]
    targets = [np.concatenate([pairs.target[i], end]) for i in rows]
    lengths = np.array([len(s) for s in source])
    return TranslationBatch(padded(source, pad), lengths, padded(target, pad), padded(targets, IGNORED))

"""Texts with evidence for each word (see `evidence`), and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..data.batching import Labelled, LabelledBatch, padded, slices
from ..data.imdb import Imdb
from ..data.vocabulary import UNKNOWN
from .evidence import FOLDS, find_evidence


class EvidenceBatch(NamedTuple):
    """Texts with numbers for each word: a `LabelledBatch` with `evidence` (B, T, I) float32, 0 after the end."""

    ids: np.ndarray
    evidence: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The arguments of the model's forward."""
        return self.ids, self.evidence, self.lengths

    @property
    def weight(self) -> int:
        """The number of labels."""
        return len(self.labels)

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.lengths.sum())

    def without(self, dropped: np.ndarray) -> EvidenceBatch:
        """The batch with <unk> in place of the words where `dropped` (B, T) is true, and without their evidence."""
        return self._replace(
            ids=np.where(dropped, np.int32(UNKNOWN), self.ids), evidence=self.evidence * ~dropped[:, :, None]
        )

    def stretched(self, rows: int, length: int) -> EvidenceBatch:
        """A batch of the largest size, `rows` rows of `length` tokens, filled by repeating this one."""
        ids, lengths, labels = LabelledBatch(self.ids, self.lengths, self.labels).stretched(rows, length)
        evidence = np.resize(self.evidence[:rows], (rows, length, self.evidence.shape[2]))
        return EvidenceBatch(ids, evidence, lengths, labels)

    def split(self, size: int) -> list[EvidenceBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows, each as wide as its longest text."""
        parts = []
        for rows in slices(len(self.ids), size):
            ids, evidence, lengths, labels = (a[rows] for a in self)
            width = lengths.max()
            parts.append(EvidenceBatch(ids[:, :width], evidence[:, :width], lengths, labels))
        return parts


@dataclass(frozen=True, eq=False)
class Evident(Labelled):
    """Labelled texts with evidence: numbers that come with each word, a float32 array (T, I) for each text.

    logits: for each text the linear model's logit of class 1, (texts,). A classifier does not read them: `stacked`
    joins its predictions with them.
    """

    evidence: Sequence[np.ndarray] = ()
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))

    def chosen(self, indices: Any) -> Evident:
        texts = Labelled(self.ids, self.labels).chosen(indices)
        return Evident(texts.ids, texts.labels, [self.evidence[i] for i in indices], self.logits[indices])

    def batch(self, indices: Any, cut: Callable[[np.ndarray], np.ndarray]) -> EvidenceBatch:
        ids, lengths, labels = super().batch(indices, cut)
        return EvidenceBatch(ids, padded([cut(self.evidence[i]) for i in indices], 0, np.float32), lengths, labels)

    def check(self) -> None:
        super().check()
        width = np.shape(self.evidence[0])[1:] if len(self.evidence) else ()
        if len(width) != 1 or [np.shape(e) for e in self.evidence] != [(len(ids), *width) for ids in self.ids]:
            raise ValueError("dataset: expected evidence (T, I) for each text of T words, with the same I")


def with_evidence(data: Imdb, order: int) -> Imdb:
    """The dataset with the evidence of n-grams of up to `order` words, from a linear model of the training part: see
    `find_evidence`. The reviews of a film are all in one fold, unless there is only one.
    """
    others, folds = [data.validation.ids, data.test.ids], data.films % FOLDS
    one_film = len(np.unique(folds)) < 2  # as in a few reviews that share a name
    said = find_evidence(data.train.ids, data.train.labels, others, order, folds=None if one_film else folds)
    parts = [
        Evident(part.ids, part.labels, *judged)
        for part, judged in zip((data.train, data.validation, data.test), said, strict=True)
    ]
    return data._replace(train=parts[0], validation=parts[1], test=parts[2])

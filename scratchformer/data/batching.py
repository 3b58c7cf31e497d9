"""Cutting texts into batches, each a pure function of a key and a step number.

Nothing here has a position that moves on. A run that resumes at step n asks for batch n and gets what it
would have got, and replicas and threads may ask in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..rng import Key
from .download import DataError
from .imdb import Labelled
from .vocabulary import PAD, UNKNOWN

_CHUNK = 64  # batches that are sorted by length together
_KEEP = ("head", "tail", "both")


class TextBatch(NamedTuple):
    """Texts for a language model: `ids` (B, T) int32, and `targets` (B, T) int32, the id after each."""

    ids: np.ndarray
    targets: np.ndarray

    @property
    def weight(self) -> int:
        """The number of predictions, which its mean loss is a mean over."""
        return self.targets.size

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads, for counting speed."""
        return self.ids.size

    def split(self, size: int) -> list[TextBatch]:
        """The same rows in order, as micro-batches of at most `size` rows."""
        return [TextBatch(self.ids[rows], self.targets[rows]) for rows in _slices(len(self.ids), size)]


class LabelledBatch(NamedTuple):
    """Texts for a classifier: `ids` (B, T) int32, 0 past a text's end, `lengths` and `labels` (B,) int64."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    @property
    def weight(self) -> int:
        """The number of texts, which its mean loss is a mean over."""
        return len(self.labels)

    @property
    def tokens(self) -> int:
        """The number of tokens, padding not counted."""
        return int(self.lengths.sum())

    def split(self, size: int) -> list[LabelledBatch]:
        """The same rows in order, as micro-batches of at most `size` rows, each as wide as its longest."""
        return [
            LabelledBatch(self.ids[rows, : self.lengths[rows].max()], self.lengths[rows], self.labels[rows])
            for rows in _slices(len(self.ids), size)
        ]


class TextBatches:
    """Training batches from one long text: subsequences that start anywhere, drawn anew at every step.

    `data` (n,) of integers, `batch_size` B, `context` T. Raises DataError if n < T + 1.
    """

    def __init__(self, data: np.ndarray, batch_size: int, context: int, key: Key) -> None:
        _check_positive(batch_size=batch_size, context=context)
        if len(data) < context + 1:
            raise DataError(
                f"corpus: {len(data):,} tokens are fewer than context + 1 = {context + 1:,}; "
                "take a longer text or a smaller context"
            )
        self.data, self.batch_size, self.context, self.key = data, batch_size, context, key

    def batch(self, step: int) -> TextBatch:
        """The batch of training step `step`, the same whenever it is asked for."""
        generator = self.key.fold(step).generator()
        starts = generator.integers(0, len(self.data) - self.context, size=self.batch_size)
        return _text_batch(self.data, starts, self.context)


def windows(data: np.ndarray, context: int, stride: int, batch_size: int) -> Iterator[tuple[TextBatch, np.ndarray]]:
    """Batches for evaluation on all of `data` (n,), with `counted`, bool (B, T): the predictions to count.

    Windows of T = `context` start every `stride` tokens. Each of positions 1 to n − 1 is counted once, in the
    first window that predicts it, so with stride < context every counted prediction but those of the first
    window has at least context − stride tokens before it. The last window is moved back to have full length;
    a text shorter than T + 1 is one shorter window.

    Raises ValueError if `stride` is not in 1 to `context`, DataError if n < 2; both at once, before the first
    batch.
    """
    _check_positive(context=context, stride=stride, batch_size=batch_size)
    if stride > context:
        raise ValueError(f"stride: expected at most the context, {context}, got {stride}: positions would be left out")
    if len(data) < 2:
        raise DataError(f"corpus: {len(data)} token(s), but there is nothing to predict in fewer than 2")
    context = min(context, len(data) - 1)
    last = len(data) - 1 - context
    starts = np.append(np.arange(0, last, stride), last)
    # A window predicts positions start + 1 to start + T; the windows before it predicted those up to `done`.
    done = np.append(0, starts[:-1] + context)
    ahead = np.arange(1, context + 1)
    return (
        (_text_batch(data, starts[rows], context), starts[rows, None] + ahead > done[rows, None])
        for rows in _slices(len(starts), batch_size)
    )


class LabelledBatches:
    """Training batches from labelled texts: every text once an epoch, in random order, with little padding.

    Epoch e is a permutation drawn by `key.fold(e)`, cut into chunks of 64 batches. Each chunk is sorted by
    length and cut into batches of B = `batch_size`, and then all batches of the epoch are shuffled. One batch
    an epoch may be smaller. Texts longer than `max_length` are cut: `keep` "head" keeps the first words,
    "tail" the last, "both" the first quarter and the last three quarters of `max_length`.

    word_dropout: the probability with which a word is replaced by <unk>, drawn anew at each step from `key`. It
    keeps a model from learning texts by heart; Gal, Ghahramani, "A theoretically grounded application of dropout in
    recurrent neural networks", 2016, section 4.2, drop whole words likewise.

    `len()` is the number of batches an epoch. Raises ValueError for an empty text, naming its index.
    """

    def __init__(
        self,
        dataset: Labelled,
        batch_size: int,
        max_length: int,
        key: Key,
        keep: str = "head",
        word_dropout: float = 0.0,
    ) -> None:
        self.lengths = _check_dataset(dataset, batch_size, max_length, keep)
        if not 0 <= word_dropout < 1:
            raise ValueError(f"word_dropout: expected 0 <= word_dropout < 1, got {word_dropout}")
        self.word_dropout = word_dropout
        self.dataset, self.batch_size, self.key = dataset, batch_size, key
        self.max_length, self.keep = max_length, keep
        # The current epoch, and the indices of the texts in each of its batches.
        self._plan: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that training step `step` belongs to, from 0."""
        return step // len(self)

    def batch(self, step: int) -> LabelledBatch:
        """The batch of training step `step`, the same whenever it is asked for."""
        epoch, place = divmod(step, len(self))
        plan = self._plan  # read once: another thread may ask for another epoch
        if plan is None or plan[0] != epoch:
            plan = self._plan = (epoch, self._epoch_batches(epoch))
        batch = _labelled_batch(self.dataset, plan[1][place], self.max_length, self.keep)
        if not self.word_dropout:
            return batch
        dropped = self.key.fold("word dropout", step).generator().random(batch.ids.shape) < self.word_dropout
        return batch._replace(ids=np.where(dropped & (batch.ids != PAD), np.int32(UNKNOWN), batch.ids))

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        generator = self.key.fold(epoch).generator()
        order = generator.permutation(len(self.lengths))
        batches = []
        for rows in _slices(len(order), _CHUNK * self.batch_size):
            chunk = order[rows]
            chunk = chunk[np.argsort(self.lengths[chunk], kind="stable")]
            batches += [chunk[part] for part in _slices(len(chunk), self.batch_size)]
        return [batches[i] for i in generator.permutation(len(batches))]


def in_order(dataset: Labelled, batch_size: int, max_length: int, keep: str = "head") -> Iterator[LabelledBatch]:
    """Batches for evaluation: every text once, the shortest first; arguments as for `LabelledBatches`."""
    order = np.argsort(_check_dataset(dataset, batch_size, max_length, keep), kind="stable")
    return (_labelled_batch(dataset, order[rows], max_length, keep) for rows in _slices(len(order), batch_size))


def _text_batch(data: np.ndarray, starts: np.ndarray, context: int) -> TextBatch:
    rows = data[starts[:, None] + np.arange(context + 1)].astype(np.int32)  # (B, T + 1)
    return TextBatch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))


def _labelled_batch(dataset: Labelled, indices: np.ndarray, max_length: int, keep: str) -> LabelledBatch:
    texts = [_cut(dataset.ids[i], max_length, keep) for i in indices]
    lengths = np.array([len(text) for text in texts])
    ids = np.full((len(texts), lengths.max()), PAD, dtype=np.int32)
    ids[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(texts)
    return LabelledBatch(ids, lengths, np.asarray(dataset.labels, dtype=np.int64)[indices])


def _cut(text: np.ndarray, length: int, keep: str) -> np.ndarray:
    """At most `length` words of `text`; see `LabelledBatches` for `keep`."""
    if len(text) <= length:
        return text
    head = {"head": length, "tail": 0, "both": length // 4}[keep]
    return np.concatenate([text[:head], text[len(text) - (length - head) :]])


def _slices(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 to `count`."""
    _check_positive(size=size)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _check_dataset(dataset: Labelled, batch_size: int, max_length: int, keep: str) -> np.ndarray:
    """The lengths that the texts have once cut, int64 (number of texts,); raises ValueError, see above."""
    _check_positive(batch_size=batch_size, max_length=max_length)
    if keep not in _KEEP:
        raise ValueError(f"keep: expected one of {', '.join(_KEEP)}, got {keep!r}")
    if len(dataset.ids) != len(dataset.labels):
        raise ValueError(f"dataset: {len(dataset.ids)} texts but {len(dataset.labels)} labels")
    if len(dataset.ids) == 0:
        raise ValueError("dataset: no text in it")
    lengths = np.array([len(text) for text in dataset.ids])
    if not lengths.all():
        raise ValueError(f"dataset: text number {np.argmin(lengths)} is empty")
    return np.minimum(lengths, max_length)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")

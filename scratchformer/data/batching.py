"""Batches of texts, each a pure function of a key and a step number.

Nothing here keeps a current position. A run that resumes at step n asks for batch n and gets the same batch as before,
and replicas and threads may ask in any order. The one exception is the memory in `SegmentBatches`, which the model
computes: it belongs to one step and is saved with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..backend import Array, array_module, to_cpu
from ..checks import (
    expect_array,
    expect_at_least,
    expect_fraction,
    expect_instance,
    expect_integers,
    expect_one_of,
    expect_positive,
    expect_shape,
)
from ..ops import IGNORED
from ..rng import Key, expect_key
from ..shell.reading import DataError
from .vocabulary import PAD, UNKNOWN

MAX_NUMBERS = 1 << 24  # in a batch that has more than all of the data
B = TypeVar("B", bound=tuple)
_CHUNK = 64  # batches whose texts are sorted by length together
_KEEP = ("head", "both")


def count_of(targets: np.ndarray) -> int:
    """The number of targets that are not IGNORED. A batch's loss is the mean over them, so this is its weight."""
    return int(np.count_nonzero(targets != IGNORED))


def width_of(targets: np.ndarray) -> int:
    """The number of columns of `targets` (B, T) up to the last with a target that counts; at least 1."""
    return 1 + int(max(np.flatnonzero((targets != IGNORED).any(axis=0)), default=0))


def split_rows(batch: B, size: int) -> list[B]:
    """The same rows, in order, as micro-batches of at most `size` rows."""
    return [type(batch)(*(a[rows] for a in batch)) for rows in slices(len(batch[0]), size)]


class TextBatch(NamedTuple):
    """Texts for a language model: `ids` (B, T) int32, and `targets` (B, T) int32, the id that follows, or IGNORED."""

    ids: np.ndarray
    targets: np.ndarray

    @property
    def weight(self) -> int:
        """The number of predictions that count."""
        return count_of(self.targets)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads, for counting speed."""
        return self.ids.size

    def stretched(self, rows: int, length: int) -> TextBatch:
        """A batch of the largest size, `rows` rows of `length` tokens, filled by repeating this one."""
        return TextBatch(*(np.resize(x[:rows], (rows, length)) for x in self))

    def split(self, size: int) -> list[TextBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows."""
        return split_rows(self, size)


class SegmentBatch(NamedTuple):
    """Segments for a model with a memory: `ids` and `targets` as in `TextBatch`, and `memory` (B, depth, M, C), what
    each block of the model kept from earlier segments; M is 0 if there are none.
    """

    ids: np.ndarray
    targets: np.ndarray
    memory: np.ndarray

    @property
    def weight(self) -> int:
        """The number of predictions that count."""
        return count_of(self.targets)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads, for counting speed."""
        return self.ids.size

    def stretched(self, rows: int, length: int) -> SegmentBatch:
        """A batch of `rows` rows of `length` tokens, filled by repeating this one, with the memories of its rows."""
        ids, targets = (np.resize(x[:rows], (rows, length)) for x in (self.ids, self.targets))
        return SegmentBatch(ids, targets, self.memory[:rows])

    def split(self, size: int) -> list[SegmentBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows."""
        return split_rows(self, size)


class LabelledBatch(NamedTuple):
    """Texts for a classifier: `ids` (B, T) int32, 0 after the end of a text, `lengths` and `labels` (B,) int64.

    For a model that classifies every token (`Classifier` with pool "none") labels are (B, T), and some may be IGNORED.
    """

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    @property
    def weight(self) -> int:
        """The number of labels that count, of texts or of tokens."""
        return count_of(self.labels)

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.lengths.sum())

    def stretched(self, rows: int, length: int) -> LabelledBatch:
        """A batch of the largest size, `rows` rows of `length` tokens, filled by repeating this one."""
        ids = np.resize(self.ids[:rows], (rows, length, *self.ids.shape[2:]))
        shape = (rows, length)[: self.labels.ndim]
        return LabelledBatch(ids, np.full(rows, length), np.resize(self.labels[:rows], shape))

    def split(self, size: int) -> list[LabelledBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows. Each is as wide as its longest text, or
        wider if a label that counts comes after that.
        """
        parts = []
        for rows in slices(len(self.ids), size):
            ids, lengths, labels = (a[rows] for a in self)
            width = lengths.max()
            if labels.ndim == 2:
                width = max(width, width_of(labels))
                labels = labels[:, :width]
            parts.append(LabelledBatch(ids[:, :width], lengths, labels))
        return parts


@dataclass(frozen=True, eq=False)
class Labelled:
    """Encoded texts and their classes: `ids`, an int32 array (T,) for each, and `labels`, an int64 array (texts,)."""

    ids: list[np.ndarray]
    labels: np.ndarray

    def chosen(self, indices: Any) -> Labelled:
        """The texts with these indices, a list of integers."""
        return replace(self, ids=[self.ids[i] for i in indices], labels=np.asarray(self.labels)[indices])

    def evenly(self, count: int) -> Labelled:
        """`count` of the texts, evenly spaced, so that each class keeps its share even if the texts are sorted."""
        expect_at_least(0, count=count)
        if count > len(self.labels):
            raise ValueError(f"count: expected at most the {len(self.labels)} texts, got {count}")
        return self.chosen((np.arange(count) * len(self.labels) // max(count, 1)).tolist())

    def batch(self, indices: Any, cut: Callable[[np.ndarray], np.ndarray]) -> Any:
        """The texts with these indices, integers, as a batch; `cut` shortens what comes with each word of a text."""
        texts = [cut(self.ids[i]) for i in indices]
        labels = np.asarray(self.labels, np.int64)[indices]
        return LabelledBatch(padded(texts, PAD), np.array([len(ids) for ids in texts]), labels)

    def check(self) -> None:
        """Raise TypeError or ValueError unless there are texts, each with words and a label."""
        if len(self.ids) != len(self.labels):
            raise ValueError(f"dataset: {len(self.ids)} texts but {len(self.labels)} labels")
        if len(self.ids) == 0:
            raise ValueError("dataset: expected texts, got none")
        labels = expect_array("dataset: labels", self.labels)
        if labels.dtype.kind not in "biu":
            raise TypeError(f"dataset: expected labels that are integers, got {labels.dtype}")
        for i, text in enumerate(self.ids):
            expect_shape(f"dataset: text number {i}", text, "T")
            expect_integers(f"dataset: text number {i}", text)
            if not len(text):
                raise ValueError(f"dataset: text number {i} is empty")


def expect_text(data: np.ndarray) -> None:
    """Raise TypeError or ValueError unless `data` is (n,), integers."""
    expect_shape("data", data, "n")
    expect_integers("data", data)


def expect_batch(batch_size: int, row: int, data: Array) -> None:
    """Raise ValueError unless a batch, with `row` numbers in each row, has at most MAX_NUMBERS, or those of `data`."""
    most = max(MAX_NUMBERS, np.size(data)) // max(row, 1)
    if batch_size > most:
        raise ValueError(f"batch_size: expected at most {most:,} rows of {row:,}, got {batch_size:,}")


class TextBatches:
    """Training batches from one long text: subsequences from random starts, drawn afresh at every step.

    `data`: (n,), integers. `batch_size`: B. `context`: T. Raises DataError if n < T + 1.
    """

    def __init__(self, data: np.ndarray, batch_size: int, context: int, key: Key) -> None:
        expect_positive(batch_size=batch_size, context=context)
        expect_text(data)
        expect_key(key)
        if len(data) < context + 1:
            raise DataError(
                f"corpus: {len(data):,} tokens are fewer than context + 1 = {context + 1:,}; "
                "use a longer text or a smaller context"
            )
        expect_batch(batch_size, context, data)
        self.data, self.batch_size, self.context, self.key = data, batch_size, context, key

    def batch(self, step: int) -> TextBatch:
        """The batch of training step `step`, always the same one."""
        generator = self.key.fold(step).generator()
        starts = generator.integers(0, len(self.data) - self.context, size=self.batch_size)
        return _text_batch(self.data, starts, self.context)


class DrawnBatches:
    """Training batches of `batch_size` rows of one large batch, `whole`, drawn at random at every step."""

    def __init__(self, whole: Any, batch_size: int, key: Key) -> None:
        expect_instance("whole", whole, tuple)
        rows = [len(a) for a in whole]
        if len(set(rows)) != 1 or not rows[0]:
            raise ValueError(f"whole: expected arrays with the same number of rows, at least one, got {rows}")
        expect_positive(batch_size=batch_size)
        expect_key(key)
        expect_batch(batch_size, math.prod(np.shape(whole[0])[1:]), whole[0])
        self.whole, self.batch_size, self.key = whole, batch_size, key

    def batch(self, step: int) -> Any:
        """The batch of training step `step`, the same whenever it is asked for."""
        rows = self.key.fold(step).generator().integers(0, len(self.whole[0]), self.batch_size)
        drawn = (a[rows] for a in self.whole)
        return type(self.whole)(*drawn) if hasattr(self.whole, "_fields") else tuple(drawn)


class SegmentBatches:
    """Training batches from one long text in order: B parallel streams, and one segment of each at every step.

    The text is cut into B = `batch_size` streams of equal length. Steps i and i + 1 give consecutive segments of T =
    `context` tokens, with the memory that the model returned after step i (see `remember`). At the end of the streams a
    new pass begins, with an empty memory and an offset drawn from `key`, so that the segment boundaries differ from
    pass to pass. `data`: (n,), integers. `depth`, `d_model`: the model's. Raises DataError if a stream has fewer than
    T + 1 tokens.

    `len()` is the number of segments in a pass.
    """

    def __init__(self, data: np.ndarray, batch_size: int, context: int, key: Key, depth: int, d_model: int) -> None:
        expect_positive(batch_size=batch_size, context=context, depth=depth, d_model=d_model)
        expect_text(data)
        expect_key(key)
        self.stream = len(data) // batch_size  # tokens
        if self.stream < context + 1:
            raise DataError(
                f"corpus: {len(data):,} tokens make {batch_size} streams of {self.stream:,}, fewer than context + 1 = "
                f"{context + 1:,}; use a longer text, a smaller batch or a smaller context"
            )
        self.data, self.batch_size, self.context, self.key = data, batch_size, context, key
        self.nothing = np.zeros((batch_size, depth, 0, d_model), np.float32)
        self.step, self.memory = 0, self.nothing  # the step that the memory is for

    def __len__(self) -> int:
        return max(1, self.stream // self.context - 1)

    def batch(self, step: int) -> SegmentBatch:
        """The batch of training step `step`. Raises ValueError if the memory is for another step and this step does
        not begin a pass.
        """
        number, segment = divmod(step, len(self))
        slack = self.stream - 1 - len(self) * self.context
        offset = int(self.key.fold(number).generator().integers(0, min(slack, self.context - 1), endpoint=True))
        if segment and step != self.step:
            raise ValueError(f"step: the memory is for step {self.step}, not for step {step}")
        starts = np.arange(self.batch_size) * self.stream + offset + segment * self.context
        return SegmentBatch(*_text_batch(self.data, starts, self.context), self.memory if segment else self.nothing)

    def remember(self, step: int, memories: Sequence[Array]) -> None:
        """Keep the memories that the model returned for the micro-batches of `step`, in order, for the next step. They
        stay on their device.
        """
        memory = array_module(*memories).concatenate(memories)
        if len(memory) != self.batch_size:
            raise ValueError(f"memories: expected {self.batch_size} rows together, got {len(memory)}")
        self.step, self.memory = step + 1, memory

    def state_dict(self) -> dict[str, np.ndarray]:
        """What a snapshot must save: the memory and the step that it is for."""
        return {"step": np.array(self.step), "memory": to_cpu(self.memory)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned.

        Raises ValueError, and changes nothing, if entries are missing or unexpected, or if the memory has another shape
        or is not floating-point.
        """
        if state.keys() != {"step", "memory"}:
            raise ValueError(f"memory of the text: expected step and memory, got {', '.join(state) or 'nothing'}")
        B, depth, _, C = self.nothing.shape
        step, memory = state["step"], state["memory"]
        if memory.dtype.kind != "f" or memory.ndim != 4 or (*memory.shape[:2], memory.shape[3]) != (B, depth, C):
            got = f"{memory.dtype} {memory.shape}"
            raise ValueError(f"memory: expected floating-point numbers ({B}, {depth}, M, {C}), got {got}")
        self.step, self.memory = int(step), memory


def windows(data: np.ndarray, context: int, stride: int, batch_size: int) -> Iterator[tuple[TextBatch, np.ndarray]]:
    """Batches for evaluation on all of `data`, each with `counted`, bool (B, T): which predictions to count.

    data: as for `TextBatches`. Windows of T = `context` tokens start every `stride` tokens. Each of the positions 1 to
    n − 1 is counted once, in the first window that predicts it. So with stride < context every counted prediction
    outside the first window has at least context − stride tokens before it. The last window is moved back so that it
    has full length; a text of fewer than T + 1 tokens is a single shorter window.

    Raises ValueError unless 1 <= stride <= context and DataError if n < 2, both before the first batch is asked for.
    """
    expect_positive(context=context, stride=stride, batch_size=batch_size)
    expect_text(data)
    if stride > context:
        raise ValueError(f"stride: expected at most the context, {context}, got {stride}: positions would be skipped")
    if len(data) < 2:
        raise DataError(f"corpus: {len(data)} token(s), but there is nothing to predict in fewer than 2")
    context = min(context, len(data) - 1)
    last = len(data) - 1 - context
    starts = np.append(np.arange(0, last, stride), last)
    # A window predicts the positions start + 1 to start + T; earlier windows have predicted those up to `done`.
    done = np.append(0, starts[:-1] + context)
    ahead = np.arange(1, context + 1)
    return (
        (_text_batch(data, starts[rows], context), starts[rows, None] + ahead > done[rows, None])
        for rows in slices(len(starts), batch_size)
    )


class LabelledBatches:
    """Training batches from labelled texts: every text once per epoch, in random order, with little padding.

    Epoch e is a permutation drawn from `key.fold(e)` and cut into chunks of 64 batches. Each chunk is sorted by length
    and cut into batches of B = `batch_size`; then all batches of the epoch are shuffled. One batch of an epoch may be
    smaller. Texts longer than `max_length` are cut: `keep` "head" keeps the first `max_length` words,
    "both" a quarter of them from the start and three quarters from the end.

    word_dropout: the probability that a word is replaced by <unk>, drawn from `key` at each step. It keeps a model from
    memorising texts. Gal, Ghahramani, "A theoretically grounded application of dropout in recurrent neural networks",
    2016, section 4.2, also drop whole words.

    `len()` is the number of batches in an epoch. Raises ValueError for an empty text, naming its index.
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
        expect_fraction("word_dropout", word_dropout)
        expect_key(key)
        self.word_dropout = word_dropout
        self.dataset, self.batch_size, self.key = dataset, batch_size, key
        self.cut = _shortener(max_length, keep)
        # The indices of the texts in each batch of an epoch; kept for the current one.
        self.plan = lru_cache(1)(lambda epoch: batches_by_length(self.lengths, batch_size, key.fold(epoch)))

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    def batch(self, step: int) -> LabelledBatch:
        """The batch of training step `step`, always the same one."""
        epoch, place = divmod(step, len(self))
        batch = self.dataset.batch(self.plan(epoch)[place], self.cut)
        if not self.word_dropout:
            return batch
        dropped = self.key.fold("word dropout", step).generator().random(batch.ids.shape) < self.word_dropout
        return batch._replace(ids=np.where(dropped & (batch.ids != PAD), np.int32(UNKNOWN), batch.ids))


def batches_by_length(lengths: np.ndarray, batch_size: int, key: Key, whole: bool = False) -> list[np.ndarray]:
    """The indices of the texts in each batch of an epoch (see `LabelledBatches`). With `whole`, every batch is full:
    the few texts left over, chosen at random, are omitted.
    """
    generator = key.generator()
    order = generator.permutation(len(lengths))
    order = order[: len(order) - len(order) % batch_size] if whole else order
    batches = []
    for rows in slices(len(order), _CHUNK * batch_size):
        chunk = order[rows]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[part] for part in slices(len(chunk), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def in_order(dataset: Labelled, batch_size: int, max_length: int, keep: str = "head") -> Iterator[Any]:
    """Batches for evaluation: every text once, in the order of `by_length`; arguments as for `LabelledBatches`."""
    _check_dataset(dataset, batch_size, max_length, keep)
    order, cut = by_length(dataset, max_length), _shortener(max_length, keep)
    return (dataset.batch(order[rows], cut) for rows in slices(len(order), batch_size))


def by_length(dataset: Labelled, max_length: int) -> np.ndarray:
    """The indices of the texts, (texts,), shortest first; those of `max_length` words or more count as equally long."""
    return np.argsort([min(len(text), max_length) for text in dataset.ids], kind="stable")


def _text_batch(data: np.ndarray, starts: np.ndarray, context: int) -> TextBatch:
    rows = data[starts[:, None] + np.arange(context + 1)].astype(np.int32)  # (B, T + 1)
    return TextBatch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))


def _shortener(max_length: int, keep: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function that keeps at most `max_length` words of what it is given; see `LabelledBatches` for `keep`."""
    head = max_length if keep == "head" else max_length // 4

    def cut(text: np.ndarray) -> np.ndarray:
        if len(text) <= max_length:
            return text
        return np.concatenate([text[:head], text[len(text) - (max_length - head) :]])

    return cut


def padded(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """The rows (T,) as one int32 array (B, longest T), with `filler` after the end of each row."""
    lengths = np.array([len(row) for row in rows])
    array = np.full((len(rows), lengths.max()), filler, np.int32)
    array[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(rows)
    return array


def slices(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 to `count`."""
    expect_positive(size=size)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _check_dataset(dataset: Labelled, batch_size: int, max_length: int, keep: str) -> np.ndarray:
    """The lengths of the texts after cutting, int64 (texts,). Raises an error if something does not fit."""
    expect_instance("dataset", dataset, Labelled)
    expect_positive(batch_size=batch_size, max_length=max_length)
    expect_one_of("keep", keep, _KEEP)
    dataset.check()
    return np.minimum([len(text) for text in dataset.ids], max_length)

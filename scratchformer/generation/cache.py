"""The key-value caches: what generation does not compute again."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array, array_module, to_cpu, to_device
from ..checks import (
    checked_on_host,
    expect_array,
    expect_ids,
    expect_instance,
    expect_positive,
)
from ..dispatch import has_twin, is_fast
from ..models import EncoderDecoder, LanguageModel, TransformerXL
from ..models.body import Body
from ..models.encoder_decoder import expect_tokens
from ..nn import Layer
from ..nn.block import Stored
from ..nn.embedding import extend_by_token
from ..parallel.graphs import Recording, is_off, record, warn

VECTOR = 16  # the most numbers that compiled code reads at once


def expect_next(ids: Array, batch_size: int, vocab_size: int, like: Array) -> None:
    """Raise an error unless ids are tokens (B, T) with T ≥ 1, one row for each of the B sequences in the cache.

    ValueError for the wrong shape, TypeError if they are not integers, IndexError if one is out of range, DeviceError
    if they are neither on the host nor on the device of `like`. A cache calls this before it changes anything, so
    invalid ids leave it unchanged.
    """
    expect_tokens("ids", ids, B=batch_size)
    if array_module(ids) is not np:
        array_module(ids, like)
    expect_ids("ids", ids, vocab_size)


def room_for(length: int, most: int) -> int:
    """For how many positions arrays have room that hold `length`, of at most `most` in the end.

    Rooms double, so all copies from one to the next together are fewer than the positions. They have a vector more than
    they need, so that compiled code reads whole vectors, and the bits of its sums do not depend on the room.
    """
    return min(most, 1 << (length + VECTOR - 1).bit_length())


def grow(stored: list[Stored], past: int, room: int, allocate: Callable[[int], list[Stored]]) -> None:
    """Move the first `past` positions in `stored` to arrays with more room, from `allocate(room)`, block by block."""
    if all(array.shape[2] < room for array in chain(*stored)):
        for i, arrays in enumerate(allocate(room)):
            for new, old in zip(arrays, stored[i], strict=True):
                new[:, :, :past] = old[:, :, :past]
            stored[i] = arrays


def extends_as(x: Any, kind: Any) -> bool:
    """Whether `extend` of x is that of the class `kind`: neither a derived class nor x itself has another."""
    return getattr(x.extend, "__func__", None) is kind.extend


def has_token_step(model: Any) -> bool:
    """Whether `extend` of a model on a GPU is, for one token, what `extend_by_token` computes from its layers."""
    return (
        isinstance(model, LanguageModel)
        and model.device.index is not None
        and extends_as(model, LanguageModel)
        and extends_as(model.body, Body)
        and model.pattern is None
    )


class TokenStep:
    """The step of one new token on a GPU, if there are kernels for all layers of the model.

    It is recorded as a CUDA graph when it is first called, and then started by a single call: the keys and values are
    in the same arrays each time, and the number of stored positions is in an array too, with the ids. With new arrays,
    for the weights or because keys and values need more room, it is recorded again.
    """

    def __init__(self, model: LanguageModel, stored: list[Stored], batch_size: int) -> None:
        self.device, self.params, self.arrays = model.device, model.parameters(), list[Array]()
        self.numbers = to_device(np.zeros(1 + batch_size, np.int64), self.device)
        self.arguments = self.numbers, model.body.embedding, model.body.stack, model.output, stored
        self.recording: Recording | None = None
        self.off = is_off()

    def __call__(self, past: int, ids: np.ndarray) -> Array | None:
        """The logits (B, V) after ids (B,), which follow `past` stored positions; None if the kernels do not fit."""
        self.numbers.set(np.array([past, *ids]))
        arrays = [p.data for p in self.params] + list(chain(*self.arguments[-1]))
        if self.recording is None or any(map(operator.is_not, arrays, self.arrays)):
            if not has_twin(extend_by_token, *self.arguments):
                return None
            self.arrays, self.recording = arrays, self.recorded()
        if self.recording is None:
            return extend_by_token(*self.arguments)
        self.recording.graph.launch()
        return self.recording.result.copy()

    def recorded(self) -> Recording | None:
        """The step as a graph; None if it cannot be recorded, which is tried once."""
        try:
            return None if self.off else record(self.device, lambda: extend_by_token(*self.arguments))
        except MemoryError:
            self.off = True
        except Exception as error:
            self.off = True
            warn(error)
        return None


class KeyValueCache:
    """What a language model stores for past tokens, such as keys and values, in arrays that grow with the text.

    In a causal model the vectors at past positions do not depend on later tokens. So a new token needs only its own
    query, and its key and value are stored after the others. `logits` returns the same numbers as the full forward. The
    model decides what is stored: `allocate(batch_size, length)` creates the arrays, one tuple for each block, and
    `extend(ids, stored, past)` reads and fills them (see `nn.Stack`).

    When the context is full, it slides: the later half of the tokens is kept and computed again at positions from 0,
    since positions are absolute. So on average a token is computed twice, the second time together with others, and
    every prediction sees at least half a context. On a GPU the step of one token is recorded, if there are
    kernels for all layers of the model: see `TokenStep`.
    """

    def __init__(self, model: Any, batch_size: int) -> None:
        """model: a `LanguageModel`. B = `batch_size` sequences, each at most as long as the model can see at once."""
        expect_instance("model", model, Layer)
        expect_positive(batch_size=batch_size)
        self.model, self.batch_size, self.length = model, batch_size, 0
        self.ids: np.ndarray | None = None
        self.room = model.context + getattr(model, "memory", 0)
        self.weights = model.parameters()[0].data
        self.stored = self.allocate(room_for(0, self.room))
        self.token_step = TokenStep(model, self.stored, batch_size) if has_token_step(model) else None

    def allocate(self, length: int) -> list[Stored]:
        """Room for `length` positions of each sequence."""
        return self.model.allocate(self.batch_size, length)

    def logits(self, ids: Array) -> Array:
        """Append the tokens ids (B, T) and return the logits (B, V) of the token after the last of them.

        Pass ids on the host: ids on a GPU must be copied back, and the host waits. Raises ValueError unless there are B
        rows and T ≥ 1, TypeError if ids are not integers, IndexError if one is out of range.
        """
        expect_next(ids, self.batch_size, self.model.config["vocab_size"], self.weights)
        ids = to_cpu(ids).astype(np.int64, copy=False)  # with uint64 they would join to float64
        with checked_on_host():
            return self._append(ids)

    def forget_after(self, length: int) -> None:
        """Keep only the first `length` tokens, of a text that has not slid. The next ones are written over the rest."""
        self.length = length
        self.ids = None if self.ids is None else self.ids[:, :length]

    def _append(self, ids: np.ndarray) -> Array:
        """`logits` of ids that are checked."""
        seen = ids if self.ids is None else np.concatenate([self.ids, ids], axis=1)
        if seen.shape[1] > self.model.context:
            kept = max(1, self.model.context // 2)
            seen, self.length = seen[:, -max(kept, min(ids.shape[1], self.model.context)) :], 0
        logits = self.extend(seen[:, self.length :])
        self.ids, self.length = seen, seen.shape[1]
        return logits

    def extend(self, ids: np.ndarray) -> Array:
        """The logits (B, V) after new tokens ids (B, T), which follow the stored ones."""
        grow(self.stored, self.length, room_for(self.length + ids.shape[1], self.room), self.allocate)
        if self.token_step is not None and ids.shape[1:] == (1,) and is_fast():
            logits = self.token_step(self.length, ids[:, 0])
            if logits is not None:
                return logits
            self.token_step = None
        return self.model.extend(to_device(ids, self.model.device), self.stored, self.length)[:, -1]


class DecoderCache:
    """What a decoder does not compute again: each block's keys and values of the memory and the target tokens so far.

    source (B, S), lengths (B,): on the CPU, as for `EncoderDecoder.forward`. length: the largest number of target
    tokens; this cache does not slide, since a translation is one whole text. copies: K, the number of hypotheses for
    each source; those of source b are in rows b K to b K + K − 1 and see the same memory.
    """

    def __init__(
        self, model: EncoderDecoder, source: np.ndarray, lengths: np.ndarray, length: int, copies: int = 1
    ) -> None:
        expect_instance("model", model, EncoderDecoder)
        expect_positive(length=length, copies=copies)
        length, copies = int(length), int(copies)
        self.model, self.device, self.length = model, model.device, 0
        self.vocab_size = model.config["vocab_size"]
        self.room, self.copies, self.rows = length, copies, len(source) * copies
        source, lengths = expect_array("source", source), expect_array("lengths", lengths)
        model.check_source(source, lengths)
        expect_ids("source", source, self.vocab_size)
        lengths = to_device(lengths, self.device)
        with checked_on_host():
            memory, _ = model.encode(to_device(source, self.device), lengths)
        xp = array_module(memory)

        def each(x: Array) -> Array:
            return xp.repeat(x, copies, axis=0)

        self.memory = [tuple(each(x) for x in block.cross.project(memory)) for block in model.decoder]
        self.pattern = ops.Padding(each(lengths))
        self.stored = self.allocate(room_for(0, length))

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Append the tokens ids (B K, T) and return the logits (B K, V) of the token after the last of them.

        Raises ValueError unless there are B K rows, T ≥ 1 and room for them, TypeError if ids are not integers,
        IndexError if one is out of range.
        """
        ids = ids if hasattr(ids, "dtype") else expect_array("ids", ids)
        expect_next(ids, self.rows, self.vocab_size, self.model.tokens.table.data)
        if (total := self.length + ids.shape[1]) > self.room:
            raise ValueError(f"ids: expected at most {self.room} target tokens, the length of the cache, got {total}")
        with checked_on_host():
            grow(self.stored, self.length, room_for(total, self.room), self.allocate)
            ids = to_device(ids, self.device)
            logits = self.model.extend(ids, self.stored, self.length, self.memory, self.pattern)
        self.length += ids.shape[1]
        return to_cpu(logits[:, -1])

    def keep(self, sources: np.ndarray) -> None:
        """Keep only these sources, (N,) with N ≥ 1, in this order; N K rows are left."""
        sources = sources.astype(np.int64)
        rows = to_device((sources[:, None] * self.copies + np.arange(self.copies)).ravel(), self.device)
        before, self.rows = self.stored, len(rows)
        self.memory = [tuple(x[rows] for x in each) for each in self.memory]
        self.pattern = ops.Padding(self.pattern.lengths[rows])
        self.stored = self.allocate(before[0][0].shape[2])
        for new, old in zip(chain(*self.stored), chain(*before), strict=True):
            new[:, :, : self.length] = old[rows, :, : self.length]

    def allocate(self, length: int) -> list[Stored]:
        """Room for each block's keys and values of `length` target tokens."""
        table = self.model.tokens.table.data
        x = array_module(table).empty((self.rows, 0, table.shape[1]), self.memory[0][0].dtype)
        return self.model.decoder_stack.allocate(x, length)

    def reorder(self, rows: np.ndarray) -> None:
        """Replace row i by row rows[i] of the same source, for all rows at once; rows: (B K,)."""
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not len(moved):  # always so with one hypothesis
            return
        to, origin = to_device(moved, self.device), to_device(rows[moved], self.device)
        for array in chain(*self.stored):
            array[to, :, : self.length] = array[origin, :, : self.length]


class SegmentCache(KeyValueCache):
    """A `KeyValueCache` for a `TransformerXL`: the keys and values of its memory and of the current segment.

    `logits` returns the same numbers as the model when it reads segment after segment. A full segment becomes part of
    the memory, and only its last `model.memory` positions are kept. Nothing is computed again: keys and values do not
    depend on positions, so those that are kept are only moved to the front.
    """

    def __init__(self, model: TransformerXL, batch_size: int) -> None:
        super().__init__(model, batch_size)
        self.begun = 0  # where the segment begins in the arrays: the length of the memory

    def _append(self, ids: np.ndarray) -> Array:
        while True:
            if self.length == self.begun + self.model.context:
                self.begin_segment()
            room = self.begun + self.model.context - self.length
            new, ids = ids[:, :room], ids[:, room:]
            logits = self.extend(new)
            self.length += new.shape[1]
            if not ids.shape[1]:
                return logits

    def begin_segment(self) -> None:
        """Turn the last `model.memory` stored positions into the memory."""
        kept = min(self.model.memory, self.length)
        for array in chain(*self.stored):
            array[:, :, :kept] = array[:, :, self.length - kept : self.length].copy()
        self.begun = self.length = kept


def cache_for(model: Any, batch_size: int) -> KeyValueCache:
    """The right kind of cache for the model."""
    return SegmentCache(model, batch_size) if isinstance(model, TransformerXL) else KeyValueCache(model, batch_size)

"""Steps on a GPU as CUDA graphs: recorded once, then started by a single call.

A step of a transformer is several hundred kernels. Python needs more time to start them than a GPU needs to run them,
unless the model is large. CUDA can record what is started on a stream, and start all of it again. The recorded kernels
read and write the same arrays each time, so what is new in a step is written into these arrays first: the arrays of a
batch, the factor of its gradient, and where the random numbers of each dropout start. These starts are computed on the
host from the step's key, so the random numbers are those of a step that is not recorded.

What is recorded is the forward and backward pass of a micro-batch, which adds to the gradient. A batch of several
micro-batches is several such steps. `Replicas.gradients` records them inside its `with` block, when micro-batches of
the same shapes come for the third time, if the model has `check_batch` and no result is read on the host. A model with
a memory reads it from the batch and returns the next one; while the memory grows, each length is another shape. What
cannot be recorded runs as usual, such as a step that draws random numbers from NumPy's generator, on the host.
SCRATCHFORMER_GRAPHS=0 in the environment turns recording off, and so does SCRATCHFORMER_FAST=0.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Device, free_memory, recording
from ..rng import Key

MAX_GRAPHS = 4  # graphs, each with memory of its own for all activations
RECENT = 64  # a graph that was used within this many last steps is not dropped to make room
EARLIER = 2  # steps with batches of the same shapes before one is recorded: they compile kernels and make tables
REMEMBERED = 256  # shapes that are counted
MAX_STARTS = 4096  # keys from which a recorded step draws, at most

Results = tuple[Array | None, ...]


class NotRecorded(Exception):
    """A step draws random numbers that cannot be recorded."""


class Starts:
    """Where the random numbers of a recorded step start, on the GPU: a number for each key that the step draws from,
    which is known by the words with which the step's key was folded.
    """

    def __init__(self, xp: Any) -> None:
        self.xp, self.numbers = xp, xp.zeros(MAX_STARTS, np.uint64)
        self.places: dict[tuple[int, ...], int] = {}

    def of(self, words: tuple[int, ...]) -> Array:
        """The number () of the key with these words, a view."""
        place = self.places.setdefault(words, len(self.places))
        if place >= MAX_STARTS:
            raise NotRecorded
        return self.numbers[place, ...]

    def put(self, key: Key) -> None:
        """Write the numbers for a step with this key, in one transfer."""
        if self.places:
            numbers = np.array([key.fold(*words).start() for words in self.places], np.uint64)
            self.numbers[: len(numbers)] = self.xp.asarray(numbers)


class RecordedKey(Key):
    """A key in a step that is recorded: its words are those with which the step's key was folded. The recorded step
    reads from `starts` where its random numbers start. Asking for a generator raises NotRecorded.
    """

    def __init__(self, starts: Starts, *words: int) -> None:
        super().__init__(*words)
        self.starts = starts

    def fold(self, *parts: int | str) -> Key:
        return RecordedKey(self.starts, *super().fold(*parts).words)

    def start(self) -> Array:
        return self.starts.of(self.words)

    def seed_sequence(self) -> Any:
        raise NotRecorded


class Recording(NamedTuple):
    """A function as a CUDA graph: what it returned, the graph that writes this again, and what the graph needs."""

    result: Any
    graph: Any
    pool: Any  # its memory
    tables: dict  # and what else it reads, see `backend.kept`


class Recorded(NamedTuple):
    batch: Any  # the arrays that the kernels read
    factor: Array  # the number () by which the gradient is multiplied
    starts: Starts
    recording: Recording


def record(device: Device, function: Callable[[], Any]) -> Recording:
    """Call `function` twice on the current GPU, the second time only to record it. Raises what it raises, and
    CUDARuntimeError if it cannot be recorded.
    """
    cupy: Any = device.xp
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream()
    with cupy.cuda.using_allocator(pool.malloc), stream, recording() as tables:
        function()  # so that the pool has memory, which must not be asked for while recording
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            result = function()
        except BaseException:
            with suppress(Exception):  # what ended the function may have ended the recording too
                stream.end_capture()
            raise
        return Recording(result, stream.end_capture(), pool, tables)


def is_off() -> bool:
    """Whether the environment turns recording off."""
    return "0" in (os.environ.get("SCRATCHFORMER_GRAPHS"), os.environ.get("SCRATCHFORMER_FAST"))


def warn(error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    message = f"steps are not recorded as CUDA graphs: {type(error).__name__}: {reason}"
    warnings.warn(message, stacklevel=3)


class Graphs:
    """The recorded steps of a model on one GPU, by the shapes of their batches.

    step: a function of a batch on the GPU, a key or None, the array () of a factor, and a setting. It adds the factor
    times the gradient to `total`, an array, and returns arrays of the GPU, or None in place of some.
    """

    def __init__(self, device: Device, step: Callable[[Any, Key | None, Array, Any], Results], total: Array) -> None:
        self.device, self.step, self.total = device, step, total
        self.recorded: OrderedDict[tuple, Recorded] = OrderedDict()  # the one that was used last is the last
        self.seen: OrderedDict[tuple, int] = OrderedDict()
        self.used: dict[tuple, int] = {}  # the number of the step in which each graph was last used
        self.refused: set[tuple] = set()  # what cannot be recorded
        self.steps = 0
        self.off = is_off()

    def wants(self, batch: Any, key: Key | None, setting: Any) -> tuple | None:
        """The name under which the step of such a batch is recorded, or is to be recorded now; None if it runs as
        usual. The batch may still be on the host. setting: what else the step is given, hashable.
        """
        if self.off:
            return None
        self.steps += 1
        kind = type(batch), key is None, setting
        known = (*kind, *((x.shape, x.dtype.name) for x in batch))
        if known in self.recorded:
            return known
        self.seen[known] = self.seen.pop(known, 0) + 1
        if len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
        if self.seen[known] <= EARLIER or kind in self.refused or known in self.refused:
            return None
        oldest = next(iter(self.recorded), None)
        crowded = oldest is not None and len(self.recorded) >= MAX_GRAPHS and self.steps - self.used[oldest] < RECENT
        return None if crowded else known

    def run(self, known: tuple, batch: Any, key: Key | None, factor: float) -> Results | None:
        """What the step returns for what `wants` gave a name, with the batch on the GPU; None if it cannot be recorded,
        and then nothing is added to the total.
        """
        with self.device.current():
            if known not in self.recorded:
                self._record(known, batch, key is not None)
            if known not in self.recorded:
                return None
            recorded = self.recorded[known]
            self.recorded.move_to_end(known)
            self.used[known] = self.steps
            for array, x in zip(recorded.batch, batch, strict=True):
                array[...] = x
            recorded.factor[...] = factor
            if key is not None:
                recorded.starts.put(key)
            recorded.recording.graph.launch()
            return tuple(x if x is None else x.copy() for x in recorded.recording.result)

    def _record(self, known: tuple, batch: Any, draws: bool) -> None:
        cupy: Any = self.device.xp
        cupy.cuda.Device().synchronize()  # a graph that makes room may still be running
        cupy.get_default_memory_pool().free_all_blocks()  # what the steps before left, which `pool` could not use
        while len(self.recorded) >= MAX_GRAPHS:
            self.recorded.popitem(last=False)
        try:
            before = self.total.copy()
        except MemoryError:
            self.refused.add(known)
            return
        try:
            recorded = self._recorded(known, batch, draws)
        finally:
            self.total[...] = before  # the step has run once
        del before  # which takes memory too
        if recorded is None:
            return
        if free_memory(self.device) < recorded.recording.pool.total_bytes():
            self.refused.add(known)  # a step that is not recorded would not fit beside it
        else:
            self.recorded[known] = recorded

    def _recorded(self, known: tuple, batch: Any, draws: bool) -> Recorded | None:
        """The recorded step, which then has also run once; None if it cannot be recorded."""
        cupy: Any = self.device.xp
        try:
            copied = type(batch)(*(x.copy() for x in batch))
            factor, starts = cupy.ones((), self.total.dtype), Starts(cupy)
            arguments = copied, RecordedKey(starts) if draws else None, factor, known[2]
            return Recorded(copied, factor, starts, record(self.device, lambda: self.step(*arguments)))
        except NotRecorded:
            self.refused.add(known[:3])
        except MemoryError:  # there is not enough for a step in a pool of its own
            self.refused.add(known)
        except Exception as error:
            self.off = True  # what failed once would fail again
            warn(error)
        return None

    def memory(self) -> int:
        """The bytes that the recorded steps hold on the GPU."""
        return sum(each.recording.pool.total_bytes() for each in self.recorded.values())

    def clear(self) -> None:
        """Forget all steps, and free their memory."""
        if self.recorded:
            with self.device.current():
                self.device.xp.cuda.Device().synchronize()
        self.recorded.clear()
        self.seen.clear()
        self.used.clear()
        self.refused.clear()

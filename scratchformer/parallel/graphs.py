"""A training step on a GPU as a CUDA graph: recorded once, then started by a single call.

A step of a transformer is several hundred kernels. Python needs more time to start them than a GPU needs to run them,
unless the model is large. CUDA can record what is started on a stream, and start all of it again. The recorded kernels
read and write the same arrays each time, so a batch is copied into the arrays of the first one.

Steps are recorded by `Replicas.gradients`, inside its `with` block, when batches of the same shapes come for the third
time. A step is recorded if the batch is a single micro-batch, the model has `check_batch`, no random numbers are drawn
(no dropout), and no result is read on the host. What cannot be recorded runs as before. SCRATCHFORMER_GRAPHS=0 in the
environment turns this off, and so does SCRATCHFORMER_FAST=0.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..backend import Array, Device, free_memory, recording
from ..rng import Key

MAX_GRAPHS = 4  # graphs, each with memory of its own for all activations
RECENT = 64  # a graph that was used within this many last steps is not dropped to make room
EARLIER = 2  # steps with batches of the same shapes before one is recorded: they compile kernels and make tables
REMEMBERED = 256  # shapes that are counted


class KeyIsUsed(Exception):
    """A step draws random numbers, so it is not the same each time."""


class UnusedKey(Key):
    """A key in a step that is to be recorded: `fold` returns it, and drawing numbers from it raises KeyIsUsed."""

    def __init__(self) -> None:
        super().__init__(0)

    def fold(self, *parts: int | str) -> Key:
        return self

    def seed_sequence(self) -> Any:
        raise KeyIsUsed


class Recording(NamedTuple):
    """A function as a CUDA graph: what it returned, the graph that writes this again, and what the graph needs."""

    result: Any
    graph: Any
    pool: Any  # its memory
    tables: dict  # and what else it reads, see `backend.kept`


class Recorded(NamedTuple):
    batch: Any  # the arrays that the kernels read
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

    step: a function of a batch on the GPU, and of a key or None, which returns an array () of the GPU.
    """

    def __init__(self, device: Device, step: Callable[[Any, Key | None], Array]) -> None:
        self.device, self.step = device, step
        self.recorded: OrderedDict[tuple, Recorded] = OrderedDict()  # the one that was used last is the last
        self.seen: OrderedDict[tuple, int] = OrderedDict()
        self.used: dict[tuple, int] = {}  # the number of the step in which each graph was last used
        self.refused: set[tuple] = set()  # what cannot be recorded
        self.steps = 0
        self.off = is_off()

    def wants(self, batch: Any, key: Key | None, setting: Any) -> tuple | None:
        """The name under which the step of such a batch is recorded, or is to be recorded now; None if it runs as
        usual. The batch may still be on the host. setting: whatever else changes the step.
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

    def run(self, known: tuple, batch: Any, key: Key | None) -> Array | None:
        """step(batch, key) for what `wants` gave a name, with the batch on the GPU; None if it cannot be recorded."""
        with self.device.current():
            if known not in self.recorded:
                self._record(known, batch, None if key is None else UnusedKey())
            if known not in self.recorded:
                return None
            recorded = self.recorded[known]
            self.recorded.move_to_end(known)
            self.used[known] = self.steps
            for array, x in zip(recorded.batch, batch, strict=True):
                array[...] = x
            recorded.recording.graph.launch()
            return recorded.recording.result.copy()

    def _record(self, known: tuple, batch: Any, key: Key | None) -> None:
        cupy: Any = self.device.xp
        cupy.cuda.Device().synchronize()  # a graph that makes room may still be running
        cupy.get_default_memory_pool().free_all_blocks()  # what the steps before left, which `pool` could not use
        while len(self.recorded) >= MAX_GRAPHS:
            self.recorded.popitem(last=False)
        copied = type(batch)(*(x.copy() for x in batch))
        try:
            recorded = record(self.device, lambda: self.step(copied, key))
        except KeyIsUsed:
            self.refused.add(known[:3])
            return
        except MemoryError:  # there is not enough for a step in a pool of its own
            self.refused.add(known)
            return
        except Exception as error:
            self.off = True  # what failed once would fail again
            warn(error)
            return
        if free_memory(self.device) < recorded.pool.total_bytes():  # a step that is not recorded would not fit beside it
            self.refused.add(known)
            return
        self.recorded[known] = Recorded(copied, recorded)

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

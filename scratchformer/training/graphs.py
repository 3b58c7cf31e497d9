"""A training step on a GPU as a CUDA graph: recorded once, then started by a single call.

A step of a transformer is several hundred kernels. Python needs more time to start them than a GPU needs to run them,
unless the model is large. CUDA can record what is started on a stream, and start all of it again. The recorded kernels
read and write the same arrays each time, so a batch is copied into the arrays of the first one.

Steps are recorded by `Replicas.gradients`, inside its `with` block, when batches of the same shapes come for the third
time. Recorded are the forward and backward passes of a batch that is a single micro-batch, of a model with
`check_batch`, if they use no random key (no dropout) and do not read a result on the host. What cannot be recorded runs
as before. SCRATCHFORMER_GRAPHS=0 in the environment turns this off.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Array, Device, recording
from ..rng import Key

MOST = 4  # graphs, each with memory of its own for all activations
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


class Recorded(NamedTuple):
    batch: Any  # the arrays that the kernels read
    result: Array  # the one that they write
    graph: Any
    pool: Any  # their memory
    tables: list  # and what else they read, see `backend.kept`


class Graphs:
    """The recorded steps of a model on one GPU, by the shapes of their batches.

    step: a function of a batch on the GPU, and of a key or None, which returns an array () of the GPU.
    """

    def __init__(self, device: Device, step: Callable[[Any, Key | None], Array]) -> None:
        self.device, self.step = device, step
        self.recorded: OrderedDict[tuple, Recorded | None] = OrderedDict()  # None: it cannot be recorded
        self.seen: OrderedDict[tuple, int] = OrderedDict()
        self.off = os.environ.get("SCRATCHFORMER_GRAPHS") == "0"

    def run(self, batch: Any, key: Key | None, setting: Any) -> Array | None:
        """step(batch, key), if it is recorded or can be; otherwise None. setting: whatever else changes the step."""
        if self.off:
            return None
        known = (type(batch), key is None, setting, *((x.shape, x.dtype.name) for x in batch))
        if known not in self.recorded:
            if self._count(known) <= EARLIER:
                return None
            self._record(known, batch, None if key is None else UnusedKey())
        found = self.recorded[known]
        if found is None:
            return None
        self.recorded.move_to_end(known)
        for own, x in zip(found.batch, batch, strict=True):
            own[...] = x
        found.graph.launch()
        return found.result.copy()

    def _count(self, known: tuple) -> int:
        self.seen[known] = self.seen.pop(known, 0) + 1
        if len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
        return self.seen[known]

    def _record(self, known: tuple, batch: Any, key: Key | None) -> None:
        cupy: Any = self.device.xp
        while len(self.recorded) >= MOST:
            self.recorded.popitem(last=False)
        self.recorded[known] = None
        pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream()
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        own = type(batch)(*(x.copy() for x in batch))
        try:
            with cupy.cuda.using_allocator(pool.malloc), stream, recording() as tables:
                self.step(own, key)  # so that the pool has memory, which must not be asked for while recording
                stream.synchronize()
                stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
                try:
                    result = self.step(own, key)
                finally:
                    graph = stream.end_capture()
        except KeyIsUsed:
            return
        except Exception as error:
            self.off = True  # what failed once would fail again
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"a step is not recorded as a CUDA graph: {type(error).__name__}: {reason}", stacklevel=2)
            return
        self.recorded[known] = Recorded(own, result, graph, pool, tables)

    def memory(self) -> int:
        """The bytes that the recorded steps hold on the GPU."""
        return sum(found.pool.total_bytes() for found in self.recorded.values() if found is not None)

    def clear(self) -> None:
        """Forget all steps, and free their memory."""
        self.recorded.clear()
        self.seen.clear()

"""How much memory a training run will need, and what a step that did not fit on a GPU would have needed."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, free_memory
from ..parallel.memory import resident_bytes
from ..parallel.replicas import Replicas, add_gradient
from ..rng import Key
from ..shell.text import shown
from .evaluate import as_in_training

BUFFERS = 2  # arrays of Adam, each as long as the parameters


class Estimate(NamedTuple):
    """Counts, and sizes in bytes."""

    parameters: int
    ranks: int  # of several ranks, the numbers are those of one: of rank 0, which saves snapshots
    replicas: int
    working: int  # replicas that get a micro-batch: fewer than all if the batch is small
    rows: int  # of a micro-batch
    length: int  # tokens of a row
    before: int  # the process without a model: Python, libraries, data
    code: int  # what libraries add when they are first used: compiled code, and buffers
    weights: int
    half: int  # the copy of the weights in which replicas compute in half precision; 0 in float32
    optimizer: int  # a part of Adam's means, if they are sharded
    gradients: int  # of all replicas, and the sums of shares that wait for others
    activations: int  # what one replica keeps for backward
    transient: int  # what forward and backward of one replica use temporarily
    evaluation: int  # what forward of one replica uses in evaluation, which may take more rows at once than a step
    memory: int  # of earlier segments, for the whole batch; 0 for a model without one

    @property
    def peak(self) -> int:
        """The most bytes that a run uses at once, in a step, in evaluation or when writing a snapshot."""
        step = self.working * (self.activations + self.transient) + self.memory  # the next segment's
        snapshot = (1 + BUFFERS) * self.weights  # copies of the weights and of Adam's means
        always = self.before + self.code + self.weights + self.half + self.optimizer + self.gradients + self.memory
        return always + max(step, self.replicas * self.evaluation, snapshot)

    def __str__(self) -> str:
        rows = [
            ("Python, libraries and data", self.before),
            ("compiled code, and buffers of libraries", self.code),
            (f"{self.parameters:,} parameters", self.weights),
            *([("their copy in half precision", self.half)] if self.half else []),
            ("Adam's two means", self.optimizer),
            ("gradients, and their partial sums", self.gradients),
            (f"activations of {self.working} replica(s)", self.working * self.activations),
            (f"temporary, of {self.working} replica(s)", self.working * self.transient),
            (f"evaluation, of {self.replicas} replica(s)", self.replicas * self.evaluation),
            *([("memory of two segments", 2 * self.memory)] if self.memory else []),
            ("peak while training", self.peak),
        ]
        ranks = f"{self.ranks} ranks, each with " if self.ranks > 1 else ""
        head = f"{ranks}micro-batches of {self.rows} rows of {self.length} tokens, {self.replicas} replica(s)\n"
        return head + "\n".join(f"{name:<50}{size / 1e6:>10.1f} MB" for name, size in rows)


def estimate(replicas: Replicas, batch: Any, before: int = 0, shard: bool = False) -> Estimate:
    """The memory for training `replicas.model` with Adam on batches like this one, with rows of the longest length.

    If the model has no longest length (neither "context" nor "max_length" in its config), the batch's is used. A
    micro-batch goes forward and backward, to measure what caches keep and how much memory is used temporarily; this
    changes the gradients. Call it inside `with replicas`, so that it measures the twins that training uses. before:
    bytes that the process used without the model (`memory.resident_bytes`). shard: whether each of several ranks has
    only its part of Adam's means, counted as equal parts (with Muon some ranks have more than others). Raises
    ValueError for a model on a GPU, TypeError for a batch without `stretched(rows, length)`, which returns a batch of
    that size.
    """
    if not hasattr(batch, "stretched"):
        raise TypeError(f"estimate: expected a batch with stretched(rows, length), got {shown(batch)}")
    model = replicas.model
    config = model.config
    if model.device is not CPU:
        raise ValueError("estimate: expected a model on a CPU; memory on a GPU is not estimated")
    whole = _longest(batch, config, len(batch[0]))
    rows = replicas.rows(whole)
    micro_batches = len(whole.split(rows))
    ranks = replicas.ranks.size
    working = min(replicas.count, -(-replicas.shares(micro_batches) // ranks))
    code = _first_use(replicas, _longest(batch, config, replicas.count))
    kept, forward, backward = _watch(replicas.models[0], replicas.move(_longest(batch, config, rows)))
    return Estimate(
        parameters=model.flat.data.size,
        ranks=ranks,
        replicas=replicas.count,
        working=working,
        rows=rows,
        length=whole[0].shape[1],
        before=before,
        code=code,
        weights=model.flat.data.nbytes,
        half=0 if replicas.half is None else replicas.half.nbytes,
        optimizer=BUFFERS * model.flat.data.nbytes // (ranks if shard else 1),
        gradients=replicas.gradient_arrays(micro_batches) * model.flat.grad.nbytes,
        activations=kept,
        transient=max(0, forward, backward),
        evaluation=(kept + forward) * as_in_training(replicas, whole[0].shape[1]) // rows,
        memory=whole.memory.nbytes if "memory" in config else 0,
    )


def gpu_need(replicas: Replicas, batch: Any) -> str:
    """A sentence that says how much memory, in GB, a training step with a batch like this one needs on a GPU, and how
    many rows would fit.

    replicas: on a GPU, which holds the optimizer's buffers too. batch: as for `Replicas.gradients`. A step with one row
    is measured, and one with two; the rest is extrapolated. Raises MemoryError if a step with two rows does not fit.
    """
    pool, rows, sizes = replicas.device.xp.get_default_memory_pool(), replicas.rows(batch), []
    if replicas.graphs is not None:
        replicas.graphs.clear()
    for count in 1, 2:
        pool.free_all_blocks()
        replicas.gradients(batch.split(count)[0], Key(0))
        sizes.append(pool.total_bytes())
    pool.free_all_blocks()
    room = min(pool.total_bytes() + free_memory(replicas.device), pool.get_limit() or math.inf)
    one, row = sizes[0], max(1, sizes[1] - sizes[0])
    needed, fit = one + (rows - 1) * row, 1 + int((room - one) // row)
    if fit >= rows:
        which = "the step itself would fit"
    elif fit >= 1:
        which = f"with --micro-batch {fit} or less it fits"
    else:
        which = "use fewer or shorter rows"
    return f"A step with {rows} rows needs about {needed / 1e9:.1f} GB, and {room / 1e9:.1f} GB are available: {which}"


@contextmanager
def _tracing() -> Iterator[None]:
    """Count the memory of Python's objects and arrays inside this block."""
    already = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        yield
    finally:
        if not already:
            tracemalloc.stop()


def _first_use(replicas: Replicas, batch: Any) -> int:
    """The bytes by which the process grows when each replica first computes a gradient, except for its arrays."""

    def use(item: tuple[Any, Any]) -> None:
        model, row = item
        add_gradient(model, partial(replicas.loss, model, row, Key(0)), 1.0, False)

    for grad in replicas.grads.values():
        grad[...] = 0  # the system gives memory when it is first written to
    before = resident_bytes()
    with _tracing():
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        replicas.map(use, zip(replicas.models, batch.split(1), strict=True))
        _, peak = tracemalloc.get_traced_memory()
    return max(0, resident_bytes() - before - (peak - start))


def _watch(model: Any, batch: Any) -> tuple[int, int, int]:
    """The bytes of the arrays that the cache of a micro-batch keeps, and what forward and backward use temporarily."""
    model.loss(*batch, key=Key(0))  # which makes what is made once, such as tables of positions
    with _tracing():
        before = _bytes_of_arrays()
        tracemalloc.reset_peak()
        _, cache = model.loss(*batch, key=Key(0))
        end, highest = tracemalloc.get_traced_memory()
        kept = _bytes_of_arrays() - before
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        model.loss_backward(1.0, cache)
        _, peak = tracemalloc.get_traced_memory()
    return kept, highest - end, peak - start


def _bytes_of_arrays() -> int:
    """The bytes of NumPy's arrays that were made while memory is traced, and still exist."""
    traces = tracemalloc.take_snapshot().traces
    return sum(trace.size for trace in traces if trace.domain == np.lib.tracemalloc_domain)


def _longest(batch: Any, config: Mapping[str, Any], rows: int) -> Any:
    """`rows` rows of the longest length from a batch, with a full memory if the model has one."""
    length = max(batch[0].shape[1], getattr(batch, "target", batch[0]).shape[1])  # of a translation, the longer of two
    longest = batch.stretched(rows, config.get("context") or config.get("max_length") or length)
    if "memory" in config:
        shape = (rows, config["depth"], config["memory"], config["d_model"])
        longest = longest._replace(memory=np.zeros(shape, batch.memory.dtype))
    return longest

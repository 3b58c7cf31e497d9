"""An estimate, before a training run starts, of how much memory it will need."""

from __future__ import annotations

import copy
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, Array, free_memory
from ..nn import add_lora, recompute_blocks
from ..nn.recompute import RecomputeCache, recomputes_blocks
from ..optim import Adam
from ..parallel.memory import resident_bytes
from ..parallel.replicas import Replicas
from ..rng import Key
from ..shell.text import shown
from .snapshot import needed_key

WATCHED = 32  # rows to measure with, at most; with too few, other arrays than usual determine the peak
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
    activations: dict[str, int]  # what one replica keeps for backward, by layer
    transient: int  # what forward and backward of one replica use temporarily
    cache: int  # keys and values for generating one sequence; 0 if the model does not generate
    memory: int  # of earlier segments, for the whole batch; 0 for a model without one

    @property
    def peak(self) -> int:
        """The most bytes that training uses at once, in a step or when writing a snapshot; excludes the cache."""
        step = self.working * (sum(self.activations.values()) + self.transient) + self.memory  # the next segment's
        snapshot = (1 + BUFFERS) * self.weights  # copies of the weights and of Adam's means
        always = self.before + self.code + self.weights + self.half + self.optimizer + self.gradients + self.memory
        return always + max(step, snapshot)

    def __str__(self) -> str:
        kept = sum(self.activations.values())
        rows = [
            ("Python, libraries and data", self.before),
            ("compiled code, and buffers of libraries", self.code),
            (f"{self.parameters:,} parameters", self.weights),
            *([("their copy in half precision", self.half)] if self.half else []),
            ("Adam's two means", self.optimizer),
            ("gradients, and their partial sums", self.gradients),
            (f"activations of {self.working} replica(s)", self.working * kept),
            *((f"    {name}, each replica", size) for name, size in self.activations.items()),
            (f"temporary, of {self.working} replica(s)", self.working * self.transient),
            *([("memory of two segments", 2 * self.memory)] if self.memory else []),
            ("peak while training", self.peak),
            *([("keys and values to generate one sequence", self.cache)] if self.cache else []),
        ]
        ranks = f"{self.ranks} ranks, each with " if self.ranks > 1 else ""
        head = f"{ranks}micro-batches of {self.rows} rows of {self.length} tokens, {self.replicas} replica(s)\n"
        return head + "\n".join(f"{name:<50}{size / 1e6:>10.1f} MB" for name, size in rows)


def estimate(replicas: Replicas, batch: Any, before: int = 0, shard: bool = False) -> Estimate:
    """The memory for training `replicas.model` with Adam on batches like this one, with rows of the longest length.

    If the model has no longest length (neither "context" nor "max_length" in its config), the batch's is used. A
    micro-batch and half of one go forward and backward through a model with the same sizes and one block, to measure
    what the caches of each layer keep and how much memory is used temporarily. At most WATCHED rows are measured; the
    difference between half and whole gives the growth with the number of rows. What blocks keep is multiplied by the
    depth; if they are recomputed, this is their inputs, and the rest counts once. Call it inside `with replicas`, so
    that it measures the twins that training uses. before: bytes that the process used without the model
    (`memory.resident_bytes`). shard: whether each of several ranks has only its part of Adam's means,
    counted as equal parts (with Muon some ranks have more than others). Raises ValueError
    for a model on a GPU, TypeError for a batch without `stretched(rows, length)`, which returns a batch of that size.
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
    shallow, depth = _shallow(model)
    shallow_replicas = Replicas(shallow, working, precision=replicas.precision)
    shallow = shallow_replicas.models[0]
    weights = {id(_owner(p.data)) for p in shallow.parameters()}
    counts = (min(rows, WATCHED) + 1) // 2, min(rows, WATCHED)
    code = _first_use(shallow_replicas, _longest(batch, shallow.config, working))
    (smaller, passing_smaller), (larger, passing_larger) = (
        _watch(shallow, shallow_replicas.move(_longest(batch, shallow.config, n)), weights) for n in counts
    )
    activations = {}
    for name in filter(larger.get, larger):
        layers = depth if "block" in name else 1
        activations[name] = layers * _extrapolate(smaller[name], larger[name], counts, rows)
    stored = shallow.allocate(1) if hasattr(shallow, "allocate") else []  # it generates
    cache = depth * sum(array.nbytes for block in stored for array in block)
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
        activations=activations,
        transient=max(0, _extrapolate(passing_smaller, passing_larger, counts, rows)),
        cache=cache,
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


def _shallow(model: Any) -> tuple[Any, int]:
    """A model like this one with a single block, and how many blocks it stands for; the model itself if its config has
    no "depth".
    """
    if "depth" not in model.config:
        return copy.deepcopy(model), 1
    config = {**model.config, "depth": 1}
    lora = config.pop("lora", None)
    shallow = type(model)(**config, **needed_key(type(model)))
    if lora is not None:
        add_lora(shallow, **lora)
    if recomputes_blocks(model):
        recompute_blocks(shallow)
    return shallow.to(dtype=model.flat.data.dtype), model.config["depth"]


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
    """The bytes by which the process grows in a first step, with a row for each replica, its arrays excepted."""
    replicas.micro_batch = 1
    before = resident_bytes()
    with replicas, _tracing():
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        replicas.gradients(batch, Key(0))
        Adam(replicas.model.parameters(), 0.0).step(replicas.map)
        _, peak = tracemalloc.get_traced_memory()
    return max(0, resident_bytes() - before - (peak - start))


def _watch(model: Any, batch: Any, weights: set[int]) -> tuple[dict[str, int], int]:
    """The bytes that the caches of a micro-batch keep, by layer, and the bytes that backward uses in addition."""
    with _tracing():
        _, cache = model.loss(*batch, key=Key(0))
        kept = _by_layer(cache, weights | {id(_owner(x)) for x in batch})
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        model.loss_backward(1.0, cache)
        _, peak = tracemalloc.get_traced_memory()
        passing = peak - start
    return kept, passing


def _extrapolate(smaller: int, larger: int, counts: tuple[int, int], rows: int) -> int:
    """The linear extrapolation to `rows` of a size that is `smaller` and `larger` for these counts of rows."""
    first, last = counts
    return larger + (rows - last) * (larger - smaller) // max(1, last - first)


def _longest(batch: Any, config: Mapping[str, Any], rows: int) -> Any:
    """`rows` rows of the longest length from a batch, with a full memory if the model has one."""
    length = max(batch[0].shape[1], getattr(batch, "target", batch[0]).shape[1])  # of a translation, the longer of two
    longest = batch.stretched(rows, config.get("context") or config.get("max_length") or length)
    if "memory" in config:
        shape = (rows, config["depth"], config["memory"], config["d_model"])
        longest = longest._replace(memory=np.zeros(shape, batch.memory.dtype))
    return longest


def _owner(x: Array) -> Array:
    """The array that owns the memory of x."""
    while isinstance(getattr(x, "base", None), np.ndarray):
        x = x.base
    return x


def _arrays(x: Any) -> Iterator[Array]:
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, Mapping):
        yield from _arrays(list(x.values()))
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _arrays(part)


def _parts(name: str, cache: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a model's cache in order, with names; of a list (the caches of the blocks), only the first."""
    if isinstance(cache, list) and cache and isinstance(cache[0], RecomputeCache):
        x, *shared = cache[0].inputs
        yield f"{name}: inputs", x
        once = name.replace("blocks", "recomputed")
        yield f"{once}: shared inputs", (shared, cache[0].options)
        yield from _parts(once, cache[-1].kept)
    elif isinstance(cache, list) and cache:
        fields = cache[0]._asdict() if hasattr(cache[0], "_asdict") else {"": cache[0]}
        for field, part in fields.items():
            yield f"{name}: {field}".removesuffix(": "), part
    elif _has_blocks(cache):
        for field, part in cache._asdict().items():
            yield from _parts(name if field in ("body", "stack") else f"{name} {field}".strip(), part)
    else:
        yield name, cache


def _parts_of_loss(cache: Any) -> Iterator[tuple[str, Any]]:
    """The parts of the cache of a `loss`, with names: (forward, cross-entropy), or a NamedTuple of several of them. The
    parts of several have the same names.
    """
    if hasattr(cache, "_asdict"):
        for one in cache:
            yield from _parts_of_loss(one)
        return
    forward, cross_entropy = cache
    yield from _parts("", forward)
    yield "cross-entropy", cross_entropy


def _has_blocks(cache: Any) -> bool:
    return hasattr(cache, "_asdict") and any(isinstance(part, list) or _has_blocks(part) for part in cache)


def _by_layer(cache: Any, seen: set[int]) -> dict[str, int]:
    """The bytes that the cache of a `loss` keeps, by layer; each array counts for the first layer that has it."""
    sizes: dict[str, int] = {}
    for name, part in _parts_of_loss(cache):
        owners = {id(_owner(x)): _owner(x).nbytes for x in _arrays(part)}
        sizes[name] = sizes.get(name, 0) + sum(size for key, size in owners.items() if key not in seen)
        seen |= owners.keys()
    return sizes

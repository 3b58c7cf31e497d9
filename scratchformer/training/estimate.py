"""How much memory a training run will take, before it is started."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, Array
from ..rng import Key
from .replicas import Replicas

BUFFERS = 2  # arrays of Adam, each as long as the parameters


class Estimate(NamedTuple):
    """Numbers of things, and bytes."""

    parameters: int
    replicas: int
    working: int  # replicas that get a micro-batch: fewer than all if the batch is small
    rows: int  # of a micro-batch
    length: int  # tokens of a row
    before: int  # bytes of the process without a model: Python, libraries, data
    weights: int
    optimizer: int
    gradients: int  # of all replicas
    activations: dict[str, int]  # what one replica keeps for backward, by layer
    transient: int  # what forward and backward of one replica use for a while
    cache: int  # keys and values for generating one sequence; 0 if the model does not generate

    @property
    def peak(self) -> int:
        """Bytes of memory at most while training, the cache not counted: in a step, or when a snapshot is written."""
        step = self.working * (sum(self.activations.values()) + self.transient)
        snapshot = self.weights + self.optimizer  # copies of them
        return self.before + self.weights + self.optimizer + self.gradients + max(step, snapshot)

    def __str__(self) -> str:
        kept = sum(self.activations.values())
        rows = [
            ("Python, libraries and data", self.before),
            (f"{self.parameters:,} parameters", self.weights),
            ("Adam's two means", self.optimizer),
            (f"gradients of {self.replicas} replica(s)", self.gradients),
            (f"activations of {self.working} replica(s)", self.working * kept),
            *((f"    {name}, each replica", size) for name, size in self.activations.items()),
            (f"passing, of {self.working} replica(s)", self.working * self.transient),
            ("peak while training", self.peak),
            *([("keys and values to generate one sequence", self.cache)] if self.cache else []),
        ]
        head = f"micro-batches of {self.rows} rows of {self.length} tokens, {self.replicas} replica(s)\n"
        return head + "\n".join(f"{name:<46}{size / 1e6:>10.1f} MB" for name, size in rows)


def estimate(replicas: Replicas, batch: Any, before: int = 0) -> Estimate:
    """What training `replicas.model` with Adam on batches like this one, of the model's longest rows, will take.

    One row, and then two, go forward and backward through a model of the same sizes and one block, watched: what their
    caches keep, by layer, and how much more is used for a while. What grows between the two grows with the rows, and
    the blocks' share of what is kept with the depth. before: bytes that the process had without the model
    (`memory.resident_bytes`). Raises ValueError for a model on a GPU.
    """
    model = replicas.model
    config, itemsize = model.config, model.flat.data.itemsize
    length = config.get("context") or config["max_length"]
    if model.device is not CPU:
        raise ValueError("estimate: what is estimated is the memory of a run on a CPU")
    whole = _longest(batch, length, len(batch[0]))
    rows = replicas.rows(whole)
    working = min(replicas.count, len(whole.split(rows)))  # replicas that get a micro-batch
    shallow = type(model)(**{**config, "depth": 1}).to(dtype=model.flat.data.dtype)
    weights = {id(_owner(p.data)) for p in shallow.parameters()}
    (one, passing_one), (two, passing_two) = (_watch(shallow, _longest(batch, length, n), weights) for n in (1, 2))
    activations = {}
    for name in filter(two.get, two):
        layers = config["depth"] if name.startswith("blocks") else 1
        activations[name] = layers * _extrapolate(one[name], two[name], rows)
    attention = getattr(model.body.blocks[0], "layer", model.body.blocks[0]).attention
    values = config["depth"] * length * attention.query.w.data.shape[1] * itemsize
    return Estimate(
        parameters=model.flat.data.size,
        replicas=replicas.count,
        working=working,
        rows=rows,
        length=length,
        before=before,
        weights=model.flat.data.nbytes,
        optimizer=BUFFERS * model.flat.data.nbytes,
        gradients=replicas.count * model.flat.grad.nbytes,
        activations=activations,
        transient=max(0, _extrapolate(passing_one, passing_two, rows)),
        cache=2 * values if hasattr(model, "extend") else 0,
    )


def _watch(model: Any, batch: Any, weights: set[int]) -> tuple[dict[str, int], int]:
    """What the caches of a micro-batch keep, by layer, and what backward takes beside them."""
    watched = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        _, cache = model.loss(*batch, key=Key(0))
        kept = _by_layer(cache, set(weights))
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        model.loss_backward(1.0, cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not watched:
            tracemalloc.stop()
    return kept, peak - start


def _extrapolate(one: int, two: int, rows: int) -> int:
    """The value for `rows` of what is `one` for one row and `two` for two."""
    return one + (rows - 1) * (two - one)


def _longest(batch: Any, length: int, rows: int = 1) -> Any:
    """`rows` rows of `length` tokens, from a batch, repeated where it has fewer."""
    first = batch.split(rows)[0]
    stretched = {"ids": np.resize(first.ids, (rows, length))}
    if hasattr(first, "targets"):
        stretched["targets"] = np.resize(first.targets, (rows, length))
    else:
        stretched |= {"lengths": np.full(rows, length), "labels": np.resize(first.labels, rows)}
    return first._replace(**stretched)


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


def _by_layer(cache: Any, seen: set[int]) -> dict[str, int]:
    """Bytes that the caches of a `loss` keep, each array counted with the first that has it."""
    forward, cross_entropy = cache
    body = forward.body
    block = body.blocks[0]
    parts = {"embedding": (body.tokens, body.positions, body.dropout)}
    fields = block._asdict() if hasattr(block, "_asdict") else {"": block}
    parts |= {f"blocks: {name}": part for name, part in fields.items()}
    parts |= {"final norm": body.final_norm, "output": forward[1:], "cross-entropy": cross_entropy}
    found = {}
    for name, part in parts.items():
        owners = {id(_owner(x)): _owner(x).nbytes for x in _arrays(part)}
        found[name] = sum(size for key, size in owners.items() if key not in seen)
        seen |= owners.keys()
    return found

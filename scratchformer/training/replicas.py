"""Replicas: a batch is cut into micro-batches, and micro-batches are dealt to copies of the model.

A replica shares the parameter array and owns a gradient array. On a CPU each replica is a thread, with BLAS limited to
one thread: the matrix products of two replicas run in parallel, and so does everything between them. A sum over the
batch is a sum over its micro-batches, so gradient accumulation is the same thing with one replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import CPU, Array, array_module, cores, is_floating_type, to_cpu, to_device
from ..dispatch import fast
from ..nn import Layer
from ..ops.checks import expect_instance, expect_positive, shown
from ..ops.precision import round_into, widen
from ..optim.optimizer import pieces
from ..rng import Key, expect_key
from .memory import keep_freed_memory
from .precision import advice, half_type

MICRO_BATCH_ELEMENTS = 1 << 17  # tokens × width of an automatic micro-batch on a CPU: activations that fit in cache
MOST_REPLICAS = 512  # more than the cores of the largest machines
AHEAD = 4  # items that may be in progress or waiting for each replica


class Replicas:
    """`count` replicas of a model, as a context manager. Inside it the fast twins run (see `dispatch.fast`), and BLAS
    is limited to one thread if there are several. On a CPU the process keeps the memory that it frees from then
    on (`memory.keep_freed_memory`).

    model: the first replica, a Layer with `loss(*batch, key=)`, which returns the mean loss and a cache, and
    `loss_backward(dloss, cache)`, which adds to the gradients. `train` saves it, and needs its `config`, JSON values.
    A batch is a NamedTuple of NumPy arrays, the first (rows, tokens), with `weight`, the number of items in the mean of
    its loss (targets that are `ops.IGNORED` do not count), `tokens`, the number of its tokens, and `split(size)`, its
    rows in order as batches of at most `size` rows.
    count: by default one per CPU core, or one on a GPU. micro_batch: rows in a micro-batch; by default as many as keep
    tokens × width near 131,072 on a CPU, or near twice that in half precision (one micro-batch per replica if
    `model.config` has no "d_model"), and the whole batch on a GPU.

    The assignment of micro-batches to replicas and the order of every sum are fixed, so results do not depend on the
    timing of threads. They do depend, in the last bits, on `count` and `micro_batch`.
    """

    def __init__(
        self, model: Any, count: int | None = None, micro_batch: int | None = None, precision: str = "float32"
    ) -> None:
        expect_instance("model", model, Layer)
        for name, number in ("count", count), ("micro_batch", micro_batch):
            if number is not None:
                expect_positive(**{name: number})
        on_cpu = model.device is CPU
        self.count = (cores() if on_cpu else 1) if count is None else count
        if self.count > MOST_REPLICAS:
            raise ValueError(f"count: expected at most {MOST_REPLICAS}, each of them a thread, got {self.count}")
        if self.count > 1 and not on_cpu:
            raise ValueError("replicas: expected 1 on a GPU; use micro_batch to accumulate gradients")
        self.model, self.micro_batch, self.device = model, micro_batch, model.device
        self.flat, self.precision = model.flat, precision
        self.half: Array | None = None  # the copy of the weights in half precision, if the replicas compute in it
        dtype = half_type(precision, model)
        if dtype is not None:
            self.half = array_module(self.flat.data).empty_like(self.flat.data, dtype=dtype)
        first = model if self.half is None else model.replica(self.half, self.flat.grad)
        # An overflow of float16 makes a loss or gradient that is not finite, which `train` handles.
        self.errors: dict[str, Any] = {"over": "ignore", "invalid": "ignore"} if precision == "float16" else {}
        self.models = [first, *(first.replica() for _ in range(self.count - 1))]
        self.threads: list[ThreadPoolExecutor] = []  # outside the `with` block, replicas run one after another
        self.refresh()

    def __deepcopy__(self, _memo: dict) -> Replicas:
        raise TypeError("replicas: a copy would not share the parameters; copy the model and make new replicas")

    def __enter__(self) -> Replicas:
        if self.device is CPU:
            keep_freed_memory()
        self.fast = fast()  # first, so that the threads of the BLAS that it loads are limited too
        self.fast.__enter__()
        self.limits = threadpool_limits(1, "blas") if self.count > 1 else None
        self.threads = [ThreadPoolExecutor(1) for _ in self.models] if self.count > 1 else []
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.threads:
            for thread in self.threads:
                thread.shutdown(cancel_futures=True)
            self.threads = []
        if self.limits is not None:
            self.limits.restore_original_limits()
            self.limits = None
        self.fast.__exit__(None, None, None)

    def map(self, function: Callable, items: Iterable) -> list:
        """[function(item) for item in items], distributed over the threads."""
        return self._map(lambda _, item: function(item), items)

    def map_models(
        self,
        function: Callable[[Any, Any], Any],
        items: Iterable,
        finished: Callable[[Any], object] = lambda item: None,
    ) -> list:
        """[function(model, item) for item in items], where item i goes to replica i mod `count`, in order.

        Items are read only as needed, at most AHEAD per replica at a time, so a long generator takes little memory. An
        exception from `function` or `items` is raised after all replicas have stopped. A generator is closed at the
        end. finished: called with each item, in order, once its result is there. In half precision the replicas get
        the present weights of the model first.
        """
        self.refresh()
        return self._map(function, items, finished)

    def refresh(self) -> None:
        """Copy the weights of the model into those of replicas in half precision."""
        if self.half is None:
            return
        half, data = self.half, self.flat.data

        def cast(part: slice) -> None:
            round_into(data[part], half[part])

        self.map(cast, pieces(data))

    def _map(
        self,
        function: Callable[[Any, Any], Any],
        items: Iterable,
        finished: Callable[[Any], object] = lambda item: None,
    ) -> list:
        results: list = []
        running: deque[tuple[Future, Any]] = deque()

        def run(model: Any, item: Any) -> Any:
            with np.errstate(**self.errors):
                return function(model, item)

        def finish() -> None:
            future, item = running.popleft()
            results.append(future.result())
            finished(item)

        try:
            for i, item in enumerate(items):
                model = self.models[i % self.count]
                if not self.threads:
                    results.append(run(model, item))
                    finished(item)
                    continue
                if len(running) == AHEAD * self.count:
                    finish()
                running.append((self.threads[i % self.count].submit(run, model, item), item))
            while running:
                finish()
        finally:
            for future, _ in running:
                future.cancel()
            wait(future for future, _ in running)
            if isinstance(items, Generator):
                items.close()
        return results

    def rows(self, batch: Any) -> int:
        """Rows in a micro-batch of `batch`; by default every replica gets the same number of them, if possible."""
        rows = len(batch[0])
        if self.micro_batch is not None:
            return min(rows, self.micro_batch)
        if self.device is not CPU:
            return rows
        most = self.fitting(batch[0].shape[1]) or math.ceil(rows / self.count)
        fewest = math.ceil(rows / (most * self.count))  # micro-batches per replica
        even = (r for r in range(fewest, 2 * fewest) if rows % (r * self.count) == 0)
        return math.ceil(rows / (next(even, fewest) * self.count))

    def fitting(self, length: int) -> int | None:
        """How many rows of `length` tokens fit in a core's cache; None for a model without `config["d_model"]`."""
        width = getattr(self.model, "config", {}).get("d_model")
        elements = MICRO_BATCH_ELEMENTS if self.half is None else 2 * MICRO_BATCH_ELEMENTS
        return width and max(1, elements // (length * width))

    def describe(self, batch: Any) -> str:
        """One line that says how a batch like this one is divided."""
        chosen = "" if self.micro_batch is not None else ", chosen automatically"
        precision = "" if self.precision == "float32" else f", in {self.precision}{advice(self.half)}"
        return f"{self.count} replica(s) on {self.device}, micro-batches of {self.rows(batch)} rows{chosen}{precision}"

    def move(self, batch: Any) -> Any:
        """The batch with its arrays on the model's device, and those of real numbers in the type of the replicas."""
        moved = (to_device(a, self.device) for a in batch)
        if self.half is None:
            return type(batch)(*moved)
        return type(batch)(*(a.astype(self.half.dtype) if is_floating_type(a.dtype) else a for a in moved))

    def gradients(
        self, batch: Any, key: Key, remember: Callable[[list], None] | None = None, scale: float = 1.0
    ) -> float:
        """Put ∂loss/∂w of the whole batch into the model's flat gradient. Returns the loss, the mean over the batch.

        A micro-batch with a share a of the batch's weight adds a · ∂(its own mean loss)/∂w. If nothing in the batch
        counts, the loss and the gradient are 0.
        remember: for a model with a memory; called with a list of what `model.remember` returns for each micro-batch,
        in order, as NumPy arrays.
        scale: a power of two by which the gradient is larger while it passes backward (see `training.LossScale`). The
        flat gradient is divided by it; an overflow on the way leaves infinity or NaN there.
        Raises ValueError if the model was moved or cast (`to`), or its parameters were
        changed, after the replicas were made.
        """
        if not hasattr(batch, "weight"):
            raise TypeError(f"batch: expected one with weight and split(size), got {shown(batch)}")
        expect_key(key)
        if self.model.flat is not self.flat:
            raise ValueError("the model's parameters were moved or changed after its replicas were made: make new ones")
        total = max(1, batch.weight)

        def zero(model: Layer) -> None:
            model.flat.grad[...] = 0

        def run(model: Any, item: tuple[int, Any]) -> tuple[Array, Any]:
            index, micro = item
            share = micro.weight / total
            loss, cache = model.loss(*self.move(micro), key=key.fold(index))
            model.loss_backward(share * scale, cache)
            return loss * share, remember and widen(to_cpu(model.remember(cache[0])))

        self.map(zero, self.models)
        micro_batches = enumerate(batch.split(self.rows(batch)))
        losses, memories = zip(*self.map_models(run, micro_batches), strict=True)
        self.sum_gradients(scale)
        if remember is not None:
            remember(list(memories))
        return float(sum(losses))

    def sum_gradients(self, scale: float = 1.0) -> None:
        """Add the flat gradients of all replicas into the model's, in order, and divide the sum by `scale`."""
        total, others = self.model.flat.grad, [m.flat.grad for m in self.models[1:]]

        def add(part: slice) -> None:
            for grad in others:
                total[part] += grad[part]
            if scale != 1:
                total[part] *= 1 / scale

        if others or scale != 1:
            self.map(add, pieces(total))

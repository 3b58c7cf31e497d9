"""Replicas: a batch is cut into micro-batches, and micro-batches are dealt to copies of the model.

A replica shares the parameter array and owns a gradient array. On a CPU each replica is a thread, with BLAS limited to
one thread: the matrix products of two replicas run in parallel, and so does everything between them. A sum over the
batch is a sum over its micro-batches, so gradient accumulation is the same thing with one replica.

How a batch is cut, and in which order gradients are added, depends on the model and the batch alone, so the number of
replicas changes no bit of the sum. The M micro-batches form S = min(M, SHARES) shares of consecutive ones. Within a
share each micro-batch adds to the gradients of those before it. The sums of the shares are then added as a tree
(`TreeSum`). If the sum of a share has to wait for its neighbour's while the replica goes on to its next share, it is
copied: there are log2(S) further arrays with one replica, and one less with two.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import CPU, Array, array_module, cores, is_floating_type, tf32, to_cpu, to_device, widen
from ..checks import checked_on_host, expect_instance, expect_number, expect_positive
from ..dispatch import fast, is_fast
from ..nn import Layer
from ..nn.layer import Structure
from ..ops.rounding import round_into
from ..optim.optimizer import Optimizer, global_norm, pieces, share_for
from ..rng import Key, expect_key
from ..shell.text import shown
from .diagnose import Diverged, first_nonfinite
from .graphs import Graphs
from .memory import keep_freed_memory
from .precision import LossScale, advice, half_type
from .ranks import Ranks

MICRO_BATCH_ELEMENTS = 1 << 17  # tokens × width of an automatic micro-batch on a CPU: activations that fit in cache
MAX_REPLICAS = 512  # more than the cores of the largest machines
AHEAD = 4  # items that may be in progress or waiting for each replica
FEWEST = 4  # automatic micro-batches of a batch on a CPU, if it has as many rows
SHARES = 8  # partial sums of gradients: as many replicas, of all ranks, can work at a batch
NOTED = 3  # skipped batches that are noted one by one


Branch = tuple[int, int]  # a sum's round and place in the tree


class Term(NamedTuple):
    """A term of a sum, or the sum of several."""

    array: Array
    copied: bool  # whether the sum made the array, so that it may be used again


class TreeSum:
    """The sum of `count` arrays, added in rounds like those of a tournament. Of eight terms:

        ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

    A part without a neighbour goes on to the next round: the sum of five is ((0 + 1) + (2 + 3)) + 4. The bits of a sum
    of floating-point numbers depend on the order of additions. Here the order depends on `count` alone, so it does not
    matter which thread computes a term, or when it is ready.

    spare: arrays like the terms, for copies; more are made as needed, and all are there again in the end.
    """

    def __init__(self, count: int, spare: list[Array]) -> None:
        self.count, self.spare = count, spare
        self.waiting: dict[Branch, Term] = {}
        self.lock = threading.Lock()

    def add(self, place: int, term: Array, copy: bool = True, round: int = 0) -> None:
        """Add term number `place`: to its neighbour if that waits for it, then their sum to its neighbour, and so on.

        copy: whether the caller will change the array while the sum is not complete. round: how many rounds the array
        has been through already; `place` is its place among the sums of that round.
        """
        part = Term(term, False)
        while (places := math.ceil(self.count / 2**round)) > 1:
            neighbour = place + 1 if place % 2 == 0 else place - 1
            if neighbour < places:
                with self.lock:  # also while copying: of two neighbours that come at once, only one is copied
                    other = self.waiting.pop((round, neighbour), None)
                    if other is None:
                        if copy and part.array is term:
                            room = self.spare.pop() if self.spare else array_module(term).empty_like(term)
                            room[...] = term
                            part = Term(room, True)
                        self.waiting[round, place] = part
                        return
                other.array[...] += part.array
                self.release(part)
                part = other
            round, place = round + 1, place // 2
        self.waiting[round, place] = part

    @property
    def total(self) -> Term:
        """The sum of all terms, once they are there."""
        (total,) = self.waiting.values()
        return total

    def room(self, out: Array, size: int) -> Iterator[Array]:
        """Arrays of `size` numbers: pieces of those that hold nothing now, `out` (if no sum is in it) and spare ones;
        then new ones.
        """
        free = [] if any(part.array is out for part in self.waiting.values()) else [out]
        for array in free + self.spare:
            for start in range(0, array.size - size + 1, max(1, size)):
                yield array[start : start + size]
        while True:
            yield array_module(out).empty_like(out[:size])

    def release(self, part: Term) -> None:
        """Let the array of a part be used again, if the sum made it."""
        if part.copied:
            self.spare.append(part.array)


class Replicas:
    """`count` replicas of a model, as a context manager. Inside it the fast twins run (see `dispatch.fast`). On a CPU
    BLAS is limited to one thread, also if there is one replica, since more would change the last bits of its products;
    and the process keeps the memory that it frees from then on (`memory.keep_freed_memory`).

    model: the first replica, a Layer with `loss(*batch, key=)`, which returns the mean loss and a cache, and
    `loss_backward(dloss, cache)`, which adds to the gradients. A `Run` saves it, and needs its `config`, JSON values.
    A batch is a NamedTuple of NumPy arrays, the first (rows, tokens), with `weight`, the number of items in the mean of
    its loss (targets that are `ops.IGNORED` do not count), `tokens`, the number of its tokens, and `split(size)`, its
    rows in order as batches of at most `size` rows. For `estimate` it also needs `stretched(rows, length)`.
    count: by default one per CPU core, or one on a GPU. micro_batch: rows in a micro-batch; by default as many as keep
    tokens × width near 131,072 on a CPU, or near twice that in half precision, but few enough for FEWEST micro-batches
    (just that many if `model.config` has no "d_model"), and the whole batch on a GPU. micro_batches: instead, about how
    many a batch has; each has ⌈rows/micro_batches⌉ rows, the last one perhaps fewer.

    On a CPU the bits of the results depend on `micro_batch` and `micro_batches`, but neither on `count` nor on the
    timing of threads. The replicas are copies of the model, so a setting that is changed afterwards, such as the p of a
    Dropout, does not reach all of them: then make new ones.
    """

    def __init__(
        self,
        model: Any,
        count: int | None = None,
        micro_batch: int | None = None,
        precision: str = "float32",
        ranks: Ranks | None = None,
        micro_batches: int | None = None,
    ) -> None:
        expect_instance("model", model, Layer)
        for name, number in ("count", count), ("micro_batch", micro_batch), ("micro_batches", micro_batches):
            if number is not None:
                expect_positive(**{name: number})
        if micro_batch is not None and micro_batches is not None:
            raise ValueError("micro_batches: give either this or micro_batch, not both")
        on_cpu = model.device is CPU
        self.count = (cores() if on_cpu else 1) if count is None else count
        if self.count > MAX_REPLICAS:
            raise ValueError(f"count: expected at most {MAX_REPLICAS}, each of them a thread, got {self.count}")
        if ranks is not None and ranks.size > 1 and not on_cpu:
            raise ValueError("ranks: several processes train on CPUs only, so add --device cpu")
        if self.count > 1 and not on_cpu:
            raise ValueError("replicas: expected 1 on a GPU; use micro_batch to accumulate gradients")
        self.model, self.device = model, model.device
        self.micro_batch, self.micro_batches = micro_batch, micro_batches
        self.flat, self.precision, self.ranks = model.flat, precision, ranks or Ranks()
        self.fixed_order = on_cpu  # whether gradients are summed in a fixed order
        self.half: Array | None = None  # the copy of the weights in half precision, if the replicas compute in it
        dtype = half_type(precision, self.device)
        if dtype is not None:
            if self.flat.data.dtype != np.float32:
                got = self.flat.data.dtype
                raise ValueError(f"precision: expected a model in float32, for its master weights, got {got}")
            self.half = array_module(self.flat.data).empty_like(self.flat.data, dtype=dtype)
        first = model if self.half is None else model.replica(self.half, self.flat.grad)
        # An overflow of float16 makes a loss or gradient that is not finite, which `clip` handles.
        self.errors: dict[str, Any] = {"over": "ignore", "invalid": "ignore"} if precision == "float16" else {}
        self.models = [first, *(first.replica() for _ in range(self.count - 1))]
        self.at_end = ExitStack()  # what the end of the `with` block ends
        self.grads = {id(each): each.flat.grad for each in self.models}  # the flat gradient of each
        self.threads: list[ThreadPoolExecutor] = []  # outside the `with` block, replicas run one after another
        self.spare: list[Array] = []  # arrays for sums of gradients
        self.slices = slices_of(self.flat.data, self.ranks.size)  # of the gradient: which rank adds which
        self.sharded = False
        self.rounded = False  # whether `half` already holds the weights of the model
        self.only_in_half = False  # whether only `half` has the present weights of all slices
        self.loss_scale = LossScale() if precision == "float16" else None
        self.factor: float | Array = 1.0  # by which the present gradient is multiplied in `step`
        self.computed: tuple[Any, Key | None, Any] | None = None  # batch, key and loss of a new gradient
        self.skipping = False  # whether the present gradient has overflowed
        self.reading = True  # whether `clip` reads the loss and the norm; a `Run` on a GPU does without in most steps
        self.note: Callable[[str], object] = partial(print, file=sys.stderr)  # a `Run` puts its own here
        self.tokens = 0  # in all batches of `gradients`
        self.structure = Structure(model)  # as it was when its parameters were last found to be the same
        recorded = self.device.index is not None
        self.graphs = Graphs(self.device, self.step_on_device, first.flat.grad) if recorded else None
        self.refresh()

    def __enter__(self) -> Replicas:
        if self.device is CPU:
            keep_freed_memory()
        with ExitStack() as entered:  # it ends what has begun if something fails
            entered.enter_context(fast())  # first, so that the threads of the BLAS that it loads are limited too
            entered.enter_context(tf32(self.device, self.precision == "tf32"))
            if self.device is CPU:
                entered.enter_context(threadpool_limits(1, "blas"))
            self.threads = [ThreadPoolExecutor(1) for _ in self.models] if self.count > 1 else []
            self.at_end.enter_context(entered.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            for thread in self.threads:
                thread.shutdown(cancel_futures=True)
            self.threads = []
            if self.graphs is not None:
                self.graphs.clear()
        finally:
            self.at_end.__exit__(*exception)

    def map(self, function: Callable, items: Iterable) -> list:
        """[function(item) for item in items], distributed over the threads."""
        if self.threads or isinstance(items, Generator):
            return self._map(lambda _, item: function(item), items)
        with np.errstate(**self.errors):
            return [function(item) for item in items]

    def map_models(
        self,
        function: Callable[[Any, Any], Any],
        items: Iterable,
        finished: Callable[[Any], object] | None = None,
    ) -> list:
        """[function(model, item) for item in items], where item i goes to replica i mod `count`, in order.

        Items are read only as needed, at most AHEAD per replica at a time, so a long generator takes little memory. An
        exception from `function` or `items` is raised after all replicas have stopped. A generator is closed at the
        end. finished: called with each item, in order, once its result is there. In half precision the replicas get
        the present weights of the model first. Of several ranks, rank r computes items r, r + `ranks.size`, ..., and
        all ranks get the results of all items. Raises ValueError as `gradients` does.
        """
        self.expect_same_parameters()
        self.refresh()
        ranks = self.ranks
        if ranks.size == 1:
            return self._map(function, items, finished)

        def items_of_this_rank() -> Iterator:
            for i, item in enumerate(items):
                if i % ranks.size == ranks.rank:
                    yield item
                elif finished is not None:
                    finished(item)

        dealt = [deque(results) for results in ranks.gather(self._map(function, items_of_this_rank(), finished))]
        return [dealt[i % ranks.size].popleft() for i in range(sum(map(len, dealt)))]

    def expect_same_parameters(self) -> None:
        """Raise ValueError if the model was moved or cast, or its parameters were changed, after this was made."""
        if self.structure.is_unchanged() and all(p.flat is self.flat for p in self.flat.params):
            return
        if self.graphs is not None:
            self.graphs.clear()
        if self.model.flat is not self.flat:
            raise ValueError("the model's parameters were moved or changed after its replicas were made: make new ones")
        self.structure = Structure(self.model)  # last, so that what was refused is refused again

    def refresh(self) -> None:
        """Copy the weights of the model into those of replicas in half precision, unless `step` has just done so."""
        rounded, self.rounded = self.rounded, False
        if not (self.only_in_half or rounded):
            self.round(slice(0, self.flat.data.size))

    def round(self, where: slice) -> None:
        """`refresh` for a part of the flat array."""
        if self.half is None:
            return
        half, data = self.half[where], self.flat.data[where]

        def cast(part: slice) -> None:
            round_into(data[part], half[part])

        self.map(cast, pieces(data))

    def _map(
        self,
        function: Callable[[Any, Any], Any],
        items: Iterable,
        finished: Callable[[Any], object] | None = None,
    ) -> list:
        results: list = []
        running: deque[tuple[Future, Any]] = deque()

        def run(model: Any, item: Any) -> Any:
            with np.errstate(**self.errors):
                return function(model, item)

        def finish() -> None:
            future, item = running.popleft()
            results.append(future.result())
            if finished is not None:
                finished(item)

        try:
            for i, item in enumerate(items):
                model = self.models[i % self.count]
                if not self.threads:
                    with np.errstate(**self.errors):
                        results.append(function(model, item))
                    if finished is not None:
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
        """Rows in a micro-batch of `batch`, which depend on the batch and the model, but not on the number of replicas.

        As micro_batch or micro_batches says. On a CPU by default as many as fit, but few enough for FEWEST
        micro-batches; and down to half as many if the number of micro-batches is then a multiple of FEWEST, so that 2
        or 4 replicas have equal work.
        """
        rows = len(batch[0])
        if self.micro_batch is not None:
            return min(rows, self.micro_batch)
        if self.micro_batches is not None:
            return math.ceil(rows / self.micro_batches)
        if not self.fixed_order:
            return rows
        limit = min(self.fitting(batch[0].shape[1]) or rows, math.ceil(rows / FEWEST))
        even = (size for size in range(limit, limit // 2, -1) if rows % (FEWEST * size) == 0)
        return next(even, math.ceil(rows / math.ceil(rows / limit)))

    def fitting(self, length: int) -> int | None:
        """How many rows of `length` tokens fit in a core's cache; None for a model without `config["d_model"]`."""
        width = getattr(self.model, "config", {}).get("d_model")
        elements = MICRO_BATCH_ELEMENTS if self.half is None else 2 * MICRO_BATCH_ELEMENTS
        return width and max(1, elements // (length * width))

    def describe(self, batch: Any) -> str:
        """One line that says how a batch like this one is divided."""
        chosen = ", chosen automatically" if (self.micro_batch, self.micro_batches) == (None, None) else ""
        precision = "" if self.precision == "float32" else f", in {self.precision}{advice(self.half)}"
        rows = f"micro-batches of {self.rows(batch)} rows{chosen}{precision}"
        ranks = "" if self.ranks.size == 1 else f"{self.ranks.size} ranks, each with "
        count, shares = self.count * self.ranks.size, self.shares(math.ceil(len(batch[0]) / self.rows(batch)))
        idle = f"; only {shares} of {count} have work, since there are too few micro-batches" if shares < count else ""
        return f"{ranks}{self.count} replica(s) on {self.device}, {rows}{idle}"

    def move(self, batch: Any) -> Any:
        """The batch with its arrays on the model's device, of the class of its parameters' arrays. Those of real
        numbers, except `labels`, have the type of the replicas.
        """
        moved = {name: to_device(a, self.device) for name, a in zip(batch._fields, batch, strict=True)}
        if self.device is CPU:
            moved = {name: a.view(type(self.flat.data)) for name, a in moved.items()}
        if self.half is not None:
            for name, a in moved.items():
                if name != "labels" and is_floating_type(a.dtype):
                    moved[name] = a.astype(self.half.dtype)
        return type(batch)(**moved)

    def loss(self, model: Any, batch: Any, key: Key | None = None) -> tuple[Array, Any]:
        """`model.loss` of a batch that is not on the device yet, of one of `models`, and its cache."""
        kind = type(self.flat.data)
        if self.device is CPU and self.half is None and all(type(a) is kind for a in batch):
            return model.loss(*batch, key=key)
        with self.moved(model, batch) as moved:
            return model.loss(*moved, key=key)

    @contextmanager
    def moved(self, model: Any, batch: Any) -> Iterator[Any]:
        """The batch on the device, for one of `models` to compute with inside the block.

        Before a batch is moved to a GPU, `model.check_batch` checks its values. Inside the block the checks on the GPU
        are skipped, since the host would wait for each of them. A model without this method is checked on the GPU, and
        so is one of a derived class that overrides `loss`, `logits` or `forward` alone.
        """
        check = None if self.device is CPU else running_check(model)
        if check is not None:
            check(*batch)
        with nullcontext() if check is None else checked_on_host():
            yield self.move(batch)

    def gradients(self, batch: Any, key: Key | None, remember: Callable[[list], None] | None = None) -> float | Array:
        """Put ∂loss/∂w of the whole batch into the model's flat gradient. Returns the loss, the mean over the batch; on
        a GPU as an array () there, since for a number the host would have to wait.

        A micro-batch with a share a of the batch's weight adds a · ∂(its own mean loss)/∂w. If nothing in the batch
        counts, the loss and the gradient are 0.
        key: of dropout; None for no dropout.
        remember: for a model with a memory; called with a list of what `model.remember` returns for each micro-batch,
        in order; they stay on the device.
        In float16 the gradient is larger by a power of two while it passes backward (see `LossScale`). The flat
        gradient is divided by it; an overflow on the way leaves infinity or NaN there, see `clip`.
        Raises ValueError if the model was moved or cast (`to`), or its parameters were changed, after the replicas were
        made.
        """
        if not hasattr(batch, "weight"):
            raise TypeError(f"batch: expected one with weight and split(size), got {shown(batch)}")
        if not isinstance(key, Key | None):
            expect_key(key)
        self.expect_same_parameters()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        self.factor, self.skipping, self.tokens = 1.0, False, self.tokens + getattr(batch, "tokens", 0)
        total = max(1, batch.weight)
        micro_batches = batch.split(self.rows(batch))
        shares = np.array_split(range(len(micro_batches)), self.shares(len(micro_batches)))
        alone, sums = self.ranks.size == 1, TreeSum(len(shares), self.spare)
        part = range(len(shares)) if alone else self.ranks.part(len(shares))  # of this rank

        def run_share(model: Any, number: int) -> list:
            grad, results = self.grads[id(model)], []
            grad[...] = 0
            for index in map(int, shares[number]):
                micro, drawn = micro_batches[index], None if key is None else key.fold(index)
                weight = micro.weight / total
                compute = partial(self.loss, model, micro, drawn)
                arguments = weight * scale, remember is not None
                recorded = None if self.graphs is None else self.recorded(micro, drawn, *arguments)
                mean, memory = recorded or add_gradient(model, compute, *arguments)
                results.append((mean * weight, memory))
            sums.add(number, grad, copy=number + self.count < part.stop)  # if the replica has another share
            return results

        if self.half is not None:
            self.refresh()
        results = self._map(run_share, part), sorted(sums.waiting)
        of_ranks, branches = zip(*([results] if alone else self.ranks.gather(results)), strict=True)
        losses, memories = zip(*chain(*chain(*of_ranks)), strict=True)  # of each micro-batch of each share of each rank
        if not alone:
            self.ranks.sum(sums, branches, self.flat.grad, self.slices, self.map)
            if not self.sharded:
                self.ranks.join(self.flat.grad, self.slices)
            self.put_gradient(self.flat.grad, scale)
        else:
            (total_sum,) = sums.waiting.values()
            self.put_gradient(total_sum.array, scale)
            sums.release(total_sum)
        if remember is not None:
            remember(list(memories))
        mean = float(sum(losses)) if self.fixed_order else sum(losses)
        self.computed = batch, key, mean
        return mean

    def recorded(
        self, batch: Any, key: Key | None, factor: float, remembers: bool
    ) -> tuple[Array, Array | None] | None:
        """What `add_gradient` does for a micro-batch, as a CUDA graph (see `graphs`); None if it is not recorded."""
        model = self.models[0]
        if self.graphs is None or running_check(model) is None or not is_fast():
            return None
        known = self.graphs.wants(batch, key, remembers)
        if known is None:
            return None
        with self.moved(model, batch) as moved:
            results = self.graphs.run(known, moved, key, factor)
        return None if results is None else (results[0], results[1])

    def step_on_device(self, moved: Any, key: Key | None, factor: Array, remembers: bool) -> tuple[Array, Array | None]:
        """`add_gradient` for a micro-batch that is on the device, so that it can be recorded."""
        model = self.models[0]
        return add_gradient(model, partial(model.loss, *moved, key=key), factor, remembers)

    def shard(self, optimizer: Optimizer) -> None:
        """From now on each rank has only its slice of the gradient, steps that, and keeps the optimizer's state for it.

        After a step the ranks have to `join` their slices.
        """
        self.slices, self.sharded = optimizer.slices(self.ranks.size), True
        optimizer.keep(self.slices[self.ranks.rank])

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> float | Array:
        """Let the next `step` scale the gradients of the optimizer's parameters so that their global norm is at most
        `max_norm`; None only measures. Returns the norm before; on a GPU as an array () there.

        Raises Diverged if the loss or the norm is not finite, naming the first layer or tensor. But in float16 an
        overflow halves the loss scale if that is possible, and `step` then changes nothing.
        """
        if max_norm is not None:
            expect_number("max_norm", max_norm, zero=False, infinite=True)
        gather = (self.ranks.gather,) if self.sharded else ()
        norm = global_norm(optimizer.gradients(), self.map, *gather)
        self.factor = 1.0 if max_norm is None else share_for(norm, max_norm)
        computed, self.computed = self.computed, None
        if computed is None or not self.reading:
            return norm
        batch, key, loss = computed
        number: Any = norm
        if not self.fixed_order:  # in one transfer
            loss, number = to_cpu(self.device.xp.stack([loss.astype(np.float64), norm])).tolist()
        if not (math.isfinite(loss) and math.isfinite(number)):
            self.overflowed(batch, key, loss, number)
        elif self.loss_scale is not None:
            self.loss_scale.skips(number)  # counts it
        return norm

    def overflowed(self, batch: Any, key: Key | None, loss: float, norm: float) -> None:
        """Skip the step if only a gradient overflowed float16 and the loss scale can be halved; else raise Diverged."""
        scale = 0.0 if self.loss_scale is None else self.loss_scale.scale
        if self.loss_scale is not None and math.isfinite(loss) and self.loss_scale.skips(norm):
            self.skipping = True
            if self.loss_scale.skipped <= NOTED:
                reason = f"a gradient overflowed float16 at loss scale {scale:g}"
                self.note(f"{reason}; the scale is halved, and the step skipped")
            return
        if self.sharded:
            self.ranks.join(self.flat.grad, self.slices)
        where = first_nonfinite(self, batch, key)
        raise Diverged(f"loss {loss}, gradient norm {norm}; the first that is not finite is {where}")

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer, as `Optimizer.step` does, with the gradients that `clip` has scaled, and `join` the
        weights. In the same pass they are rounded for replicas in half precision.
        """
        if self.loss_scale is not None and self.computed is not None:
            self.clip(optimizer, None)  # an overflow must not reach the weights
        expect_number("lr", optimizer.lr)
        if self.skipping:
            return
        optimizer.step(self.map, self.factor, self.half)
        self.rounded = self.half is not None
        if self.sharded:
            self.join()

    def join(self) -> None:
        """After a step of a sharded optimizer: send the other ranks this one's slice of the weights, in half precision
        if they compute in it. Then a rank has of the model's own weights only its slice, until `join_whole`.
        """
        if not self.sharded:
            return
        if self.half is None:
            self.ranks.join(self.flat.data, self.slices)
        else:
            if not self.rounded:
                self.round(self.slices[self.ranks.rank])
            self.ranks.join(self.half, self.slices)
            self.only_in_half = True

    def join_whole(self) -> None:
        """Give all ranks all weights of the model, to save or to score them."""
        if self.only_in_half:
            self.ranks.join(self.flat.data, self.slices)
            self.only_in_half = False

    def put_gradient(self, total: Array, scale: float = 1.0) -> None:
        """Make `total`, divided by `scale`, the model's flat gradient."""
        grad = self.flat.grad

        def put(part: slice) -> None:
            grad[part] = total[part] * (1 / scale)

        if total is not grad or scale != 1:
            self.map(put, pieces(grad))

    def shares(self, micro_batches: int) -> int:
        """Into how many shares micro-batches are divided: one on a GPU, whose sums have no fixed order anyway."""
        return min(micro_batches, SHARES) if self.fixed_order else 1

    def expect_work(self, batch: Any) -> None:
        """Raise ValueError if some of them would have no micro-batch of a batch like this one."""
        micro_batches = len(batch.split(self.rows(batch)))
        if self.shares(micro_batches) < self.ranks.size:
            what = f"{self.ranks.size} ranks, but a batch has only {micro_batches} micro-batches"
            more = f" (and at most {SHARES} ranks can work at it)" if micro_batches > SHARES else ""
            how = "larger batches, a smaller --micro-batch, or more --micro-batches"
            raise ValueError(f"{what}{more}: use fewer ranks, {how}")

    def gradient_arrays(self, micro_batches: int) -> int:
        """How many gradient arrays there are as a rule: one for each replica, those of sums that wait, and one for what
        other ranks send, if there is no other room for it.
        """
        shares = math.ceil(self.shares(micro_batches) / self.ranks.size)
        each = math.ceil(shares / self.count)  # of a replica
        return self.count + (each - 1).bit_length() + (self.ranks.size > 1 and each == 1)


def add_gradient(
    model: Any, loss: Callable[[], tuple[Array, Any]], factor: float | Array, remembers: bool
) -> tuple[Array, Array | None]:
    """Compute a loss, and add factor · ∂loss/∂w to the model's gradient. Returns the loss, and what the model remembers
    if it is asked for.
    """
    mean, cache = loss()
    model.loss_backward(factor, cache)
    return mean, widen(model.remember(cache[0])) if remembers else None


def running_check(model: Any) -> Callable | None:
    """`model.check_batch`, or None if there is none, or if a derived class computes something else than it checks."""
    for kind in type(model).__mro__:
        if "check_batch" in vars(kind):
            return model.check_batch
        if vars(kind).keys() & {"loss", "logits", "forward"}:
            return None
    return None


def slices_of(flat: Array, count: int) -> list[slice]:
    """`count` slices of a flat array (P,), about equally long."""
    cuts = [i * flat.size // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(cuts)]

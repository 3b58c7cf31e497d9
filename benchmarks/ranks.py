"""Time and memory of a training step on several ranks, and of the communication in it.

    python benchmarks/ranks.py                                  # one process, whose replicas are threads
    mpiexec -n 2 python benchmarks/ranks.py [--shard]           # the same batch on two ranks
    mpiexec -n 2 --bind-to none python benchmarks/ranks.py --compare    # both in turn, on the same cores
    mpiexec -n 2 python benchmarks/ranks.py --messages          # communication by size of the model
    mpiexec -n 2 python benchmarks/ranks.py --memory --width 768 --depth 12 --vocabulary 25300 --context 64 --rows 8

The plain small model of examples/enwik8.py by default; `--width 256 --depth 12` is the tutorial's.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scratchformer import Key
from scratchformer.backend import Array, cores
from scratchformer.data import TextBatches
from scratchformer.dispatch import fast
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.parallel.memory import resident_bytes
from scratchformer.parallel.ranks import Ranks, allowed
from scratchformer.parallel.replicas import TreeSum, slices_of
from scratchformer.training import Replicas

SIZES = 1_000_000, 10_000_000, 50_000_000, 124_000_000  # parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in ("width", 128), ("depth", 4), ("context", 128), ("rows", 32), ("vocabulary", 256):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--precision", default="float32")
    for name in "shard", "compare", "messages", "memory":
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    with Ranks.find() as ranks:
        if args.messages:
            measure_messages(ranks)
        elif args.memory:
            measure_memory(ranks, args)
        elif args.compare:
            compare(ranks, args)
        else:
            steps = TimedSteps(ranks, args.replicas or (cores() if ranks.size == 1 else ranks.cores()), args)
            print(f"{steps.model.flat.data.size:,} parameters; {steps.replicas.describe(steps.batch)}")
            with steps.replicas:
                print(steps.described([steps.run() for _ in range(args.rounds + 1)][1:]))


class TimedSteps:
    """Training steps of a model, all on the same batch."""

    def __init__(self, ranks: Ranks, count: int, args: argparse.Namespace) -> None:
        heads = max(1, args.width // 32)
        self.ranks, self.spent = ranks, dict.fromkeys(("wait", "gather", "sum", "join"), 0.0)
        self.model = LanguageModel(args.vocabulary, args.width, heads, args.depth, args.context, key=Key(0))
        data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
        self.batch = TextBatches(data, args.rows, args.context, Key(1)).batch(0)
        self.adam = Adam(self.model.parameters(), 1e-4)
        self.replicas = Replicas(self.model, count, precision=args.precision, ranks=ranks)
        if args.shard and ranks.size > 1:
            self.replicas.shard(self.adam)
        gather = self.timed("gather", ranks.gather)
        ranks.gather = lambda value: (self.timed("wait", self.together)(), gather(value))[1]  # type: ignore
        for name in "sum", "join":
            setattr(ranks, name, self.timed(name, getattr(ranks, name)))

    def timed(self, name: str, method: Callable) -> Callable:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            self.spent[name] += time.perf_counter() - start
            return result

        return run

    def together(self) -> None:
        if self.ranks.size > 1:
            self.ranks.comm.Barrier()

    def run(self) -> dict[str, float]:
        """One step, as `train` does it. Returns its time, and of that the parts in which the ranks talk."""
        self.together()
        self.spent |= dict.fromkeys(self.spent, 0.0)
        start = time.perf_counter()
        self.replicas.gradients(self.batch, Key(2))
        how = (self.replicas.map, self.ranks.gather) if self.replicas.sharded else (self.replicas.map,)
        clip_by_global_norm(self.adam.gradients(), 1.0, *how)
        self.adam.step(self.replicas.map)
        self.replicas.join()
        self.ranks.gather([])  # which signals were received
        return {"step": time.perf_counter() - start, **self.spent}

    def described(self, times: list[dict[str, float]]) -> str:
        step, wait, gather, sums, join = (1e3 * statistics.median(t[name] for t in times) for name in times[0])
        talk = f"; waiting for the slower rank {wait:.1f} ms, sum {sums:.2f}, join {join:.2f}"
        talk += f", small messages {gather:.2f}"
        return f"a step: {step:.1f} ms" + talk * (self.ranks.size > 1)


def compare(ranks: Ranks, args: argparse.Namespace) -> None:
    """A step of rank 0 alone, with a thread for each rank, and one of all ranks, in turn: each slows down alike."""
    threads = TimedSteps(Ranks(), ranks.size, args)
    steps, pairs = TimedSteps(ranks, 1, args), []
    with threads.replicas if ranks.first else steps.replicas, steps.replicas:
        for _ in range(args.rounds + 1):
            alone = threads.run() if ranks.first else {"step": math.nan}
            waiting = ranks.comm.Ibarrier()
            while not waiting.Test():  # MPI's own waiting keeps a core busy
                time.sleep(1e-3)
            with pinned(ranks.rank):
                pairs.append((alone, steps.run()))
    if not ranks.first:
        return
    ratio = statistics.median(both["step"] / alone["step"] for alone, both in pairs[1:])
    print(f"{steps.model.flat.data.size:,} parameters; {steps.replicas.describe(steps.batch)}")
    for name, which, times in ("threads", threads, 0), ("ranks", steps, 1):
        print(f"{name}: {which.described([pair[times] for pair in pairs[1:]])}")
    print(f"ranks/threads: {ratio:.3f}")


@contextmanager
def pinned(number: int) -> Iterator[None]:
    """On one core, as mpiexec's --bind-to core."""
    before = sorted(allowed())
    os.sched_setaffinity(0, {before[number % len(before)]})
    yield
    os.sched_setaffinity(0, before)


def measure_messages(ranks: Ranks) -> None:
    """The time of messages, both ways at once, fitted by a + b k; and of the sum of gradients, by size of the model."""
    sizes = [4 ** (i + 3) for i in range(11)]
    array = np.ones((2, sizes[-1]), np.uint8)
    times = [median_time(ranks, lambda k=k: swap(ranks, array[:, :k])) for k in sizes]
    weighted = np.array([[1 / t, k / t] for k, t in zip(sizes, times, strict=True)])
    (a, b), *_ = np.linalg.lstsq(weighted, np.ones(len(sizes)), rcond=None)
    print(f"a message: {a * 1e6:.1f} µs + {b * 1e9:.3f} ns a byte")
    print(f"{'parameters':>12} {'sum':>9} {'join':>9} {'in half':>9}   ms")
    for P in SIZES:
        times = communication(ranks, P)
        print(f"{P:12,}", *(f"{1e3 * t:9.2f}" for t in times))


def communication(ranks: Ranks, P: int) -> list[float]:
    """The time of `sum` and of `join`, for P parameters in float32 and in half precision."""
    slices, grad, spare = slices_of(np.empty(P), ranks.size), np.ones(P, np.float32), [np.ones(P, np.float32)]

    def add() -> None:
        sums = TreeSum(ranks.size, spare)
        sums.add(ranks.rank, grad, copy=False)
        ranks.sum(sums, [[(0, r)] for r in range(ranks.size)], grad, slices)

    joins = [partial(ranks.join, array, slices) for array in (grad, grad.astype(np.float16))]
    return [median_time(ranks, function) for function in (add, *joins)]


def median_time(ranks: Ranks, function: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        ranks.comm.Barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return ranks.comm.bcast(statistics.median(times[1:]))


def swap(ranks: Ranks, arrays: Array) -> None:
    """Send the first array to the next rank, and receive the second from the one before."""
    to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    ranks.comm.Sendrecv(arrays[0], to, 0, arrays[1], source, 0)


def measure_memory(ranks: Ranks, args: argparse.Namespace) -> None:
    """The peak of each rank's resident memory in two steps, over what it was before there was a model."""
    with fast():  # it loads libraries
        base = resident_bytes()
    steps = TimedSteps(ranks, 1, args)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    with steps.replicas as replicas:
        for _ in range(2):
            steps.run()
        peak = ranks.gather(resident_bytes(peak=True) - base)
        P, R = steps.model.flat.data.size, ranks.size
        shares = replicas.shares(len(steps.batch.split(replicas.rows(steps.batch))))
    arrays = 1 + (math.ceil(shares / R) - 1).bit_length()  # of gradients
    parts = {"weights": 4 * P, "gradients": 4 * P * arrays, "Adam": 8 * P / R if args.shard else 8 * P}
    parts["received"] = 4 * P * (R - 1) / R if arrays == 1 else 0  # else they are put into a free gradient array
    listed = ", ".join(f"{name} {part / 1e6:,.0f}" for name, part in parts.items())
    print(f"{P:,} parameters, {R} rank(s), {shares} shares, in MB: {listed}")
    total, others = sum(parts.values()), [p - sum(parts.values()) for p in peak]
    print(f"together {total / 1e6:,.0f} MB; peak of each rank " + ", ".join(f"{p / 1e6:,.0f}" for p in peak))
    print("the rest (activations, buffers of MPI): " + ", ".join(f"{p / 1e6:,.0f}" for p in others))


if __name__ == "__main__":
    main()

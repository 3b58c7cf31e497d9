"""Time and memory of a training step on several ranks, and of the communication in it.

    python benchmarks/ranks.py                                  # one process, whose replicas are threads
    mpiexec -n 2 python benchmarks/ranks.py [--shard]           # the same batch on two ranks
    mpiexec -n 2 --bind-to none python benchmarks/ranks.py --compare    # both in turn, on the same cores
    mpiexec -n 2 python benchmarks/ranks.py --messages          # communication by size of the model, and a and b of it
    mpiexec -n 2 python benchmarks/ranks.py --memory --width 768 --depth 12 --vocabulary 25300 --context 64 --rows 8
    python benchmarks/ranks.py --model --plot docs/img/ranks.png        # what overlap would save, up to 1,000 ranks

The plain small model of examples/enwik8.py by default; `--width 256 --depth 12` is the tutorial's.

The model of --model. Let P be the number of parameters, in float32, and R that of ranks. A message of k bytes takes
a + b k seconds. In a step a rank sends its partial sums in R − 1 messages of 4 P/R bytes, one after another, and then
the sum, or the parameters, in as many:

    S = (R − 1)(a + 4 b P/R)

Training on T tokens takes 6 P T floating-point operations: for each token and parameter, 2 in forward and 4 in backward
(Kaplan et al., "Scaling laws for neural language models", 2020, section 2.1). If a rank does F of them a second, it
computes for C seconds. Without overlap a step takes C + 2 S:

    C = 6 P T/(R F)

With overlap the partial sums leave in n buckets, each as soon as it is final. Only the backward of a rank's last
micro-batch makes gradients final, since those of all its micro-batches are added in one array. With m tokens in a
micro-batch it takes W, and the n buckets are ready at W/n, 2 W/n, ..., W. Sending one takes U. Either each is gone
before the next is ready, and only the last one is sent after backward; or they queue, and all are gone n U after the
first was ready. So the partial sums take E of time after backward:

    W = 4 P m/F        U = (R − 1)(a + 4 b P/(R n))        E = max(U, W/n + n U − W)

The second half of the communication cannot overlap with backward: clipping needs the norm of the whole sum. A step
takes C + E + S, so overlap saves S − E, and never more than (1 − 1/n) times what the bytes of the partial sums take.
What follows from this:

- Where bytes matter and not messages, S and C are both proportional to P. Then the saving, as a part of the step,
  depends on the tokens of a rank, T/R, and not on the size of the model.
- Messages take longer than their bytes below P = a R/(4 b) parameters. There a step is slow with and without overlap;
  sums over groups of ranks, and then over groups of groups, would need fewer messages.
- Sending must not need the cores that compute. Copying through shared memory does, so two ranks on two cores have
  nothing to gain; --messages measures it.

Up to 8 ranks can work at a batch today, since its gradient is a sum of 8 shares (`replicas.SHARES`). For 1,000 there
would be 1,024 shares, and as many micro-batches. That changes the order of additions, so the bits of a run with more
than 8 micro-batches; and a single process would need log2(1024) = 10 gradient arrays more than its own, instead of 3.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

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
    for name in "shard", "compare", "messages", "memory", "model":
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.model:
        return print_model(args.plot)
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
    if ranks.size == 2:
        measure_overlap(ranks, array)
    print(f"{'parameters':>12} {'sum':>9} {'join':>9} {'in half':>9} {'model 2 S':>9}   ms")
    for P in SIZES:
        times = *communication(ranks, P), 2 * Network(a, b).phase(P, ranks.size)
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


def measure_overlap(ranks: Ranks, array: Array) -> None:
    """How much of sending is hidden if a second thread does it while the first computes, without a core of its own."""
    x, count = np.ones((512, 512), np.float32), 1

    def compute() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        sender = threading.Thread(target=swap, args=(ranks, array))
        sender.start()
        compute()
        sender.join()

    with threadpool_limits(1, "blas"):
        talk = median_time(ranks, lambda: swap(ranks, array))
        count = max(1, round(talk / median_time(ranks, compute)))  # so that both take about as long
        work, together = median_time(ranks, compute), median_time(ranks, both)
    hidden = (work + talk - together) / min(work, talk)
    times = f"{count} products {1e3 * work:.1f} ms, sending {1e3 * talk:.1f} ms, both at once {1e3 * together:.1f} ms"
    print(f"{times}: {hidden:.0%} hidden")


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


class Network(NamedTuple):
    """What a message of k bytes takes, a + b k, in seconds."""

    a: float
    b: float

    def phase(self, P: float, R: int, buckets: int = 1) -> float:
        """S with one bucket, and U with several."""
        return (R - 1) * (self.a + 4 * self.b * P / (R * buckets))


class Case(NamedTuple):
    """A training step: see the docstring of this module."""

    network: Network
    P: float
    R: int
    T: float = 2**19  # tokens of a batch
    m: float = 2**14  # tokens of a micro-batch, if a rank has as many
    F: float = 1e12  # operations a second: 16 cores with 63 · 10⁹ each, which the small model reached on ours

    @property
    def plain(self) -> float:
        return 6 * self.P * self.T / (self.R * self.F) + 2 * self.network.phase(self.P, self.R)

    @property
    def saved(self) -> float:
        """The part of a step that overlap saves."""
        W = 4 * self.P * min(self.m, self.T / self.R) / self.F

        def after(n: int) -> float:
            U = self.network.phase(self.P, self.R, n)
            return max(U, W / n + n * U - W)

        return max(0.0, self.network.phase(self.P, self.R) - min(map(after, BUCKETS))) / self.plain


BUCKETS = [2**i for i in range(8)]  # the best n is taken; one bucket saves nothing
# Assumptions: a message costs what it does over TCP within our machine, and the network gives its nominal bandwidth.
NETWORKS = {f"{g} Gbit/s": Network(14e-6, 8e-9 / g) for g in (1, 10, 100)}


def print_model(plot: Path | None) -> None:
    """Tables of `Case`, by network, ranks and parameters."""
    for T, what in (2**19, "524,288 tokens a batch"), (None, "16,384 tokens a rank"):
        print(f"\n{what}: seconds of a step, and what overlap saves of it")
        print(f"{'':>12} {'ranks':>6}" + "".join(f"{P:>20,.0f}" for P in (1e6, 1e7, 1.24e8, 1.5e9)))
        for name, network in NETWORKS.items():
            for R in 2, 8, 64, 1000:
                cases = [Case(network, P, R, T or 2**14 * R) for P in (1e6, 1e7, 1.24e8, 1.5e9)]
                print(f"{name:>12} {R:6}" + "".join(f"{c.plain:13.3f} {c.saved:6.1%}" for c in cases))
    print("\nOverlap saves a twentieth of a step from how many parameters, with 524,288 tokens a batch:")
    for name, network in NETWORKS.items():
        print(f"{name:>12}  " + ", ".join(f"{R} ranks: {threshold(network, R)}" for R in (2, 8, 64, 256, 1000)))
    if plot is not None:
        draw(plot)


def threshold(network: Network, R: int) -> str:
    sizes = np.logspace(5, 12, 200)
    worthwhile = [P for P in sizes if Case(network, P, R).saved >= 0.05]
    return f"{worthwhile[0]:,.0f}" if worthwhile[:1] > [sizes[0]] else "any" if worthwhile else "none"


def draw(path: Path) -> None:
    """Left, the speed of R ranks as a multiple of one's, with and without overlap. Right, the saving by size."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    ranks = [round(R) for R in np.logspace(0, 3, 61)]
    for colour, (name, network) in zip(("C3", "C0", "C2"), NETWORKS.items(), strict=True):
        cases = [Case(network, 1.24e8, R) for R in ranks]
        one = cases[0].plain
        left.plot(ranks, [one / (c.plain * (1 - c.saved)) for c in cases], colour, label=f"{name}, with overlap")
        left.plot(ranks, [one / c.plain for c in cases], colour, linestyle=":", label=f"{name}, without")
        sizes = np.logspace(5.5, 10, 100)
        for R, style in (8, "--"), (64, "-"), (1000, ":"):
            saved = [100 * Case(network, P, R).saved for P in sizes]
            right.plot(sizes, saved, colour, linestyle=style, label=f"{name}, {R:,} ranks")
    left.plot(ranks, ranks, "0.7", linewidth=1, label="no communication")
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed, as a multiple of one rank's", ylim=(0.8, 1000))
    left.set_title("124 million parameters, 524,288 tokens a batch", fontsize=10)
    right.set(xscale="log", xlabel="parameters", ylabel="what overlap saves of a step, in %")
    right.set_title("524,288 tokens a batch", fontsize=10)
    for axes in left, right:
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

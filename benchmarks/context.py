"""How time and memory of attention grow with the context: full, causal, local and strided, 256 to 8,192 positions.

    pip install -e '.[plot]' && python benchmarks/context.py [--plot docs/img/context.png]

One sequence of width 256 in 8 heads, float32, forward and backward of `ops.attention` on one thread, as in a replica;
median of several runs. Memory is the most that the two allocate, not counting their arguments. The exponent of n is
fitted from 1,024 on. The reference, which keeps (T, T) probabilities, is measured up to 2,048.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from scratchformer import Key, ops, reference_only
from scratchformer.parallel.memory import keep_freed_memory

HEADS, WIDTH = 8, 256
CONTEXTS = [256 * 2**i for i in range(6)]
PATTERNS: dict[str, Callable[[int], ops.Pattern]] = {
    "full": lambda n: ops.Full(),
    "causal": lambda n: ops.Causal(),
    "local(128)": lambda n: ops.Local(128),
    "strided(√n)": lambda n: ops.Strided(math.isqrt(n)),
    "local(√n) or strided(√n)": lambda n: ops.Local(math.isqrt(n)) | ops.Strided(math.isqrt(n)),
}


class Cost(NamedTuple):
    seconds: float
    bytes: int


def measure(n: int, pattern: ops.Pattern) -> Cost:
    draw = Key(n).generator()
    q, k, v, dy = (draw.standard_normal((1, n, HEADS, WIDTH // HEADS), np.float32).swapaxes(1, 2) for _ in range(4))

    def run() -> float:
        start = time.perf_counter()
        _, cache = ops.attention(q, k, v, pattern)
        ops.attention_backward(dy, cache)
        return time.perf_counter() - start

    first = run()
    seconds = statistics.median(run() for _ in range(max(3, min(20, int(1 / first)))))
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(seconds, peak)


def exponent(values: dict[int, float]) -> float:
    """The exponent of n, by least squares on the logarithms."""
    large = {n: value for n, value in values.items() if n >= 1024}
    return float(np.polyfit(np.log(list(large)), np.log(list(large.values())), 1)[0])


def plot(measured: dict[str, dict[int, Cost]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, rows in measured.items():
        style = "--" if name.startswith("reference") else "-"
        left.loglog(list(rows), [1e3 * m.seconds for m in rows.values()], "o" + style, label=name)
        right.loglog(list(rows), [m.bytes / 1e6 for m in rows.values()], "o" + style, label=name)
    for axes, what in ((left, "milliseconds"), (right, "megabytes")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(CONTEXTS, [f"{n:,}" for n in CONTEXTS])
        axes.set_xlabel("context")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
    left.set_title("time of forward and backward")
    right.set_title("memory, not counting the arguments")
    left.legend()
    figure.savefig(path, dpi=110)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="PATH", help="draw the figures")
    args = parser.parse_args()
    keep_freed_memory()
    measured: dict[str, dict[int, Cost]] = {}
    with threadpool_limits(1, "blas"):
        for name, make in PATTERNS.items():
            measured[name] = {n: measure(n, make(n)) for n in CONTEXTS}
        with reference_only():
            measured["reference, full"] = {n: measure(n, ops.Full()) for n in CONTEXTS if n <= 2048}
    print(
        f"{'milliseconds, MB':<26}" + "".join(f"{n:>18,}" for n in CONTEXTS) + f"{'time ~ n^':>12}{'memory ~ n^':>12}"
    )
    for name, rows in measured.items():
        cells = "".join(f"{1e3 * m.seconds:>9.1f} {m.bytes / 1e6:>5.0f} MB" for m in rows.values())
        growth = [exponent({n: m[i] for n, m in rows.items()}) for i in (0, 1)]
        print(f"{name:<26}{cells:<{18 * len(CONTEXTS)}}{growth[0]:>12.2f}{growth[1]:>12.2f}")
    full, local = (measured[name][CONTEXTS[-1]].seconds for name in ("full", "local(128)"))
    print(f"at {CONTEXTS[-1]:,}: full takes {full / local:.1f} times as long as local(128)")
    if args.plot:
        plot(measured, args.plot)


if __name__ == "__main__":
    main()

"""Time and memory of a training step, by number of replicas and rows of a micro-batch, each in its own process.

    pip install -e '.[plot]' && python benchmarks/replicas.py enwik8 [--plot docs/img/replicas.png]

Each replica uses one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from setups import add_model_options, make, our_step

from scratchformer.backend import cores
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Replicas


def run_one(args: argparse.Namespace) -> None:
    """Print seconds of a step and bytes, as JSON."""
    model, batches = make(args)
    seconds = []
    with Replicas(model, args.replicas, args.micro_batch) as replicas:
        step = our_step(model, replicas)
        for i in range(args.rounds + 1):
            start = time.perf_counter()
            step(batches.batch(i))
            seconds.append(time.perf_counter() - start)
    print(json.dumps([statistics.median(seconds[1:]), resident_bytes(peak=True)]))


def plot(measured: dict[int, dict[int, list[float]]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for count, rows in measured.items():
        label = f"{count} replica{'s' if count > 1 else ''}"
        left.plot(list(rows), [seconds for seconds, _ in rows.values()], "o-", label=label)
        right.plot(list(rows), [size / 1e6 for _, size in rows.values()], "o-", label=label)
    for axes, what in ((left, "seconds a step"), (right, "peak memory, MB")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(rows), list(rows))
        axes.set_xlabel("rows of a micro-batch")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=110)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", metavar="PATH", help="draw the figures")
    parser.add_argument("--replicas", type=int, help="only this one, as JSON; with --micro-batch")
    parser.add_argument("--micro-batch", type=int)
    args = parser.parse_args()
    if args.replicas:
        return run_one(args)
    measured: dict[int, dict[int, list[float]]] = {}
    for count in sorted({1, 2, cores()}):
        measured[count] = {}
        for rows in (1, 2, 4, 8):
            command = [sys.executable, *sys.argv, "--replicas", str(count), "--micro-batch", str(rows)]
            output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
            seconds, size = measured[count][rows] = json.loads(output)
            print(f"{count} replica(s), {rows:>2} rows: {seconds:.2f} s, {size / 1e6:.0f} MB", flush=True)
    if args.plot:
        plot(measured, args.plot)
    return None


if __name__ == "__main__":
    main()

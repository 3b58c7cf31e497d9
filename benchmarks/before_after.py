"""Compare a training step of two checkouts of this project: is a change slower? Does it take more memory?

    git worktree add ../before HEAD~1
    python benchmarks/before_after.py ../before enwik8      # or imdb; the models of training_step.py

Each runs in a process of its own. They alternate step by step, on the same weights and batches. Prints the median time
and the peak memory of each, and the median and the quartiles of the ratio after/before over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from setups import OURS
from training_step import Worker

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the project as it was")
    parser.add_argument("model", choices=("enwik8", "imdb"))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    workers = {}
    for name, tree in (("before", args.before.resolve()), ("after", HERE)):
        program = tree / "benchmarks" / "training_step.py"
        if not program.is_file():
            parser.error(f"{tree} is not a checkout of this project")
        command = [sys.executable, str(program), args.model, "--worker", OURS]
        workers[name] = Worker(command, os.environ | {"PYTHONPATH": str(tree)})
    times: dict[str, list[float]] = {name: [] for name in workers}
    peaks, losses = {}, {}
    for number in range(args.rounds + 1):
        for name in sorted(workers, reverse=bool(number % 2)):  # so that neither always goes first
            losses[name], seconds, peaks[name] = workers[name].step(number)
            if number:  # the first one warms up
                times[name].append(seconds)
        if abs(losses["after"] / losses["before"] - 1) > 1e-3:
            raise SystemExit(f"round {number}: the losses differ: {losses}")
    for worker in workers.values():
        worker.stop()
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    for name, seconds in times.items():
        print(f"{name:<8}{statistics.median(seconds):>8.3f} s{peaks[name] / 1e6:>10.0f} MB")
    print(f"after/before: time {middle:.3f} ({low:.3f} to {high:.3f}), memory {peaks['after'] / peaks['before']:.3f}")


if __name__ == "__main__":
    main()

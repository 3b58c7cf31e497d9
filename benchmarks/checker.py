"""Time the gradient checker on a language model of 12 blocks, and compare it with another checkout of this project.

    git worktree add ../before HEAD~1
    python benchmarks/checker.py                  # this checkout alone
    python benchmarks/checker.py ../before        # both, in turns

A check is `check_layer` of some elements of each parameter and of random directions. Each checkout runs in a process of
its own, on one thread. Prints the median time of each, and the median and the quartiles of the ratio after/before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def work(width: int, elements: int) -> None:
    """Check the model once for each line that is read, and print the number of tensors and the seconds."""
    import json

    import numpy as np

    from scratchformer import Key
    from scratchformer.models import LanguageModel
    from scratchformer.testing import check_layer

    model = LanguageModel(11, d_model=width, heads=2, depth=12, context=6, key=Key(0))
    ids = np.random.default_rng(0).integers(0, 11, (2, 5))
    for line in sys.stdin:
        start = time.perf_counter()
        report = check_layer(model, ids, max_elements=elements, directions=1, together=8, seed=int(line))
        print(json.dumps([len(report), time.perf_counter() - start, 0]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the project as it was")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--elements", type=int, default=1, help="elements of each parameter (default: 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help="(for its own use) run one of the checkouts")
    args = parser.parse_args()
    if args.worker:
        return work(args.width, args.elements)

    from setups import Process

    trees = {"before": args.before.resolve()} if args.before else {}
    workers = {}
    for name, tree in (trees | {"after": HERE.parents[1]}).items():
        if not (tree / "scratchformer" / "testing").is_dir():
            parser.error(f"{tree} is not a checkout of this project")
        options = ["--worker", "--width", str(args.width), "--elements", str(args.elements)]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        workers[name] = Process([sys.executable, str(HERE), *options], environment=environment)
    times: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(args.rounds + 1):
        for name in sorted(workers, reverse=bool(number % 2)):  # so that neither always goes first
            tensors, seconds, _ = workers[name].ask(number)
            if number:  # the first one warms up
                times[name].append(seconds)
    for worker in workers.values():
        worker.stop()
    for name, seconds in times.items():
        print(f"{name:<8}{statistics.median(seconds):>8.2f} s for {tensors} tensors")
    if args.before:
        ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"after/before: {middle:.3f} ({low:.3f} to {high:.3f})")
    return None


if __name__ == "__main__":
    main()

"""Compare two checkouts of this project: is a change slower? Does it take more memory?

    git worktree add ../before HEAD~1
    python benchmarks/before_after.py ../before enwik8 imdb [--bfloat16]    # a training step of each model
    python benchmarks/before_after.py ../before --data aclImdb_v1.tar.gz    # all, loading included

enwik8, imdb: a step of the models of training_step.py. import: a process that imports the package. load-imdb: reading
and encoding the reviews. load-gpt2: loading random weights of the size of GPT-2 small, which are generated first. Each
checkout runs in a process of its own. They take turns, on the same weights and data, and must agree on the result.
Prints the median time and the peak memory of each, and the median and the quartiles of the ratio after/before over the
rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from setups import OURS, OURS_BFLOAT16, Process

HERE = Path(__file__).resolve().parents[1]
STEPS, LOADS = ("enwik8", "imdb"), ("import", "load-imdb", "load-gpt2")


def compare(work: str, before: Path, rounds: int, data: Path | None, bfloat16: bool) -> None:
    """Time one kind of work in both checkouts, which take turns, and print the result."""
    workers, ours = {}, OURS_BFLOAT16 if bfloat16 else OURS
    for name, tree in (("before", before), ("after", HERE)):
        if work in STEPS:
            command = [str(tree / "benchmarks" / "training_step.py"), work, "--worker", ours]
        else:
            script = tree / "benchmarks" / Path(__file__).name  # which knows the modules of its checkout
            command = [str(script), str(tree), work, "--worker", *([] if data is None else ["--data", str(data)])]
        environment = os.environ | {"PYTHONPATH": str(tree), "TQDM_DISABLE": "1"}
        workers[name] = Process([sys.executable, *command], environment=environment)
    times: dict[str, list[float]] = {name: [] for name in workers}
    peaks, results = {}, {}
    for number in range(rounds + 1):
        for name in sorted(workers, reverse=bool(number % 2)):  # so that neither always goes first
            results[name], seconds, peaks[name] = workers[name].ask(number)
            if number:  # the first one warms up
                times[name].append(seconds)
        if abs(results["after"] / results["before"] - 1) > 1e-3:
            raise SystemExit(f"{work}, round {number}: the results differ: {results}")
    for worker in workers.values():
        worker.stop()
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(work)
    for name, seconds in times.items():
        print(f"  {name:<8}{statistics.median(seconds):>8.3f} s{peaks[name] / 1e6:>10.0f} MB")
    ratio = peaks["after"] / peaks["before"]
    print(f"  after/before: time {middle:.3f} ({low:.3f} to {high:.3f}), memory {ratio:.3f}", flush=True)


def serve(work: str, data: str | None) -> None:
    """What a worker does: import or load once for each line that it reads."""
    from scratchformer.data import load_imdb
    from scratchformer.models import GPT2
    from scratchformer.parallel.memory import resident_bytes

    def imported() -> float:
        subprocess.run([sys.executable, "-c", "import scratchformer"], check=True)
        return 1.0

    def imdb() -> float:
        return float(sum(int(ids.sum()) for ids in load_imdb(data).train.ids))

    def gpt2() -> float:
        return float(np.abs(GPT2.from_pretrained(data).flat.data).mean())

    load: Callable[[], float] = {"import": imported, "load-imdb": imdb, "load-gpt2": gpt2}[work]
    for _ in sys.stdin:
        start = time.perf_counter()
        result = load()
        print(json.dumps([result, time.perf_counter() - start, resident_bytes(peak=True)]), flush=True)
        gc.collect()  # models contain reference cycles


def save_gpt2(folder: Path) -> None:
    """Save random weights of the size of GPT-2 small, in the format in which GPT-2 is published."""
    from safetensors.numpy import save_file

    from scratchformer.models import GPT2

    sizes = {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")
    tensors: dict[str, list[np.ndarray]] = {}
    model = GPT2(*sizes.values())
    for source, array in zip(model.tensors().values(), model.state_dict().values(), strict=True):
        tensors.setdefault(source.name, []).append(array)  # query, key and value in their order
    save_file({name: np.concatenate(a, axis=-1) for name, a in tensors.items()}, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the project as it was")
    parser.add_argument("work", nargs="*", help=f"any of {', '.join((*STEPS, *LOADS))} (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bfloat16", action="store_true", help="take steps in bfloat16 (no effect on loading)")
    parser.add_argument("--data", help="the archive or folder for load-imdb (default: the download)")
    parser.add_argument("--worker", action="store_true", help="for internal use: run as one of the two processes")
    args = parser.parse_args()
    if unknown := {*args.work} - {*STEPS, *LOADS}:
        parser.error(f"expected {', '.join((*STEPS, *LOADS))}, got {', '.join(sorted(unknown))}")
    if args.worker:
        return serve(args.work[0], args.data)
    before = args.before.resolve()
    if not (before / "benchmarks" / "training_step.py").is_file():
        parser.error(f"{before} is not a checkout of this project")
    with tempfile.TemporaryDirectory() as folder:
        if not args.work or "load-gpt2" in args.work:
            save_gpt2(Path(folder))
        data = {"load-imdb": args.data, "load-gpt2": folder}
        for work in args.work or (*STEPS, *LOADS):
            compare(work, before, args.rounds, data.get(work), args.bfloat16)
    return None


if __name__ == "__main__":
    main()

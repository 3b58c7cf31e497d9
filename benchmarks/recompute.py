"""Cost and savings of --recompute: the tutorial's text generator with a context of 1,024, steps with and without it.

    python benchmarks/recompute.py [--batch 4] [--rounds 5] [--precision bfloat16]

12 blocks, width 256, 8 heads, post-norm. Steps with and without recomputing alternate in one process, with one replica
for each core; the time is the median, and their gradients must be equal bit for bit. The memory is that of one
micro-batch, by tracemalloc: what forward keeps for backward, and the most that both have at once, temporary arrays
included. It does not count weights and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
from setups import our_step

from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel
from scratchformer.nn import recompute_blocks
from scratchformer.training import Replicas
from scratchformer.training.estimate import estimate

WAYS = {"plain": False, "recompute": True}


class StepMemory(NamedTuple):
    kept: int  # by forward, for backward
    peak: int
    estimated: int  # of the peak, by `estimate`


def memory(replicas: Replicas, batch: Any) -> StepMemory:
    model = replicas.models[0]
    micro = batch.split(replicas.rows(batch))[0]
    estimated = estimate(replicas, batch)
    tracemalloc.start()
    start, _ = tracemalloc.get_traced_memory()
    _, cache = model.loss(*micro, key=Key(3))
    kept, _ = tracemalloc.get_traced_memory()
    model.loss_backward(1.0, cache)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return StepMemory(kept - start, peak - start, estimated.activations + estimated.transient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("context", 1024), ("batch", 4), ("rounds", 5), ("replicas", None)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="float32")
    args = parser.parse_args()
    model = LanguageModel(256, d_model=256, heads=8, depth=12, context=args.context, key=Key(0))
    data = Key(1).generator().integers(0, 256, 1_000_000, dtype=np.uint8)
    batches = TextBatches(data, args.batch, args.context, Key(2))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with Replicas(model, args.replicas, precision=args.precision) as replicas:
        step, memories_by_name = our_step(model, replicas), {}

        def choose(name: str) -> None:
            for each in (model, *replicas.models):
                recompute_blocks(each, WAYS[name])

        for name in WAYS:
            choose(name)
            memories_by_name[name] = memory(replicas, batches.batch(0))
        print(replicas.describe(batches.batch(0)))
        for i in range(args.rounds + 1):
            weights, gradients = model.flat.data.copy(), {}
            for name in WAYS:
                model.flat.data[...] = weights
                choose(name)
                start = time.perf_counter()
                step(batches.batch(i))
                seconds[name].append(time.perf_counter() - start)
                gradients[name] = model.flat.grad.copy()
            if not np.array_equal(*gradients.values()):
                raise SystemExit(f"step {i}: the gradients differ")
    print(f"{'':<12}{'s a step':>10}{'kept':>12}{'at most':>12}{'estimated':>12}")
    for name, memories in memories_by_name.items():
        sizes = "".join(f"{size / 1e6:>9.1f} MB" for size in memories)
        print(f"{name:<12}{statistics.median(seconds[name][1:]):>10.2f}{sizes}")
    ratio = statistics.median(b / a for a, b in zip(*(times[1:] for times in seconds.values()), strict=True))
    kept, peak, _ = (b / a for a, b in zip(*memories_by_name.values(), strict=True))
    print(f"recompute: {ratio:.2f} times the time, {kept:.3f} of what is kept, {peak:.3f} of the most; equal gradients")


if __name__ == "__main__":
    main()

"""The time of a training step by operation, on one replica with one BLAS thread.

    python benchmarks/profile_step.py enwik8|imdb [--reference | --precision bfloat16]

Every operation is timed where a layer calls it, in seconds of the processor, so that other processes count little. The
rest is sums of gradients, and Python. With --reference the plain operations run instead of their twins.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext

from setups import add_model_options, counted_work, make, matrix_rate
from threadpoolctl import threadpool_limits

from scratchformer import Key, ops, reference_only
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training import Replicas

seconds: dict[str, float] = defaultdict(float)


def timed(name: str, function: Callable) -> Callable:
    """`function`, adding its time to `seconds[name]`, without the time of timed functions that it calls."""

    def run(*args, **kwargs):
        before, start = sum(seconds.values()), time.thread_time()
        result = function(*args, **kwargs)
        inner = sum(seconds.values()) - before
        seconds[name] += time.thread_time() - start - inner
        return result

    vars(run).update(vars(function))  # its twins
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--reference", action="store_true", help="the plain operations")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--micro-batch", type=int, help="rows of a micro-batch")
    args = parser.parse_args()
    for name in ops.__all__:
        if hasattr(getattr(ops, name), "reference"):
            setattr(ops, name, timed(name, getattr(ops, name)))
    model, batches = make(args)
    adam, batch = Adam(model.parameters(), 1e-4), batches.batch(0)
    plain = reference_only() if args.reference else nullcontext()
    with Replicas(model, 1, args.micro_batch, args.precision) as replicas, threadpool_limits(1, "blas"), plain:
        rate = matrix_rate()
        replicas.gradients(batch, Key(0))
        seconds.clear()
        start = time.thread_time()
        replicas.gradients(batch, Key(0))
        rest = time.thread_time() - start - sum(seconds.values())
        timed("clipping", clip_by_global_norm)(model.flat.grad, 1.0)
        timed("Adam", adam.step)()
    seconds["sums of gradients, Python"] = rest
    total = sum(seconds.values())
    for name, value in sorted(seconds.items(), key=lambda row: -row[1]):
        print(f"{name:<42}{1e3 * value:>9.1f} ms{value / total:>8.1%}")
    work = counted_work(model, batch)
    print(f"{'total':<42}{1e3 * total:>9.1f} ms")
    print(f"{work / 1e9:.0f} GFLOP counted, {rate / 1e9:.0f} GFLOP/s a thread: {work / total / rate:.0%} of the rate")


if __name__ == "__main__":
    main()

"""Time a training step of the tutorial's models: scratchformer against PyTorch, on the same weights and batches.

    python benchmarks/training_step.py enwik8       # 12 blocks, width 256, context 256, batch 32
    python benchmarks/training_step.py imdb         # 6 blocks, width 128, 512 words, vocabulary 50,000, batch 32
    python benchmarks/training_step.py imdb --data aclImdb_v1.tar.gz --rounds 40      # real reviews, of similar length

A step is forward, backward, clipping and Adam, in float32 on all cores; with --bfloat16 in mixed precision too. Each
competitor runs in a process of its own, and they take turns, step by step. Before that, losses and gradients are
compared in float64. Prints medians, their ratios, the share of the machine's own matrix-product rate, and the peak
memory of each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from setups import (
    BFLOAT16,
    OURS,
    OURS_BFLOAT16,
    TUNED,
    TUTORIAL,
    add_model_options,
    counted_work,
    make,
    matrix_rate,
    our_step,
    torch_step,
)

from scratchformer.nn import Layer
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Replicas


class Worker:
    """A process that runs `command`, this program as one of the competitors, and takes a step when told to."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)

    def step(self, number: int) -> tuple[float, float, int]:
        """The loss of step `number`, its seconds, and the process's peak memory in bytes."""
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def work(args: argparse.Namespace) -> None:
    """What a worker does: a step for each number that it reads."""
    model, batches = make(args)
    ours = args.worker in (OURS, OURS_BFLOAT16)
    replicas = Replicas(model, precision="bfloat16" if args.worker == OURS_BFLOAT16 else "float32")
    if ours:
        step = our_step(model, replicas)
    else:
        _, step = torch_step(model, args.worker)
        del model, replicas  # PyTorch has a copy
    for line in sys.stdin:
        batch, start = batches.batch(int(line)), time.perf_counter()
        if ours:
            with replicas:
                loss = step(batch)
        else:
            loss = step(batch)
        print(json.dumps([loss, time.perf_counter() - start, resident_bytes(peak=True)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each; with --data, batches of an epoch")
    parser.add_argument("--bfloat16", action="store_true", help="also both in bfloat16, PyTorch under autocast")
    parser.add_argument("--worker", metavar="NAME", help="(for its own use) be one of them")
    args = parser.parse_args()
    if args.worker:
        return work(args)

    model, batches = make(args)
    names = [OURS, TUTORIAL, TUNED, *([OURS_BFLOAT16, BFLOAT16] if args.bfloat16 else [])]
    for name in (TUTORIAL, TUNED):
        compare(model, batches.batch(0).split(2)[0], name)
    rate = matrix_rate()
    workers = {name: Worker([sys.executable, *sys.argv, "--worker", name]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    for number in range(args.rounds + 1):
        losses = {}
        for name, worker in workers.items():
            losses[name], seconds, peaks[name] = worker.step(number)
            if number:  # the first one warms up
                times[name].append(seconds)
        worst = max(abs(losses[name] / losses[OURS] - 1) for name in (OURS, TUTORIAL, TUNED))
        if worst > 1e-3 or any(abs(losses[name] / losses[OURS] - 1) > 0.05 for name in names):
            raise SystemExit(f"round {number}: the losses differ: {losses}")
        seconds = (f"{t[-1]:.2f} s" for t in times.values() if t)
        print(f"round {number}: losses agree to {worst:.1e}", *seconds, flush=True)
    for worker in workers.values():
        worker.stop()

    counted = [counted_work(model, batches.batch(number)) for number in range(1, args.rounds + 1)]
    print(f"\n{Replicas(model).describe(batches.batch(0))}")
    print(f"counted work {statistics.mean(counted) / 1e9:.0f} GFLOP a step; matrix products {rate / 1e9:.0f} GFLOP/s")
    what = "total" if args.data else "median"  # batches of different lengths have no median
    middle = {name: sum(t) if args.data else statistics.median(t) for name, t in times.items()}
    total = sum(counted) if args.data else statistics.median(counted)
    print(f"{'':<30}{what:>10}{'ours/theirs':>13}{'of the rate':>13}{'peak memory':>13}{'ours/theirs':>13}")
    for name, seconds in middle.items():
        ours = OURS_BFLOAT16 if name == BFLOAT16 else OURS  # the rate is that of float32
        ratio, memory = f"{middle[ours] / seconds:.3f}", f"{peaks[ours] / peaks[name]:.3f}"
        share = "" if name in (BFLOAT16, OURS_BFLOAT16) else f"{total / seconds / rate:.0%}"
        print(f"{name:<30}{seconds:>8.2f} s{ratio:>13}{share:>13}{peaks[name] / 1e6:>10.0f} MB{memory:>13}")
    if args.data:
        print(f"an epoch has {len(batches)} batches; timed: {args.rounds}, in the epoch's order")
    return None


def compare(model: Layer, batch: Any, name: str) -> None:
    """Print how far loss and gradients of `name` differ from ours in float64, where rounding hides nothing.

    The difference of the gradients is ‖ours − theirs‖/‖theirs‖ of the worst tensor.
    """
    import copy

    import torch
    from torch_model import torch_name

    double = copy.deepcopy(model).to(dtype=np.float64)
    peer, _ = torch_step(double, name)
    loss, cache = double.loss(*batch)
    double.loss_backward(1.0, cache)
    peer_loss = peer.loss(*(torch.from_numpy(a).long() for a in batch))
    peer_loss.backward()
    theirs, worst = dict(peer.named_parameters()), (0.0, "")
    for ours, p in double.named_parameters().items():
        grad = theirs[torch_name(ours)].grad.numpy()
        grad = grad.T if grad.ndim == 2 and ours.endswith(".w") else grad
        worst = max(worst, (float(np.linalg.norm(p.grad - grad) / np.linalg.norm(grad)), ours))
    loss_error = abs(float(loss) / peer_loss.item() - 1)
    if loss_error > 1e-12 or worst[0] > 1e-10:
        raise SystemExit(f"{name}: loss or gradients differ in float64, by {loss_error:.0e} and {worst}")
    print(f"{name}: in float64 the loss agrees to {loss_error:.0e}, the gradients to {worst[0]:.0e} ({worst[1]})")


if __name__ == "__main__":
    main()

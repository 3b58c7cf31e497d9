"""Time a training step of the tutorial's models, scratchformer and PyTorch in turns, on the same weights and batches.

    python benchmarks/training_step.py enwik8       # 12 blocks, width 256, context 256, batch 32
    python benchmarks/training_step.py imdb         # 6 blocks, width 128, 512 words, vocabulary 50,000, batch 32
    python benchmarks/training_step.py imdb --data aclImdb_v1.tar.gz --rounds 40      # real reviews, of like length

A step is forward, backward, clipping and Adam, in float32 on all cores. Before timing, losses and gradients of all are
compared. Prints medians, their ratios, and the share of the machine's own matrix-product rate; then the peak memory of
each, in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from setups import (
    BFLOAT16,
    OURS,
    TUNED,
    TUTORIAL,
    add_model_options,
    counted_work,
    make,
    matrix_rate,
    our_step,
    torch_step,
)
from threadpoolctl import threadpool_limits

from scratchformer.nn import Layer
from scratchformer.training import Replicas
from scratchformer.training.memory import resident_bytes
from scratchformer.training.replicas import cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each; with --data, batches of an epoch")
    parser.add_argument("--bfloat16", action="store_true", help="beside the others PyTorch under bfloat16 autocast")
    parser.add_argument("--memory-of", metavar="NAME", help="only run three steps of one of them, and print its peak")
    args = parser.parse_args()
    if args.memory_of:
        return peak_memory(args)
    import torch

    torch.set_num_threads(cores())
    model, batches = make(args)
    names = [OURS, TUTORIAL, TUNED, *([BFLOAT16] if args.bfloat16 else [])]
    peers = {name: torch_step(model, name) for name in names[1:]}
    replicas = Replicas(model)
    ours = our_step(model, replicas)
    for name in (TUTORIAL, TUNED):
        compare(model, batches.batch(0).split(2)[0], name)
    times: dict[str, list[float]] = {name: [] for name in names}
    work = []
    for round_ in range(args.rounds + 1):
        batch, losses = batches.batch(round_), {}
        for name in names:
            start = time.perf_counter()
            if name == OURS:
                with replicas:
                    losses[name] = ours(batch)
            else:
                losses[name] = peers[name][1](batch)
            if round_:  # the first one warms up
                times[name].append(time.perf_counter() - start)
        worst = max(abs(losses[name] / losses[OURS] - 1) for name in names if name != BFLOAT16)
        print(
            f"round {round_}: losses agree to {worst:.1e}", *(f"{t[-1]:.2f} s" for t in times.values() if t), flush=True
        )
        if round_:
            work.append(counted_work(model, batch))

    with threadpool_limits(cores()):
        rate = matrix_rate()
    print(f"\n{replicas.count} replicas, micro-batches of {replicas.rows(batch)} rows")
    print(f"counted work {statistics.mean(work) / 1e9:.0f} GFLOP a step; matrix products here {rate / 1e9:.0f} GFLOP/s")
    what = "total" if args.data else "median"  # batches of different lengths have no median
    middle = {name: sum(t) if args.data else statistics.median(t) for name, t in times.items()}
    total = sum(work) if args.data else statistics.median(work)
    peaks = {name: measured_peak(name) for name in names}
    print(f"{'':<30}{what:>10}{'ours/theirs':>13}{'of the rate':>13}{'peak memory':>13}{'ours/theirs':>13}")
    for name, seconds in middle.items():
        ratio, memory = middle[OURS] / seconds, peaks[OURS] / peaks[name]
        share = "" if name == BFLOAT16 else f"{total / seconds / rate:.0%}"
        print(f"{name:<30}{seconds:>8.2f} s{ratio:>13.3f}{share:>13}{peaks[name] / 1e6:>10.0f} MB{memory:>13.3f}")
    if args.data:
        print(f"an epoch has {len(batches)} batches; of {args.rounds}, drawn like the epoch's, {what} times are given")


def compare(model: Layer, batch: Any, name: str) -> None:
    """Print by how much loss and gradients of `name` differ from ours, in float64, where rounding hides nothing.

    A gradient's difference is ‖ours − theirs‖/‖theirs‖, of the worst tensor.
    """
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
    print(f"{name}: in float64 the loss agrees to {loss_error:.0e}, the gradients to {worst[0]:.0e} ({worst[1]})")


def measured_peak(name: str) -> int:
    """Bytes of resident memory at most, of this program with --memory-of, in a process of its own."""
    command = [sys.executable, *sys.argv, "--memory-of", name]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def peak_memory(args: argparse.Namespace) -> None:
    """Three steps of one of them; prints bytes."""
    model, batches = make(args)
    if args.memory_of == OURS:
        with Replicas(model) as replicas:
            step = our_step(model, replicas)
            for i in range(3):
                step(batches.batch(i))
    else:
        _, step = torch_step(model, args.memory_of)
        del model  # PyTorch has a copy
        for i in range(3):
            step(batches.batch(i))
    print(resident_bytes(peak=True))


if __name__ == "__main__":
    main()

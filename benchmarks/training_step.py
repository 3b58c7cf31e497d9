"""Time a training step of the tutorial's models: scratchformer against PyTorch, on the same weights.

    python benchmarks/training_step.py enwik8       # 12 blocks, width 256, context 256, batch 32
    python benchmarks/training_step.py imdb         # 6 blocks, width 128, 512 words, vocabulary 50,000, batch 32
    python benchmarks/training_step.py enwik8 --bfloat16 --peers all
    python benchmarks/training_step.py imdb --data aclImdb_v1.tar.gz --rounds 40      # real reviews, of similar length

A step is forward, backward, clipping and Adam, in float32 on all cores; with --bfloat16 in mixed precision too. Each
competitor runs in a process of its own, and they take turns, step by step, on the same batches. Before that, losses and
gradients are compared in float64. Prints medians, their ratios, the share of the machine's own matrix-product rate, the
peak memory of each process, and the time of its first step, in which some compile. The last line has the ratio of our
time to that of the fastest peer. A peer that is not installed, fails, or is silent for longer than --patience is left
out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from setups import (
    OURS,
    OURS_BFLOAT16,
    PEERS,
    Process,
    add_model_options,
    counted_work,
    make,
    matrix_rate,
    our_step,
    peer_step,
)

from scratchformer import processor
from scratchformer.nn import Layer
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Replicas

HALF = ", bfloat16"  # after the name of a competitor that runs in it


def work(args: argparse.Namespace) -> None:
    """What a competitor's process does: a step for each number that it reads."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    model, batches = make(args)
    name, half = args.worker.removesuffix(HALF), args.worker.endswith(HALF)
    replicas = Replicas(model, precision="bfloat16" if half and name == OURS else "float32")
    if name == OURS:
        step = our_step(model, replicas)
    elif args.compare:
        replies.write(json.dumps(difference(model, batches.batch(0).split(4)[0], name)) + "\n")
        return
    else:
        _, step = peer_step(model, PEERS[name], half)
        del model, replicas  # the peer has a copy
    for line in sys.stdin:
        batch, start = batches.batch(int(line)), time.perf_counter()
        if name == OURS:
            with replicas:
                loss = step(batch)
        else:
            loss = step(batch)
        replies.write(json.dumps([loss, time.perf_counter() - start, resident_bytes(peak=True)]) + "\n")
        replies.flush()


def difference(model: Layer, batch: Any, name: str) -> tuple[float, float, str]:
    """How far the loss of a peer is from ours in float64, where rounding hides nothing; how far its gradients are,
    ‖ours − theirs‖/‖theirs‖ of the worst tensor; and that tensor's name.
    """
    model = model.to(dtype=np.float64)
    gradients, _ = peer_step(model, PEERS[name], bfloat16=False)
    loss, cache = model.loss(*batch)
    model.loss_backward(1.0, cache)
    peer_loss, theirs = gradients(batch)
    parameters = model.named_parameters()
    worst = max((float(np.linalg.norm(parameters[n].grad - g) / np.linalg.norm(g)), n) for n, g in theirs.items())
    return abs(float(loss) / peer_loss - 1), *worst


class Competitors:
    """The processes of the competitors that have not failed.

    failed: why the others have. patience: the seconds that each has for an answer. folder: for what they print.
    """

    def __init__(self, patience: float, folder: Path) -> None:
        self.patience, self.folder = patience, folder
        self.running: dict[str, Process] = {}
        self.failed: dict[str, str] = {}

    def start(self, name: str, *options: str) -> None:
        command = [sys.executable, *sys.argv, "--worker", name, *options]
        self.running[name] = Process(command, self.folder / name)

    def stop(self, name: str, why: str = "") -> None:
        """End a process. why: the reason, if the competitor has failed."""
        self.running.pop(name).stop()
        if not why:
            return
        lines = (self.folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.strip() for line in lines if any(map(str.isalpha, line))]
        self.failed[name] = f"{why}: {errors[-1][:200]}" if errors and why.startswith("it ended") else why
        print(f"{name} is left out: {self.failed[name]}", flush=True)
        if name in (OURS, OURS_BFLOAT16):
            raise SystemExit(1)

    def compare(self, name: str) -> None:
        """Print how far a peer is from ours in float64; it fails if that is too far."""
        self.start(name, "--compare")
        try:
            loss, gradients, tensor = self.running[name].reply(self.patience)
        except RuntimeError as error:
            return self.stop(name, str(error))
        says = f"in float64 the loss agrees to {loss:.0e}, the gradients to {gradients:.0e} ({tensor})"
        self.stop(name, says if loss > 1e-12 or gradients > 1e-10 else "")
        return print(f"{PEERS[name].title}: {says}", flush=True)

    def take(self, names: Sequence[str], number: int) -> dict[str, tuple[float, float, int]]:
        """The loss, the seconds and the peak memory of each competitor in step `number`, unless it fails.

        Those that are not running yet are started.
        """
        said = {}
        for name in names:
            if name in self.failed:
                continue
            if name not in self.running:
                self.start(name)
            try:
                said[name] = self.running[name].ask(number, self.patience)
            except RuntimeError as error:
                self.stop(name, str(error))
                continue
            apart = abs(said[name][0] / said[OURS][0] - 1)
            if not apart <= (0.05 if name.endswith(HALF) else 1e-3):
                self.stop(name, f"its loss in step {number} is {said.pop(name)[0]}, not {said[OURS][0]}")
        return said


def title(name: str) -> str:
    peer = PEERS.get(name.removesuffix(HALF))
    return peer.title + HALF * name.endswith(HALF) if peer else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    peers = [*PEERS, "all"]
    usual = ["tutorial", "tuned"]
    parser.add_argument("--peers", nargs="+", choices=peers, default=usual, help=f"(default: {' '.join(usual)})")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each; with --data, batches of an epoch")
    parser.add_argument("--bfloat16", action="store_true", help="also time bfloat16, in PyTorch under autocast")
    parser.add_argument("--patience", type=float, default=240, help="seconds for each answer (default: 240)")
    parser.add_argument("--worker", metavar="NAME", help="(for its own use) be one of them")
    parser.add_argument("--compare", action="store_true", help="(for its own use) only compare in float64")
    args = parser.parse_args()
    if args.worker:
        return work(args)
    chosen = [name for name in PEERS if name in args.peers or "all" in args.peers]
    if args.data and (compiled := [name for name in chosen if name not in usual]):
        parser.error(f"--data: {', '.join(compiled)} would compile a step for every length of a batch")

    model, batches = make(args)
    names = [OURS, *chosen]
    if args.bfloat16:
        names += [OURS_BFLOAT16, *(name + HALF for name in chosen if PEERS[name].half)]
    print(f"{processor.described()}: {', '.join(processor.instructions())}")
    print(f"PyTorch {metadata.version('torch')}")
    rate = matrix_rate()
    times: dict[str, list[float]] = {name: [] for name in names}
    first, peaks = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        competitors = Competitors(args.patience, Path(folder))
        definitions = {PEERS[name].fused: name for name in reversed(chosen)}
        for name in reversed(definitions.values()):
            competitors.compare(name)
        for number in range(args.rounds + 1):
            said = competitors.take(names, number)
            for name, (_, seconds, peaks[name]) in said.items():
                if number:
                    times[name].append(seconds)
                else:
                    first[name] = seconds  # it warms up
            worst = max(abs(loss / said[OURS][0] - 1) for name, (loss, *_) in said.items() if not name.endswith(HALF))
            each = (f"{seconds:.2f} s" for _, seconds, _ in said.values())
            print(f"round {number}: losses agree to {worst:.1e}", *each, flush=True)
        for name in [*competitors.running]:
            competitors.stop(name)

    counted = [counted_work(model, batches.batch(number)) for number in range(1, args.rounds + 1)]
    print(f"\n{Replicas(model).describe(batches.batch(0))}")
    print(f"counted work {statistics.mean(counted) / 1e9:.0f} GFLOP a step; matrix products {rate / 1e9:.0f} GFLOP/s")
    what = "total" if args.data else "median"  # batches of different lengths have no median
    good = {name: each for name, each in times.items() if name not in competitors.failed}
    middle = {name: sum(each) if args.data else statistics.median(each) for name, each in good.items()}
    total = sum(counted) if args.data else statistics.median(counted)
    heads = "ours/theirs", "of the rate", "peak memory", "ours/theirs", "first step"
    print(f"{'':<33}{what:>10}", *(f"{head:>12}" for head in heads))
    for name in names:
        if name in competitors.failed:
            print(f"{title(name):<33}left out: {competitors.failed[name]}")
            continue
        ours, seconds = OURS_BFLOAT16 if name.endswith(HALF) else OURS, middle[name]
        ratio, memory = f"{middle[ours] / seconds:.3f}", f"{peaks[ours] / peaks[name]:.3f}"
        share = "" if name.endswith(HALF) else f"{total / seconds / rate:.0%}"  # the rate is that of float32
        values = ratio, share, f"{peaks[name] / 1e6:.0f} MB", memory, f"{first[name]:.1f} s"
        print(f"{title(name):<33}{seconds:>8.2f} s", *(f"{value:>12}" for value in values))
    if args.data:
        print(f"an epoch has {len(batches)} batches; timed: {args.rounds}, in the epoch's order")
    for ours in OURS, OURS_BFLOAT16:
        theirs = {name: seconds for name, seconds in middle.items() if name not in (OURS, OURS_BFLOAT16)}
        theirs = {name: theirs[name] for name in theirs if ours == OURS_BFLOAT16 or not name.endswith(HALF)}
        if ours in middle and theirs:
            fastest = min(theirs, key=lambda name: theirs[name])
            ratio = middle[ours] / theirs[fastest]
            print(f"{ours} / the fastest: {ratio:.3f} ({title(fastest)})")
    return None


if __name__ == "__main__":
    main()

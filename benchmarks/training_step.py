"""Time one training step of the language model, scratchformer and PyTorch in turns, on the same weights and batches.

    python benchmarks/training_step.py [--rounds 5] [--d-model 256 --heads 8 --depth 12 --context 256 --batch 32]

A step is forward, backward, clipping and Adam, in float32 on all cores. Before timing, losses and gradients of both
are compared. Prints medians, their ratios, and the share of the machine's own matrix-product rate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch_model import TorchLanguageModel, torch_name

from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training import Replicas
from scratchformer.training.replicas import cores


def matrix_rate(seconds: float = 1.0) -> float:
    """The machine's float32 matrix-product rate in FLOP/s, by NumPy on all cores, best of many."""
    a = np.ones((2048, 2048), np.float32)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def counted_work(c: dict, tokens: int) -> float:
    """FLOP of a step: 6 for each weight of a matrix product and token, and attention's two products, three times."""
    weights = 12 * c["d_model"] ** 2 * c["depth"] + c["d_model"] * c["vocab_size"]
    return tokens * (6 * weights + 12 * c["context"] * c["d_model"] * c["depth"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("d-model", 256), ("heads", 8), ("depth", 12), ("context", 256), ("batch", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()

    torch.set_num_threads(cores())
    model = LanguageModel(256, args.d_model, args.heads, args.depth, args.context, key=Key(0))
    data = Key(1).generator().integers(0, 256, 1_000_000, dtype=np.uint8)
    batches = TextBatches(data, args.batch, args.context, Key(2))
    adam = Adam(model.parameters(), 1e-4)
    peers = {}
    for name, fused in (("PyTorch, the tutorial's way", False), ("PyTorch, tuned", True)):
        peer = TorchLanguageModel(model, fused)
        peers[name] = peer, torch.optim.Adam(peer.parameters(), 1e-4, fused=fused or None)

    def torch_step(name: str, step: int) -> float:
        peer, optimizer = peers[name]
        batch = batches.batch(step)
        optimizer.zero_grad()
        loss = peer.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.targets).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    times: dict[str, list[float]] = {"scratchformer": [], **{name: [] for name in peers}}
    replicas = Replicas(model)

    def our_step(step: int) -> float:
        with replicas:
            loss = replicas.gradients(batches.batch(step), Key(3, step))
            clip_by_global_norm(model.flat.grad, 1.0)
            adam.step(replicas.map)
        return loss

    steps = {"scratchformer": our_step} | {name: lambda s, name=name: torch_step(name, s) for name in peers}
    for step in range(args.rounds + 1):
        losses = {}
        for name, run in steps.items():
            start = time.perf_counter()
            losses[name] = run(step)
            if step:  # the first round warms up
                times[name].append(time.perf_counter() - start)
        worst = max(abs(loss / losses["scratchformer"] - 1) for loss in losses.values())
        print(
            f"round {step}: losses agree to {worst:.1e}", *(f"{t[-1]:.2f} s" for t in times.values() if t), flush=True
        )
        if step == 0:
            compare_gradients(model, peers["PyTorch, the tutorial's way"][0])

    with threadpool_limits(cores()):
        rate = matrix_rate()
    work = counted_work(model.config, args.batch * args.context)
    ours = statistics.median(times["scratchformer"])
    print(f"\ncounted work {work / 1e9:.0f} GFLOP; matrix products here {rate / 1e9:.0f} GFLOP/s")
    print(f"{'':<30}{'median':>9}{'ours/theirs':>13}{'of the rate':>13}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:<30}{median:>7.2f} s{ours / median:>13.2f}{work / median / rate:>13.0%}")


def compare_gradients(model: LanguageModel, peer: TorchLanguageModel) -> None:
    """Print by how much the clipped gradients of the last step differ, ‖ours − theirs‖/‖theirs‖, for the worst tensor.

    (Single elements differ by more: a ReLU whose input is near zero may be on in one and off in the other.)
    """
    theirs, worst = dict(peer.named_parameters()), (0.0, "")
    for name, p in model.named_parameters().items():
        grad = theirs[torch_name(name)].grad.numpy()
        grad = grad.T if grad.ndim == 2 and name.endswith(".w") else grad
        worst = max(worst, (float(np.linalg.norm(p.grad - grad) / np.linalg.norm(grad)), name))
    print(f"gradients agree to {worst[0]:.1e}, the worst being that of {worst[1]}")


if __name__ == "__main__":
    main()

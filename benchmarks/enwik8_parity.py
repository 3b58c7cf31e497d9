"""Train the language model on enwik8 twice, with scratchformer and with PyTorch, and compare losses and scores.

    python benchmarks/enwik8_parity.py --data PATH [--steps 1000] [--preset small]

Both have the same initial weights, batches, optimizer, schedule and clipping. First they take 20 steps in float64 and
in float32, and the losses are compared one by one; then `--steps` steps in float32, and the bits per byte on the last
5% are compared.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch_model import TorchLanguageModel

from scratchformer import Key
from scratchformer.data import TextBatches, load_enwik8, windows
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine, clip_by_global_norm
from scratchformer.parallel.replicas import cores
from scratchformer.training import Replicas, evaluate_language_model

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from enwik8 import PRESETS


def train_ours(model: LanguageModel, batches: TextBatches, schedule: Cosine, steps: int) -> list[float]:
    optimizer, losses = Adam(model.parameters(), schedule.peak), []
    with Replicas(model) as replicas:
        for step in range(steps):
            losses.append(replicas.gradients(batches.batch(step), Key(0)))
            clip_by_global_norm(model.flat.grad, 1.0)
            optimizer.lr = schedule(step)
            optimizer.step(replicas.map)
    return losses


def clip(model: TorchLanguageModel, max_norm: float) -> None:
    """Clip by global norm. (`clip_grad_norm_` divides by norm + 1e-6, which alone moves a float64 loss by 1e-9.)"""
    grads = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads)
    if norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)


def train_theirs(model: TorchLanguageModel, batches: TextBatches, schedule: Cosine, steps: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), schedule.peak), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.zero_grad()
        loss = model.loss(*(torch.from_numpy(a).long() for a in batches.batch(step)))
        loss.backward()
        clip(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate_theirs(model: TorchLanguageModel, data: np.ndarray, context: int) -> float:
    nats = []
    for batch, counted in windows(data, context, context // 2, 32):
        logits = model(torch.from_numpy(batch.ids).long())
        loss = F.cross_entropy(logits.transpose(1, 2), torch.from_numpy(batch.targets).long(), reduction="none")
        nats.append(float(loss[torch.from_numpy(counted)].double().sum()))
    return math.fsum(nats) / (len(data) - 1) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="PATH", help="enwik8, or its beginning")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    corpus, preset, key = load_enwik8(args.data), PRESETS[args.preset], Key(args.seed)
    batches = TextBatches(corpus.train, preset["batch_size"], preset["context"], key.fold("batches"))
    schedule = Cosine(preset["lr"], min(preset["warmup"], args.steps), args.steps, floor=preset["lr"] / 10)
    sizes = {name: preset[name] for name in ("d_model", "heads", "depth", "context", "norm", "embedding_std")}

    def both(dtype: type) -> tuple[LanguageModel, TorchLanguageModel]:
        model = LanguageModel(256, key=key.fold("weights"), **sizes).to(dtype=dtype)
        return model, TorchLanguageModel(model)

    for dtype in (np.float64, np.float32):
        ours, theirs = both(dtype)
        a, b = train_ours(ours, batches, schedule, 20), train_theirs(theirs, batches, schedule, 20)
        worst = max(abs(x / y - 1) for x, y in zip(a, b, strict=True))
        print(f"{dtype.__name__}: the first 20 losses agree to {worst:.1e}; the last are {a[-1]:.6f}, {b[-1]:.6f}")

    ours, theirs = both(np.float32)
    start = time.perf_counter()
    a = train_ours(ours, batches, schedule, args.steps)
    middle = time.perf_counter()
    b = train_theirs(theirs, batches, schedule, args.steps)
    end = time.perf_counter()
    with Replicas(ours) as replicas:
        score = evaluate_language_model(replicas, corpus.test)["bits_per_byte"]
    print(f"{corpus.name}, preset {args.preset}, {args.steps} steps, float32: bits per byte on the last 5%")
    for name, bits, losses, seconds in (
        ("scratchformer", score, a, middle - start),
        ("PyTorch", evaluate_theirs(theirs, corpus.test, preset["context"]), b, end - middle),
    ):
        mean = np.mean(losses[-100:])
        print(f"{name:<14} {bits:.4f}   mean loss of the last 100 steps {mean:.4f}   {seconds:.0f} s of training")


if __name__ == "__main__":
    main()

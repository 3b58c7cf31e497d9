"""Parts that the benchmarks share: the tutorial's two models, a training step of each, and the machine's own rate."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.data import LabelledBatches, TextBatches
from scratchformer.data.imdb import Labelled
from scratchformer.models import Classifier, LanguageModel
from scratchformer.nn import Layer
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training import Replicas

TUTORIAL = "PyTorch, the tutorial's way"
TUNED = "PyTorch, tuned"
BFLOAT16 = "PyTorch, tuned, bfloat16"
OURS = "scratchformer"
OURS_BFLOAT16 = "scratchformer, bfloat16"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", choices=("enwik8", "imdb"), default="enwik8", help="the tutorial's sizes of"
    )
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch (default: 32)")
    parser.add_argument(
        "--data", metavar="PATH", help="imdb: real reviews in batches of similar length, instead of 512 words"
    )


def make(args: argparse.Namespace) -> tuple[Layer, Any]:
    """The model, and its batches: random tokens, or real reviews."""
    if args.model == "enwik8":
        model = LanguageModel(256, d_model=256, heads=8, depth=12, context=256, key=Key(0))
        data = Key(1).generator().integers(0, 256, 1_000_000, dtype=np.uint8)
        return model, TextBatches(data, args.batch, 256, Key(2))
    model = Classifier(50_000, 2, d_model=128, heads=8, depth=6, max_length=512, key=Key(0))
    if args.data:
        from scratchformer.data import load_imdb

        reviews = load_imdb(args.data, 50_000, seed=0).train
    else:
        draw = Key(1).generator()
        words = [draw.integers(2, 50_000, 512, dtype=np.int32) for _ in range(64 * args.batch)]
        reviews = Labelled(words, draw.integers(0, 2, len(words)))
    return model, LabelledBatches(reviews, args.batch, 512, Key(2), keep="both")


def our_step(model: Layer, replicas: Replicas) -> Callable[[Any], float]:
    """Forward, backward, clipping, Adam; inside `with replicas`. Returns the loss."""
    adam = Adam(model.parameters(), 1e-4)

    def step(batch: Any) -> float:
        loss = replicas.gradients(batch, Key(3))
        clip_by_global_norm(model.flat.grad, 1.0, replicas.map)
        adam.step(replicas.map)
        return loss

    return step


def torch_step(model: Layer, name: str) -> tuple[Any, Callable[[Any], float]]:
    """The model in PyTorch, and the same step."""
    import torch
    from torch_model import TorchClassifier, TorchLanguageModel

    torch.set_num_threads(cores())

    kind = TorchLanguageModel if isinstance(model, LanguageModel) else TorchClassifier
    peer = kind(model, fused=name != TUTORIAL)
    adam = torch.optim.Adam(peer.parameters(), 1e-4, fused=name != TUTORIAL or None)

    def step(batch: Any) -> float:
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == BFLOAT16):
            loss = peer.loss(*(torch.from_numpy(a).long() for a in batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        adam.step()
        return loss.item()

    return peer, step


def counted_work(model: Layer, batch: Any) -> float:
    """FLOP of a step: 6 for each token and weight in a matrix product; attention's two products, three times over."""
    c, (B, T) = model.config, batch[0].shape
    weights = 12 * c["d_model"] ** 2 * c["depth"]
    if isinstance(model, LanguageModel):
        weights += c["d_model"] * c["vocab_size"]
    return B * T * (6 * weights + 12 * T * c["d_model"] * c["depth"])


def matrix_rate(seconds: float = 1.0) -> float:
    """The machine's float32 matrix-product rate in FLOP/s, by NumPy on all cores: the best of many."""
    a = np.ones((2048, 2048), np.float32)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best

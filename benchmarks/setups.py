"""Parts that the benchmarks share: the tutorial's two models, a training step of each, processes, and the machine's own
rate.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.data import LabelledBatches, TextBatches
from scratchformer.data.imdb import Labelled
from scratchformer.models import Classifier, LanguageModel
from scratchformer.nn import Layer
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training import Replicas

OURS = "scratchformer"
OURS_BFLOAT16 = "scratchformer, bfloat16"


class Peer(NamedTuple):
    """A way to use PyTorch.

    fused: with fused attention and fused Adam. mode: of `torch.compile`, or None. half: also in bfloat16.
    """

    title: str
    fused: bool = True
    mode: str | None = None
    half: bool = True


PEERS = {
    "tutorial": Peer("PyTorch, the tutorial's way", fused=False, half=False),
    "tuned": Peer("PyTorch, tuned"),
    "compile": Peer("PyTorch, compiled", mode="default"),
    "max-autotune": Peer("PyTorch, max-autotune", mode="max-autotune"),
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", choices=("enwik8", "imdb"), default="enwik8", help="the tutorial's sizes of"
    )
    parser.add_argument("--small", action="store_true", help="2 blocks of width 32, to try this program")
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch (default: 32)")
    parser.add_argument(
        "--data", metavar="PATH", help="imdb: real reviews in batches of similar length, instead of 512 words"
    )


def make(args: argparse.Namespace) -> tuple[Layer, Any]:
    """The model, and its batches: random tokens, or real reviews."""
    sizes = dict(d_model=32, heads=4, depth=2) if args.small else {}
    if args.model == "enwik8":
        model = LanguageModel(256, **dict(d_model=256, heads=8, depth=12) | sizes, context=256, key=Key(0))
        data = Key(1).generator().integers(0, 256, 1_000_000, dtype=np.uint8)
        return model, TextBatches(data, args.batch, 256, Key(2))
    model = Classifier(50_000, 2, **dict(d_model=128, heads=8, depth=6) | sizes, max_length=512, key=Key(0))
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


def peer_step(model: Layer, peer: Peer, bfloat16: bool) -> tuple[Callable[[Any], Any], Callable[[Any], float]]:
    """Two functions of a batch: the model's loss and gradients by the peer, and the same training step."""
    import torch
    from torch_model import TorchClassifier, TorchLanguageModel, gradients_of, training_step

    torch.set_num_threads(cores())
    kind = TorchLanguageModel if isinstance(model, LanguageModel) else TorchClassifier
    theirs = kind(model, fused=peer.fused)
    adam = torch.optim.Adam(theirs.parameters(), 1e-4, fused=peer.fused or None)
    step = training_step(theirs, [(adam, adam.step)], "cpu", peer.mode, bfloat16)
    return lambda batch: gradients_of(theirs, model, batch), lambda batch: step(batch).item()


class Process:
    """A program that answers each line that it reads with a line of JSON. Its errors go to `log`."""

    def __init__(
        self, command: list[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        with nullcontext() if log is None else log.open("a", encoding="utf-8") as errors:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
            self.process = subprocess.Popen(command, **pipes, text=True, env=environment, process_group=0)

    def reply(self, seconds: float | None = None) -> Any:
        """Its next answer, which must come within so many seconds. Raises RuntimeError if there is none."""
        if not select.select([self.process.stdout], [], [], seconds and max(0.0, seconds))[0]:
            raise RuntimeError(f"no reply in {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, line: object, seconds: float | None = None) -> Any:
        """Send a line, and return the answer. Raises RuntimeError, as `reply` does."""
        with suppress(BrokenPipeError):  # if it has ended, `reply` says so
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.reply(seconds)

    def stop(self) -> None:
        """End the program, and what it has started, such as compilers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self.process.communicate()


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

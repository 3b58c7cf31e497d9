"""The memory of a process that trains or generates for as many steps as a real run does in hours, with a tiny model.

`python hours.py plain STEPS SEED` trains and prints as JSON the memory in bytes after each percent of the steps.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import runs
from area import Area, Case, last_line

from scratchformer import Key
from scratchformer.generation import generate
from scratchformer.models import LanguageModel, TransformerXL
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Run
from scratchformer.training.start import run_main

STEPS = 288_000  # twelve hours of `python examples/enwik8.py` at 0.15 s a step
SIZES = dict(d_model=8, heads=1, depth=1, context=8, xl_d_ff=8, batch_size=2, optimizer="adam")
INTERVALS = dict(evaluate_every=250, snapshot_every=100, log_every=10)  # those of the program's default run
FLAT = 1.01


class Hours(Area):
    """Train the language model of examples/enwik8.py. After the first percent of the steps, the memory of the process
    may grow by at most one percent.
    """

    name = "hours"
    only_when_named = True
    slow = True
    seconds = 6 * 3600
    kind: ClassVar[str] = "plain"
    count: ClassVar[int] = STEPS

    def case(self, draw: random.Random, folder: Path) -> Case:
        count = int(os.environ.get("SCRATCHFORMER_STEPS", self.count))  # set it to fewer steps to try this area
        what = f"{self.kind}: {count:,} steps"
        command = [sys.executable, __file__, self.kind, str(count), str(draw.randrange(1000))]

        def run() -> str:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the program ended with status {done.returncode}: {last_line(done.stderr)}")
            _, first, *later = json.loads(last_line(done.stdout))
            told = f"{what}, {first / 2**20:.1f} MB after 1%, then at most {max(later) / first - 1:+.2%}"
            if max(later) > FLAT * first:
                told = f"not flat: {told}"
            return told

        return Case(what, run, expect="accepted", check=lambda told: told if told.startswith("not flat") else None)

    def summary(self, messages: list[str]) -> str:
        return "; ".join(messages)


class HoursXL(Hours):
    """The same with a Transformer-XL, whose batches have a memory."""

    name = "hours-xl"
    kind = "xl"


class Generations(Hours):
    """A plain language model and a Transformer-XL generate texts in turns."""

    name = "generations"
    kind = "generations"
    count = 5_000


def train(kind: str, steps: int, seed: int) -> list[int]:
    """Train a tiny model. Returns the memory of the process in bytes at each percent of the steps."""
    sizes: list[int] = []
    runs.set_intervals(**INTERVALS)
    with_intervals = Run.steps

    def measured(*args: Any, **options: Any) -> Iterator[int]:
        for step in with_intervals(*args, **options):
            if step * 100 // steps != (step - 1) * 100 // steps:
                sizes.append(resident_bytes())
            yield step

    Run.steps = measured
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(" ".join(random.Random(0).choices(runs.WORDS, k=12_000)), encoding="utf-8")
        options = ["--model", kind, "--data", text, "--out", Path(folder) / "run", "--replicas", 1, "--device", "cpu"]
        options += ["--steps", steps, "--seed", seed]
        run_main(runs.tiny(kind, SIZES).main, [str(option) for option in options])
    return sizes


def write(count: int, seed: int) -> list[int]:
    """Let two models generate `count` texts. Returns the memory of the process in bytes at each percent of them."""
    sizes: list[int] = []
    common = dict(d_model=8, heads=1, depth=1, context=16)
    models = LanguageModel(256, **common), TransformerXL(256, memory=16, d_ff=8, **common)
    for number in range(count):
        if number * 100 // count != (number - 1) * 100 // count:
            sizes.append(resident_bytes())
        key = Key(seed).fold("text", number)
        prompt = np.arange(number % 10 + 1)[None]
        for _ in generate(models[number % 2], prompt, 10 + number % 30, top_k=5 if number % 3 else None, key=key):
            pass
    return sizes


def main() -> None:
    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(write(count, seed) if kind == "generations" else train(kind, count, seed)))


if __name__ == "__main__":
    main()

"""Train 122 million parameters on the bytes of Wikipedia (enwik8) for some minutes, with a curve. A part of gpu.py.

The model is a GPT-2 as wide as the small one. It has 17 blocks, since a table of 256 bytes is so much smaller than one
of 50,257 sub-words. The learning rate depends on how much of the time is over, so that it falls to its end in any time.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

from scratchformer import Key
from scratchformer.backend import Device
from scratchformer.commands.plots import plot_curves
from scratchformer.data import VALIDATION_BYTES, TextBatches, load_enwik8
from scratchformer.models import GPT2
from scratchformer.optim import AdamW, Cosine
from scratchformer.training import Replicas, evaluate_language_model

PEAK, WARMUP, SCORES = 6e-4, 100, 12  # the highest learning rate, the steps to it, and how often it is scored
PARTS = 10_000  # into which the time is divided for the schedule


def train(results: Any, device: Device, small: bool, seconds: float, enwik8: Path | None) -> None:
    """Scoring counts as part of the time; the score of the test part does not."""
    corpus, rows = load_enwik8(enwik8), 2 if small else 16
    sizes = dict(d_model=32, heads=4, depth=2, context=64) if small else dict(d_model=768, heads=12, depth=17)
    model = GPT2(256, **{"context": 1024} | sizes, dropout=0.2, key=Key(0)).to(device)
    batches = TextBatches(corpus.train, rows, model.context, Key(1))
    optimizer = AdamW(model.parameters(), PEAK, (0.9, 0.95), weight_decay=0.1)
    schedule = Cosine(PEAK, 0, PARTS, PEAK / 20)
    records: list[dict[str, Any]] = []
    begun, number, over, due = time.perf_counter(), 0, 0.0, 0.0
    limit = 2_000 if small else VALIDATION_BYTES
    with Replicas(model, precision="bfloat16") as replicas:
        while over < 1:
            loss = replicas.gradients(batches.batch(number), Key(2, number))
            optimizer.lr = float(schedule(int(PARTS * over))) * min(1, (number + 1) / WARMUP)
            replicas.reading = False
            replicas.clip(optimizer, 1.0)
            replicas.step(optimizer)
            number += 1
            if number % 10 == 0 or small:
                loss = float(loss)  # waits for the device, so that the time is that of the steps
                over = (time.perf_counter() - begun) / seconds
                records.append(dict(step=number, seconds=seconds * over, loss=loss, lr=optimizer.lr))
            if over >= min(due, 1):
                due += 1 / SCORES
                scores = evaluate_language_model(replicas, corpus.validation[:limit])
                replicas.rounded = False  # scoring may have changed the weights in half precision
                if records:
                    records[-1] |= {f"validation_{name}": value for name, value in scores.items()}
                    results.add("training", step=number, seconds=round(seconds * over, 1), **scores)
                    write(results.out, records)
        taken = time.perf_counter() - begun
        test = evaluate_language_model(replicas, corpus.test[:limit])
    write(results.out, records)
    settings = dict(program="GPT-2 on bytes", preset=f"{seconds / 60:.1f} minutes", seed=0)
    plot_curves(records, settings, results.out / "training.png")
    count = sum(p.data.size for p in model.parameters())
    read = number * rows * model.context
    results.add(
        "trained", parameters=count, steps=number, bytes=read, seconds=taken, bytes_per_second=read / taken,
        test_bits_per_byte=test["bits_per_byte"], test_bytes=len(corpus.test[:limit]),
    )  # fmt: skip


def write(out: Path, records: list[dict[str, Any]]) -> None:
    names = dict.fromkeys(name for record in records for name in record)
    with (out / "training.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names])
        writer.writeheader()
        writer.writerows(records)

"""Evaluation on held-out data, shared out over the replicas. Nothing is dropped out and nothing is learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import CPU, to_cpu
from ..data import Labelled, in_order, windows
from ..models.language_model import IGNORED
from ..nn import Layer
from .replicas import Replicas


def evaluate_language_model(
    replicas: Replicas, data: np.ndarray, stride: int | None = None, batch_size: int | None = None
) -> dict[str, float]:
    """Loss (nats a token) and bits per byte of `data`, bytes (n,), each of which but the first is predicted once.

    A window has the model's context; the next begins `stride` tokens later, and only what no window before it has
    predicted is counted. stride: half the context by default, so that every prediction but the first has at least
    that much text before it. batch_size: windows at once; by default as many as in training.
    """
    context = replicas.model.context
    stride = max(1, context // 2) if stride is None else stride
    batch_size = at_once(replicas, context) if batch_size is None else batch_size

    def nats(model: Layer, item: tuple[Any, np.ndarray]) -> tuple[float, int]:
        batch, counted = item
        batch = replicas.move(batch._replace(targets=np.where(counted, batch.targets, IGNORED)))
        loss, _ = model.loss(*batch)
        return float(loss) * int(counted.sum()), int(counted.sum())

    sums, counts = zip(*replicas.map_models(nats, windows(data, context, stride, batch_size)), strict=True)
    loss = math.fsum(sums) / sum(counts)
    return {"loss": loss, "bits_per_byte": loss / math.log(2)}


def evaluate_classifier(
    replicas: Replicas, dataset: Labelled, max_length: int, keep: str = "head", batch_size: int | None = None
) -> dict[str, float]:
    """Loss (nats a text) and accuracy (share of texts whose likeliest class is the right one) over a whole dataset.

    batch_size: texts at once; by default as many of the longest as in training.
    """
    batch_size = at_once(replicas, max_length) if batch_size is None else batch_size

    def score(model: Layer, batch: Any) -> tuple[float, int]:
        moved = replicas.move(batch)
        log_probabilities = to_cpu(model(moved.ids, moved.lengths))
        own = np.take_along_axis(log_probabilities, batch.labels[:, None], axis=1)
        return -float(own.sum(dtype=np.float64)), int((log_probabilities.argmax(axis=1) == batch.labels).sum())

    losses, right = zip(*replicas.map_models(score, in_order(dataset, batch_size, max_length, keep)), strict=True)
    n = len(dataset.labels)
    return {"loss": math.fsum(losses) / n, "accuracy": sum(right) / n}


def at_once(replicas: Replicas, length: int) -> int:
    """How many rows of `length` tokens go through a replica together, so that evaluating takes no more memory."""
    if replicas.micro_batch is not None:
        return replicas.micro_batch
    return (replicas.fitting(length) if replicas.device is CPU else None) or 16

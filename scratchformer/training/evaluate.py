"""Evaluation on held-out data, split over the replicas. There is no dropout, and nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .. import ops
from ..backend import free_memory, to_cpu
from ..checks import (
    expect_array,
    expect_at_least,
    expect_ids,
    expect_instance,
    expect_integers,
    expect_positive,
    expect_shape,
)
from ..data import (
    DataError,
    Labelled,
    MaskedBatch,
    MaskedBatches,
    Subwords,
    TextBatch,
    TokenPairs,
    in_order,
    pairs_in_order,
    windows,
)
from ..data.batching import by_length, expect_text
from ..ops import IGNORED
from ..parallel.replicas import Replicas
from ..shell.progress import progress_bar

MAX_ROWS = 1024  # at once on a GPU: more are no faster
GROUPS = 8  # in which a Transformer-XL reads the parts of a text, however many replicas there are


def evaluate_language_model(
    replicas: Replicas,
    data: np.ndarray,
    stride: int | None = None,
    batch_size: int | None = None,
    sizes: np.ndarray | None = None,
) -> dict[str, float]:
    """Loss (nats per token) and bits per byte of a text. Each token but the first is predicted once.

    data: tokens (n,). A window is as long as the model's context, and the next starts `stride` tokens later; only
    tokens that no earlier window predicted are counted. stride: half the context by default, so every prediction
    outside the first window has at least that much text before it. batch_size: windows per batch; by default as many as
    in training, or as fit on a GPU. sizes: the number of bytes of each token of the vocabulary, (V,)
    (`Subwords.sizes`); None if the tokens are bytes.
    """
    expect_instance("replicas", replicas, Replicas)
    expect_text(data)
    context = replicas.model.context
    stride = max(1, context // 2) if stride is None else stride
    batch_size = at_once(replicas, context) if batch_size is None else batch_size
    predicted = predicted_bytes(data, sizes)
    batches = (
        batch._replace(targets=np.where(counted, batch.targets, IGNORED))
        for batch, counted in windows(data, context, stride, batch_size)
    )
    total, tokens = _summed(replicas, batches, "tokens", len(data) - 1, lambda batch: batch.weight)
    return {"loss": total / tokens, "bits_per_byte": total / (predicted * math.log(2))}


def predicted_bytes(data: np.ndarray, sizes: np.ndarray | None) -> int:
    """The number of bytes in all tokens of `data` but the first. sizes: see `evaluate_language_model`."""
    ids = data[1:]
    if sizes is None:
        return len(ids)
    sizes = expect_array("sizes", sizes)
    expect_integers("sizes", sizes)
    expect_shape("sizes", sizes, "V")
    expect_ids("data", ids, len(sizes))
    if not (count := int(sizes[ids].sum())) and len(ids):
        raise ValueError("sizes: expected numbers of bytes, got 0 for every token of the text")
    return count


def mean_loss(replicas: Replicas, batches: Iterable[Any], rows: int | None = None) -> float:
    """The model's mean loss over `batches`, each weighted by its `weight`.

    A replica takes no more rows of a batch at once than `at_once` says. rows: the number of rows of all batches, for a
    progress bar; None if it is not known. Raises ValueError if nothing in the batches counts.
    """
    parts = (part for batch in batches for part in batch.split(at_once(replicas, batch[0].shape[1])))
    total, weight = _summed(replicas, parts, "rows", rows, lambda batch: len(batch[0]))
    if not weight:
        raise ValueError("batches: expected some with a weight, got none")
    return total / weight


def evaluate_translation(replicas: Replicas, pairs: TokenPairs, tokens: int, subwords: Subwords) -> dict[str, float]:
    """Loss (nats per token, END included, no label smoothing) of the reference translations, by teacher forcing.

    tokens: per side of a batch; see `data.TranslationBatches`.
    """
    return {"loss": mean_loss(replicas, pairs_in_order(pairs, tokens, subwords), len(pairs.target))}


def evaluate_transformer_xl(
    replicas: Replicas,
    data: np.ndarray,
    memory: int | None = None,
    streams: int | None = None,
    sizes: np.ndarray | None = None,
) -> dict[str, float]:
    """Loss (nats per token) and bits per byte of a text, read in order. Each token but the first is predicted once.

    data: tokens (n,). sizes: the number of bytes of each token; see `evaluate_language_model`.
    memory: how many past vectors each layer keeps between segments; by default as many as in training. streams: the
    number of consecutive parts into which the text is cut, to be read in parallel. All but the first start one memory
    length early, where nothing is counted; 1 reads the text as a whole. The default is as many as GROUPS replicas take
    in training, but few enough that each predicts at least four times as many tokens as the model sees at once.
    Raises ValueError for numbers out of range, DataError if n < 2.
    """
    expect_instance("replicas", replicas, Replicas)
    expect_text(data)
    model = replicas.model
    context = model.context
    memory = model.memory if memory is None else memory
    expect_at_least(0, memory=memory, **({} if streams is None else {"streams": streams}))
    predictions = len(data) - 1
    if predictions < 1:
        raise DataError(f"corpus: {len(data)} token(s), but there is nothing to predict in fewer than 2")
    if streams is None:
        limit = GROUPS * as_in_training(replicas, context)  # not by the free memory: the score depends on it
        streams = max(1, min(limit, predictions // (4 * (memory + context))))
    if not 1 <= streams <= predictions:
        raise ValueError(f"streams: expected a number from 1 to {predictions}, got {streams}")
    predicted = predicted_bytes(data, sizes)
    early = memory if streams > 1 else 0
    share = math.ceil(max(0, predictions - early) / streams)  # predictions per part; the first part has `early` more
    part = np.arange(streams)[:, None]
    place = part * share + np.arange(early + share)  # (streams, early + share): the tokens that are read
    counted = (place < predictions) & ((place >= part * share + early) | (part == 0))
    ids, targets = (data[np.minimum(place + i, predictions)].astype(np.int32) for i in (0, 1))
    targets[~counted] = IGNORED

    def nats(model: Any, rows: np.ndarray) -> tuple[float, int]:
        total, kept = 0.0, None
        for start in range(0, early + share, context):
            segment = (rows, slice(start, start + context))
            with replicas.moved(model, TextBatch(ids[segment], targets[segment])) as batch:
                loss, cache = model.loss(*batch, kept)
            kept = model.remember(cache[0], memory)
            del cache  # to free it before the next forward
            bar.update(len(rows))
            total += float(loss) * int(counted[segment].sum())
        return total, int(counted[rows].sum())

    rows = np.array_split(np.arange(streams), min(GROUPS, streams))
    with progress_bar("scoring", streams * math.ceil((early + share) / context), "segments") as bar:
        sums, counts = zip(*replicas.map_models(nats, rows), strict=True)
    total = math.fsum(sums)
    return {"loss": total / sum(counts), "bits_per_byte": total / (predicted * math.log(2))}


def evaluate_classifier(
    replicas: Replicas, dataset: Labelled, max_length: int, keep: str = "head", batch_size: int | None = None
) -> dict[str, float]:
    """Loss (nats per text) and accuracy over a whole dataset.

    batch_size: texts per batch; by default as many of the longest as in training, or as fit on a GPU.
    """
    expect_instance("replicas", replicas, Replicas)
    expect_instance("dataset", dataset, Labelled)
    labels = expect_array("dataset.labels", dataset.labels)
    expect_positive(max_length=max_length)
    if batch_size is None:
        batch_size = at_once(replicas, min(max_length, max(map(len, dataset.ids), default=max_length)))

    def score(model: Any, batch: Any) -> np.ndarray:
        with replicas.moved(model, batch) as moved:
            scores = to_cpu(model(moved.ids, moved.lengths))
        expect_ids("labels", batch.labels, scores.shape[1])
        return scores

    batches = in_order(dataset, batch_size, max_length, keep)
    scored = _scored(replicas, score, batches, "texts", len(dataset.ids), lambda batch: len(batch.labels))
    log_probabilities = np.concatenate(scored)[np.argsort(by_length(dataset, max_length))]
    chosen = np.take_along_axis(log_probabilities, labels[:, None], axis=1)
    right = log_probabilities.argmax(axis=1) == labels
    return {"loss": -math.fsum(chosen[:, 0]) / len(chosen), "accuracy": int(right.sum()) / len(chosen)}


def evaluate_pretraining(replicas: Replicas, batches: MaskedBatches, count: int) -> dict[str, float]:
    """Scores of a `BertPretraining` on the first `count` of `batches`: the training loss (nats), and the accuracy on
    the masked tokens and on whether the second text follows the first.
    """

    def score(model: Any, batch: MaskedBatch) -> list[tuple[float, int, int]]:
        scores = []
        with replicas.moved(model, batch) as moved:
            logits, _ = model.forward(moved.ids, moved.lengths, moved.segments, moved.places)
            for z, targets in zip(logits, (moved.targets, moved.unrelated), strict=False):
                loss, _ = ops.cross_entropy(z, targets)
                scores.append((float(loss) * targets.size, int((z.argmax(axis=-1) == targets).sum()), targets.size))
        return scores

    rows = at_once(replicas, batches.max_length)
    micro_batches = (micro for step in range(count) for micro in batches.batch(step).split(rows))
    total = count * batches.batch_size
    tasks = zip(*_scored(replicas, score, micro_batches, "texts", total, lambda micro: len(micro.ids)), strict=True)
    losses, accuracies = [], []
    for task in tasks:
        loss, right, n = (math.fsum(column) for column in zip(*task, strict=True))
        losses.append(loss / n)
        accuracies.append(right / n)
    names = ("masked_accuracy", "next_sentence_accuracy")
    return {"loss": sum(losses), **dict(zip(names, accuracies, strict=False))}


def _summed(
    replicas: Replicas, batches: Iterable[Any], unit: str, total: int | None, size: Callable[[Any], int]
) -> tuple[float, int]:
    """The sum of the model's losses over `batches`, each times its `weight`, and the sum of the weights."""

    def weighted(model: Any, batch: Any) -> tuple[float, int]:
        loss, _ = replicas.loss(model, batch)
        return float(loss) * batch.weight, batch.weight

    scored = _scored(replicas, weighted, batches, unit, total, size)
    return math.fsum(loss for loss, _ in scored), sum(weight for _, weight in scored)


def _scored(
    replicas: Replicas,
    score: Callable[[Any, Any], Any],
    items: Iterable[Any],
    unit: str,
    total: int | None,
    size: Callable[[Any], int],
) -> list:
    """`replicas.map_models` with a progress bar; `total` is the sum of the items' sizes."""
    with progress_bar("scoring", total, unit) as bar:
        return replicas.map_models(score, items, lambda item: bar.update(size(item)))


def at_once(replicas: Replicas, length: int) -> int:
    """How many rows of `length` tokens a replica evaluates at once. On a CPU, or if micro_batch
    is given, they are as many as `as_in_training` says; on a GPU as many as are expected to fill half of its free
    memory.
    """
    if replicas.micro_batch is None and not replicas.fixed_order:
        room, row = free_memory(replicas.device) / 2, _bytes_of_a_row(replicas.model, length)
        if row and math.isfinite(room):
            return min(MAX_ROWS, max(1, int(room) // row))
    return as_in_training(replicas, length)


def as_in_training(replicas: Replicas, length: int) -> int:
    """The most rows of `length` tokens that a replica takes at once in training on a CPU: micro_batch, or as many as
    fit in a core's cache; 16 if that is not known.
    """
    if replicas.micro_batch is not None:
        return replicas.micro_batch
    return (replicas.fitting(length) if replicas.fixed_order else None) or 16


def _bytes_of_a_row(model: Any, length: int) -> int | None:
    """What a forward keeps for a row, None if that is not known. For each token a block keeps about eight vectors, two
    inner vectors of its feed-forward layer, and the weights of its attention twice; a language model keeps its logits
    three times.
    """
    config = getattr(model, "config", {})
    C, H, depth = (config.get(name) for name in ("d_model", "heads", "depth"))
    if not (C and H and depth):
        return None
    block = 8 * C + 2 * (config.get("d_ff") or 4 * C) + 2 * H * length
    outputs = config["vocab_size"] if hasattr(model, "context") else 0
    return 4 * length * (depth * block + 3 * outputs)

"""Tiny models and data, and a training run over them, for the training tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scratchformer.backend import CPU, Device
from scratchformer.data import Labelled, LabelledBatches, TextBatches
from scratchformer.models import Classifier, LanguageModel
from scratchformer.optim import Adam, AdamW, Cosine
from scratchformer.rng import Key
from scratchformer.training import Replicas, evaluate_classifier, evaluate_language_model

from .visible_loop import train

VOCABULARY, CONTEXT, CLASSES, MAX_LENGTH = 29, 8, 3, 10
KINDS = ("LanguageModel", "Classifier")


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """make_model("LanguageModel" or "Classifier", device=CPU, dtype=float32, seed=0, **options): two small blocks."""

    def make(kind: str, device: Device = CPU, dtype: type = np.float32, seed: int = 0, **options: Any) -> Any:
        sizes = {"d_model": 12, "heads": 3, "depth": 2, "norm": "pre", "key": Key(seed).fold("weights"), **options}
        if kind == "LanguageModel":
            model = LanguageModel(VOCABULARY, context=CONTEXT, **sizes)
        else:
            model = Classifier(VOCABULARY, CLASSES, max_length=MAX_LENGTH, **sizes)
        return model.to(device, dtype)

    return make


@pytest.fixture(scope="session")
def text() -> np.ndarray:
    """A text with an easily learned regularity: two thirds of it count upwards."""
    draw = Key(0).fold("text").generator()
    counting = np.arange(700) % VOCABULARY
    return np.where(draw.random(700) < 0.67, counting, draw.integers(0, VOCABULARY, 700)).astype(np.uint8)


@pytest.fixture(scope="session")
def reviews() -> Labelled:
    """41 texts of 1 to 14 tokens, some too long for the models; the first token of a text determines its class."""
    draw = Key(0).fold("reviews").generator()
    ids = [draw.integers(2, VOCABULARY, length).astype(np.int32) for length in draw.integers(1, 15, 41)]
    return Labelled(ids, np.array([int(text[0]) % CLASSES for text in ids]))


@pytest.fixture(scope="session")
def make_batches(text: np.ndarray, reviews: Labelled) -> Callable[..., Any]:
    """make_batches(kind, size=7): batches for a model of this kind."""

    def make(kind: str, size: int = 7) -> Any:
        key = Key(0).fold("batches")
        if kind == "LanguageModel":
            return TextBatches(text[:600], size, CONTEXT, key)
        return LabelledBatches(reviews, size, MAX_LENGTH, key)

    return make


@pytest.fixture(scope="session")
def train_tiny(
    make_model: Callable[..., Any], make_batches: Callable[..., Any], text: np.ndarray, reviews: Labelled
) -> Callable[..., Any]:
    """train_tiny(kind, out, steps, ...) trains a tiny model and returns (state, model, optimizer).

    `total` is the schedule's length; `batches` wraps the batches; `prepare` is called with model and optimizer before
    training; other options are those of `train`.
    """

    def run(
        kind: str,
        out: Path,
        steps: int,
        device: Device = CPU,
        count: int | None = None,
        precision: str = "float32",
        total: int = 20,
        batches: Callable[[Any, Any], Any] = lambda batches, model: batches,
        prepare: Callable[[Any, Any], None] = lambda model, optimizer: None,
        model_options: dict[str, Any] = {},  # noqa: B006
        model_seed: int = 0,
        make_optimizer: Callable[..., Any] | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], Any, Any]:
        model = make_model(kind, device, seed=model_seed, **{"dropout": 0.2, **model_options})
        make_optimizer = make_optimizer or {"LanguageModel": Adam, "Classifier": AdamW}[kind]
        optimizer = make_optimizer(model.parameters(), 0.01)
        prepare(model, optimizer)
        count = count or (2 if device is CPU else 1)
        with Replicas(model, count, micro_batch=3, precision=precision) as replicas:
            if kind == "LanguageModel":
                held_out, select = lambda: evaluate_language_model(replicas, text[600:]), ("bits_per_byte", "min")
            else:
                held_out = lambda: evaluate_classifier(replicas, reviews, MAX_LENGTH)  # noqa: E731
                select = ("accuracy", "max")
            settings = {"evaluate": held_out, "select": select, "evaluate_every": 4, "snapshot_every": 3}
            settings |= {"log_every": 1, "identity": {"corpus": "tiny"}, **options}
            schedule = Cosine(0.01, 4, total)
            data = batches(make_batches(kind), model)
            state = train(replicas, optimizer, schedule, data, steps, out, **settings)
        return state, model, optimizer

    return run

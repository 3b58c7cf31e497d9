"""Reviews with and without labels, for a classifier that also learns from what an earlier one predicts.

Source: Xie, Luong, Hovy, Le, "Self-training with Noisy Student improves ImageNet classification", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ..checks import expect_probabilities
from ..data import Imdb, Labelled, LabelledBatches
from ..parallel.replicas import Replicas
from ..shell.progress import counted
from .evidence import Evidence, fit_evidence
from .stacking import predict_classes, stack_weights, stacked


class Reviews:
    """A dataset of reviews, with a linear model of n-grams of up to `order` words of its training part."""

    def __init__(self, data: Imdb, order: int) -> None:
        self.data, self.order = data, order
        self.train, self.validation, self.test, self.vocabulary = (
            data.train,
            data.validation,
            data.test,
            data.vocabulary,
        )

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    @cached_property
    def unlabelled(self) -> list[np.ndarray]:
        """The reviews without labels, except copies of training reviews."""
        known = {ids.tobytes() for ids in self.train.ids}
        return [ids for ids in self.data.unlabelled if ids.tobytes() not in known]

    @cached_property
    def linear(self) -> Evidence:
        """The linear model."""
        return fit_evidence(self.train.ids, self.train.labels, self.order)

    def logits(self, texts: Labelled) -> np.ndarray:
        """The linear model's logit for each text."""
        return self.linear.logits(counted(texts.ids, "scoring with the linear model", "reviews"))

    def predict(self, replicas: Replicas, texts: Labelled, max_length: int) -> np.ndarray:
        """The probabilities, (texts, 2), that a classifier and the linear model predict together. Their weights are
        fitted to the validation reviews.
        """
        held_out = self.validation
        parts = [held_out] if texts is held_out else [held_out, texts]
        predicted = [predict_classes(replicas, part, max_length, "both") for part in parts]

        def together() -> np.ndarray:  # in rank 0, since each rank has its own linear model
            logits = [self.logits(part) for part in parts]
            return stacked(predicted[-1], logits[-1], stack_weights(predicted[0], logits[0], held_out.labels))

        return replicas.ranks.from_first(together)

    def with_pseudo_labels(self, replicas: Replicas | None, max_length: int) -> Labelled:
        """The training reviews, and the unlabelled ones with the probabilities that a classifier and the linear model
        predict for them. Without a classifier all are 0.5, until those of a snapshot are loaded.
        """
        known, unlabelled = self.train, self.unlabelled
        labels = np.full((len(known.labels) + len(unlabelled), 2), 0.5, np.float32)
        if replicas is not None:
            predicted = self.predict(replicas, Labelled(unlabelled, np.empty(0)), max_length).astype(np.float32)
            labels = np.concatenate([np.eye(2, dtype=np.float32)[known.labels], predicted])
        return Labelled([*known.ids, *unlabelled], labels)


class PseudoLabelled(LabelledBatches):
    """Batches whose labels are saved with the run, so that it resumes with the same ones."""

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"labels": self.dataset.labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"labels"}:
            raise ValueError(f"pseudo-labels: expected a state with labels, got {', '.join(state) or 'an empty one'}")
        expect_probabilities("pseudo-labels", state["labels"], self.dataset.labels.shape)
        self.dataset = replace(self.dataset, labels=state["labels"])

"""A classifier that reads, beside each word, what a linear model says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..backend import Array
from ..checks import expect_floating, expect_positive, expect_shape
from ..models.classifier import Classifier, LogitsCache
from ..rng import Key
from .embeddings import Features


class EvidenceClassifier(Classifier):
    """A `Classifier` of two classes that also reads numbers for each word. Positive ones speak for class 1.

    evidence: I, the numbers for each word, such as those of `find_evidence`. The other arguments are those of
    `Classifier`. evidence (B, T, I) is read with the embedding of its word. `backward` returns its gradient, or None if
    the body is frozen.

    The linear model's own logits are not read: a transformer that sees them in training learns only to correct the
    linear model, and its corrections are right on training texts alone. In evaluation the two may decide together: see
    `stacked`.

    Source: Wang, Manning, "Baselines and bigrams", 2012, for the linear model; Mesnil et al., "Ensemble of generative
    and discriminative techniques for sentiment analysis of movie reviews", 2014, for joining it with another model.
    """

    fixed: ClassVar[Mapping[str, str]] = {
        "num_classes": "has two classes",
        "units": "reads words",
    }

    def __init__(
        self,
        vocab_size: int,
        evidence: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        pool: str = "mean",
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(evidence=evidence)
        if pool == "none":
            raise ValueError("pool: expected one that gives a vector for the whole text, got 'none'")
        body["embeddings"] = [*(body.get("embeddings") or ()), {"layer": Features, "width": evidence}]
        super().__init__(vocab_size, 2, d_model, heads, depth, max_length, pool, key, **body)
        self.evidence = evidence

    def logits(
        self,
        ids: Array,
        evidence: Array,
        lengths: Array | None = None,
        key: Key | None = None,
    ) -> tuple[Array, LogitsCache]:
        """Logits (B, 2) of ids (B, T) and evidence (B, T, I); lengths (B,), or None if all texts have T words.

        `forward` takes the same arguments and returns log-probabilities.
        """
        self.body.check(ids)
        expect_floating(evidence=evidence)
        expect_shape("evidence", evidence, "B T I", B=ids.shape[0], T=ids.shape[1], I=self.evidence)
        return super().logits(ids, lengths, key, features=evidence)

    def loss(
        self,
        ids: Array,
        evidence: Array,
        lengths: Array | None,
        labels: Array,
        key: Key | None = None,
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,), or of probabilities (B, 2): see `Classifier`."""
        z, logits = self.logits(ids, evidence, lengths, key)
        loss, cross_entropy = self.cross_entropy(z, labels)
        return loss, (logits, cross_entropy)

    def check_batch(self, ids: Array, evidence: Array, lengths: Array | None, labels: Array) -> None:
        super().check_batch(ids, lengths, labels)

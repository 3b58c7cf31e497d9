"""A classifier that reads, beside each word, what a linear model says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..nn import Linear
from ..ops.checks import expect_floating, expect_positive, expect_shape
from ..ops.precision import widen
from ..rng import Key, Zeros
from .classifier import Classifier


class EvidenceLogitsCache(NamedTuple):
    classifier: Any
    sums: Any
    within: Array  # (B, T, 1), 1 in the texts and 0 in the padding


class EvidenceClassifier(Classifier):
    """A `Classifier` of two classes that also reads numbers for each word. Positive ones speak for class 1.

    evidence: I, the numbers for each word, such as those of `data.find_evidence`. The other arguments are those of
    `Classifier`. evidence (B, T, I) is used twice: with the embedding of its word, and in a sum over the text, which
    goes straight to the logits. So the transformer starts where the linear model ends: the weights of the sum start at
    1/2 for class 1 and −1/2 for class 0, whose difference is the linear model's own logit.

    Forward, with n_b for the length of text b:

        n := lengths        features = evidence        deep = classifier(features)
        s_bi = Σ_{t < n_b} evidence_bti        z_bk = deep_bk + Σ_i s_bi wide.w_ik

    Backward. Both terms of z get dz. By `linear`, and since a sum passes its gradient on to each of its terms,

        ds_bi = Σ_k dz_bk wide.w_ik        dwide.w_ik = Σ_b s_bi dz_bk

    evidence is used twice, so its gradient is the sum of two. The classifier returns that of features:

        dfeatures = ∂L/∂features        devidence_bti = dfeatures_bti + [t < n_b] ds_bi

    In code:

        dfeatures = super().logits_backward(dz, cache.classifier)
        ds = self.wide.backward(dz, cache.sums)
        return dfeatures + cache.within * ds[:, None, :]

    Source: Cheng et al., "Wide & deep learning for recommender systems", 2016, for a sum of both; Wang, Manning,
    "Baselines and bigrams", 2012, for the linear model.
    """

    fixed: ClassVar[Mapping[str, str]] = {
        "num_classes": "has two classes",
        "units": "reads words",
        "features": "has them from evidence=I",
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
        super().__init__(vocab_size, 2, d_model, heads, depth, max_length, pool, key, features=evidence, **body)
        self.wide = Linear(evidence, 2, False, Zeros())
        self.wide.w.data[...] = np.array([-0.5, 0.5], np.float32)

    def logits(
        self, ids: Array, evidence: Array, lengths: Array | None = None, key: Key | None = None
    ) -> tuple[Array, EvidenceLogitsCache]:
        """Logits (B, 2) of ids (B, T) and evidence (B, T, I); lengths (B,), or None if all texts have T words.

        `forward` takes the same arguments and returns log-probabilities.
        """
        self.body.check(ids)
        expect_shape("evidence", evidence, "B T I", B=ids.shape[0], T=ids.shape[1], I=len(self.wide.w.data))
        expect_floating(evidence=evidence)
        deep, classifier = super().logits(ids, lengths, key, features=evidence)
        xp, (B, T) = array_module(ids), ids.shape
        ends = xp.full(B, T) if lengths is None else lengths
        within = (xp.arange(T) < ends[:, None])[:, :, None].astype(evidence.dtype)  # (B, T, 1)
        s = widen(evidence * within).sum(axis=1)  # (B, I)
        wide, sums = self.wide.forward(s.astype(evidence.dtype, copy=False))
        z, _ = ops.add(deep, wide)
        return z, EvidenceLogitsCache(classifier, sums, within)

    def logits_backward(self, dz: Array, cache: EvidenceLogitsCache) -> Array:
        """The gradient of evidence, given the gradient of the logits."""
        dfeatures = super().logits_backward(dz, cache.classifier)
        ds = self.wide.backward(dz, cache.sums)
        return dfeatures + cache.within * ds[:, None, :]

    def loss(
        self, ids: Array, evidence: Array, lengths: Array | None, labels: Array, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,)."""
        z, logits = self.logits(ids, evidence, lengths, key)
        loss, cross_entropy = ops.cross_entropy(z, labels)
        return loss, (logits, cross_entropy)

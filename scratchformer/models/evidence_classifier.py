"""A classifier that reads, beside each word, what a linear model says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..ops.checks import expect_floating, expect_positive, expect_shape
from ..ops.precision import widen
from ..rng import Key
from .classifier import AdversarialCache, Classifier, LogitsCache


class EvidenceLogitsCache(NamedTuple):
    classifier: Any
    within: Array  # (B, T, 1), 1 in the texts and 0 in the padding


class EvidenceClassifier(Classifier):
    """A `Classifier` of two classes that also reads numbers for each word. Positive ones speak for class 1.

    evidence: I, the numbers for each word, such as those of `data.find_evidence`. The other arguments are those of
    `Classifier`. evidence (B, T, I) is read with the embedding of its word. In evaluation, without a key, the sum of
    all evidence is also added to the logit of the transformer. It is the linear model's own logit, without its bias and
    for the words that are read. So two models decide together. In training the sum is left out: a transformer that sees
    it learns only to correct the linear model, and its corrections are right on training texts alone.

    Forward, with n_b for the length of text b and k for class 0 or 1:

        n := lengths        features = evidence        deep = classifier(features)
        s_b = Σ_{t < n_b} Σ_i evidence_bti        z_bk = deep_bk + (k − 1/2) s_b

    Backward. Both terms of z get dz, and a sum passes its gradient on to each of its terms:

        ds_b = Σ_k dz_bk (k − 1/2)

    evidence is used twice, so its gradient is the sum of two. The classifier returns that of features:

        dfeatures = ∂L/∂features        devidence_bti = dfeatures_bti + [t < n_b] ds_b

    In code:

        dfeatures = super().logits_backward(dz, cache.classifier)
        ds = (dz[:, 1] - dz[:, 0]) / 2
        return dfeatures + cache.within * ds[:, None, None]

    In training z is deep, and devidence is dfeatures.

    reads_evidence: whether the transformer reads evidence beside the words. If not, it reads the words alone, and
    evidence is only added to the logit in evaluation: deep = classifier(), and dfeatures is 0. This is for a model that
    learns from predictions which already include evidence, as in examples/reviews.py. A transformer that reads evidence
    would learn to repeat it, and evidence would then count twice.

    Source: Wang, Manning, "Baselines and bigrams", 2012, for the linear model; Mesnil et al., "Ensemble of generative
    and discriminative techniques for sentiment analysis of movie reviews", 2014, for adding the two.
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
        reads_evidence: bool = True,
        **body: Any,
    ) -> None:
        expect_positive(evidence=evidence)
        if pool == "none":
            raise ValueError("pool: expected one that gives a vector for the whole text, got 'none'")
        features = evidence if reads_evidence else None
        super().__init__(vocab_size, 2, d_model, heads, depth, max_length, pool, key, features=features, **body)
        self.evidence, self.reads_evidence = evidence, reads_evidence

    def logits(
        self,
        ids: Array,
        evidence: Array,
        lengths: Array | None = None,
        key: Key | None = None,
        noise: Callable[[Array], Array] | None = None,
    ) -> tuple[Array, Any]:
        """Logits (B, 2) of ids (B, T) and evidence (B, T, I); lengths (B,), or None if all texts have T words.

        `forward` takes the same arguments and returns log-probabilities. key: None in evaluation. noise: see
        `Body.forward`.
        """
        self.body.check(ids)
        expect_floating(evidence=evidence)
        expect_shape("evidence", evidence, "B T I", B=ids.shape[0], T=ids.shape[1], I=self.evidence)
        features = evidence if self.reads_evidence else None
        deep, classifier = super().logits(ids, lengths, key, features=features, noise=noise)
        if key is not None:
            return deep, classifier
        xp, (B, T) = array_module(ids), ids.shape[:2]
        ends = xp.full(B, T) if lengths is None else lengths
        within = (xp.arange(T) < ends[:, None])[:, :, None].astype(evidence.dtype)  # (B, T, 1)
        s = widen(evidence * within).sum(axis=(1, 2))  # (B,)
        halves = xp.stack([-s / 2, s / 2], axis=1).astype(deep.dtype, copy=False)  # (B, 2)
        z, _ = ops.add(deep, halves)
        return z, EvidenceLogitsCache(classifier, within)

    def logits_backward(self, dz: Array, cache: Any) -> Any:
        """The gradient of evidence, given the gradient of the logits. In training it is None if no gradient
        reaches evidence: the body is frozen, or does not read it.
        """
        if isinstance(cache, LogitsCache):  # in training
            return super().logits_backward(dz, cache)
        dfeatures = super().logits_backward(dz, cache.classifier)
        ds = (dz[:, 1] - dz[:, 0]) / 2
        if dfeatures is None:  # of a frozen body, or of one that reads no evidence
            return array_module(ds).repeat(cache.within * ds[:, None, None], self.evidence, axis=2)
        return dfeatures + cache.within * ds[:, None, None]

    def loss(
        self,
        ids: Array,
        evidence: Array,
        lengths: Array | None,
        labels: Array,
        key: Key | None = None,
        noise: Callable[[Array], Array] | None = None,
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,), or of probabilities (B, 2): see `Classifier`."""
        z, logits = self.logits(ids, evidence, lengths, key, noise)
        loss, cross_entropy = self.cross_entropy(z, labels)
        if key is None or noise is not None or not self.adversarial:
            return loss, (logits, cross_entropy)
        self.expect_noise()
        again = partial(self.loss, ids, evidence, lengths, labels, key)
        return loss, AdversarialCache(logits, cross_entropy, lengths, again)

    def check_batch(self, ids: Array, evidence: Array, lengths: Array | None, labels: Array) -> None:
        super().check_batch(ids, lengths, labels)

"""Layers and models that only the record results need, and mistakes in them."""

from __future__ import annotations

from functools import partial
from typing import Any

from .. import models, records
from ..records.embeddings import EmbeddingBag
from ..rng import Key
from ..testing.draw import Draw
from .derived import derived
from .entry import Entry, LayerCase, on
from .mistake import Mistake

NGRAMS = [{"layer": records.NGrams, "orders": [2], "buckets": 3}]


def recalling_model(d: Draw) -> LayerCase:
    embeddings = [{"layer": records.Recall, "orders": [1, 2]}]
    options: dict[str, Any] = dict(embeddings=embeddings, norm="pre", dropout=0.2, key=Key(d.seed))
    model = models.LanguageModel(d.V, d.C, d.H, 1, d.T + 1, **options)
    d.sizes["J"] = 3
    return on(model, d.integers("B T J", d.V), key=d.key)  # each id is valid in any column: the checks exchange them


def evidence_classifier(d: Draw, **options: Any) -> LayerCase:
    model = records.EvidenceClassifier(d.V, d.I, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return on(model, d.integers("B T", d.V), d("B T I"), d.lengths(), key=d.key)


def bidirectional_language_model(d: Draw) -> LayerCase:
    model = records.BidirectionalLanguageModel(d.V, d.C, d.H, 1, d.T + 1, models.LanguageModel, Key(d.seed))
    return on(model, d.integers("B T", d.V), key=d.key)


def bidirectional_classifier(d: Draw) -> LayerCase:
    model = records.BidirectionalClassifier(d.V, d.K, d.C, d.H, 1, d.T + 1, key=Key(d.seed), causal=True)
    return on(model, d.integers("B T", d.V), d.lengths())


ENTRIES = [
    Entry("EmbeddingBag")
    .case("", lambda d: on(EmbeddingBag(d.V, d.C), d.integers("B T I", d.V)))
    .derivation("", lambda d: derived(d, EmbeddingBag(d.V, d.C), d.integers("B T K", d.V))),
    Entry("LanguageModel with recall").case("", recalling_model),
    Entry("EvidenceClassifier")
    .case("mean", partial(evidence_classifier, dropout=0.2))
    .case("max, pre", partial(evidence_classifier, pool="max", norm="pre", embeddings=NGRAMS)),
    Entry("BidirectionalLanguageModel").case("", bidirectional_language_model),
    Entry("BidirectionalClassifier").case("", bidirectional_classifier),
]
MISTAKES = [
    Mistake(
        "an ensemble predicts the mean of the logarithms",
        file="records/translators.py",
        replace={"return top + np.log(sum(np.exp(each - top) for each in log_p))": "return np.mean(log_p, axis=0)"},
        tests="tests/records/test_translators.py -k ensemble",
    ),
    Mistake(
        "what a model writes backwards is not turned round",
        file="records/translators.py",
        replace={"return ids[::-1] if writes_backwards(model) else ids": "return ids"},
        tests="tests/records/test_translators.py -k read",
    ),
    Mistake(
        "the nearest neighbours are those with the largest product",
        file="records/neighbours.py",
        replace={"        scores -= self.halves[blocks][..., None, :]\n": ""},
        tests="tests/records/test_neighbours.py -k mixed",
    ),
]

"""Parts of the programs in examples/records, whose results are better than those of a plain transformer.

A linear model of n-grams whose evidence a classifier reads, and with which it decides; language models of both
directions that become a classifier; ensembles, and translators that write in both directions; nearest neighbours among
known translations; what followed earlier n-grams of a text; and models that learn from a text while they read it.
"""

from contextlib import suppress
from importlib.util import find_spec

from ..dispatch import turned_off, when_fast
from .bidirectional import BidirectionalClassifier, BidirectionalLanguageModel
from .dynamic import evaluate_dynamic, observe_gradients, score_dynamically
from .dynamic_rms import DynamicRMS
from .embeddings import Features, NGrams, Recall
from .ensembles import MODELS_OPTION, load_finished, member, other_members
from .evidence import Evidence, TextEvidence, find_evidence, fit_evidence
from .evidence_classifier import EvidenceClassifier
from .evident import EvidenceBatch, Evident, with_evidence
from .neighbours import with_neighbours
from .ngrams import ngram_buckets, recall
from .pseudo_labels import PseudoLabelled, Reviews
from .recall import recalling, searching, with_recalled
from .stacking import predict_classes, scores_of_classes, stack_weights, stacked
from .start_from import start_from
from .translators import BackwardEncoderDecoder, as_written, search_together, translate_together

__all__ = [
    "MODELS_OPTION",
    "BackwardEncoderDecoder",
    "BidirectionalClassifier",
    "BidirectionalLanguageModel",
    "DynamicRMS",
    "Evidence",
    "EvidenceBatch",
    "EvidenceClassifier",
    "Evident",
    "Features",
    "NGrams",
    "PseudoLabelled",
    "Recall",
    "Reviews",
    "TextEvidence",
    "as_written",
    "evaluate_dynamic",
    "find_evidence",
    "fit_evidence",
    "load_finished",
    "member",
    "ngram_buckets",
    "observe_gradients",
    "other_members",
    "predict_classes",
    "recall",
    "recalling",
    "score_dynamically",
    "scores_of_classes",
    "search_together",
    "searching",
    "stack_weights",
    "stacked",
    "start_from",
    "translate_together",
    "with_evidence",
    "with_neighbours",
    "with_recalled",
]


def load_twin() -> None:
    """Register the fast twin of `neighbours.nearest_keys`, unless Numba is missing or the environment turns it off."""
    if find_spec("numba") and not turned_off():
        with suppress(ImportError):  # of which `kernels` warns
            from . import numba_neighbours as numba_neighbours


when_fast(load_twin)

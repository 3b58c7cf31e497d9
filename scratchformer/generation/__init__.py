"""Generation of text: sampling, beam search, and the key-value caches."""

from .beam import Hypothesis, beam_search
from .bleu import bleu
from .cache import DecoderCache, KeyValueCache, SegmentCache, cache_for
from .generate import generate, printable, stream_text
from .quantize import quantize
from .sampling import probabilities, sample
from .translation import translate

__all__ = [
    "DecoderCache",
    "Hypothesis",
    "KeyValueCache",
    "SegmentCache",
    "beam_search",
    "bleu",
    "cache_for",
    "generate",
    "printable",
    "probabilities",
    "quantize",
    "sample",
    "stream_text",
    "translate",
]

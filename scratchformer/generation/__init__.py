"""Generation of text: sampling, beam search, and the key-value caches."""

from .beam import Hypothesis, beam_search
from .bleu import bleu
from .cache import DecoderCache, KeyValueCache, SegmentCache, cache_for
from .chat import Chat, ChatTemplate
from .generate import generate, printable, stream_text, stream_texts
from .quantize import quantize
from .sampling import penalised, probabilities, sample
from .translation import translate

__all__ = [
    "Chat",
    "ChatTemplate",
    "DecoderCache",
    "Hypothesis",
    "KeyValueCache",
    "SegmentCache",
    "beam_search",
    "bleu",
    "cache_for",
    "generate",
    "penalised",
    "printable",
    "probabilities",
    "quantize",
    "sample",
    "stream_text",
    "stream_texts",
    "translate",
]

"""Generating text: sampling, and the key-value cache."""

from .cache import KeyValueCache
from .generate import generate, printable, stream_text
from .sampling import probabilities, sample

__all__ = ["KeyValueCache", "generate", "printable", "probabilities", "sample", "stream_text"]

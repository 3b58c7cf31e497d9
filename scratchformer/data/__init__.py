"""Data: reading corpora, building vocabularies, and cutting both into batches."""

from .batching import LabelledBatch, LabelledBatches, TextBatch, TextBatches, in_order, windows
from .download import DataError, NoConnection, cache_dir, fetch, verify
from .enwik8 import STANDARD_LIBRARY, VALIDATION_BYTES, Corpus, load_bytes, load_enwik8, load_standard_library
from .imdb import Imdb, Labelled, load_imdb, read_reviews, read_splits
from .vocabulary import Vocabulary, tokenize

__all__ = [
    "STANDARD_LIBRARY",
    "VALIDATION_BYTES",
    "Corpus",
    "DataError",
    "Imdb",
    "Labelled",
    "LabelledBatch",
    "LabelledBatches",
    "NoConnection",
    "TextBatch",
    "TextBatches",
    "Vocabulary",
    "cache_dir",
    "fetch",
    "in_order",
    "load_bytes",
    "load_enwik8",
    "load_imdb",
    "load_standard_library",
    "read_reviews",
    "read_splits",
    "tokenize",
    "verify",
    "windows",
]

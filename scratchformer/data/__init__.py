"""Corpora, vocabularies and batches."""

from ..shell.files import cache_dir
from .batching import (
    DrawnBatches,
    Labelled,
    LabelledBatch,
    LabelledBatches,
    SegmentBatch,
    SegmentBatches,
    TextBatch,
    TextBatches,
    in_order,
    windows,
)
from .digits import Digits, Images, load_digits
from .download import DataError, NoConnection, fetch
from .enwik8 import (
    STANDARD_LIBRARY,
    VALIDATION_BYTES,
    Corpus,
    as_text,
    load_enwik8,
    load_standard_library,
    load_text,
)
from .imdb import Imdb, load_imdb, load_imdb_subwords, read_splits
from .masked import MaskedBatch, MaskedBatches, single_texts
from .multi30k import load_multi30k
from .pairs import Pairs, ParallelCorpus
from .photos import load_photos
from .subwords import PublishedTokenizer, Subwords
from .translation import TokenPairs, TranslationBatch, TranslationBatches, encode_pairs, pairs_in_order
from .vocabulary import Vocabulary, tokenize

__all__ = [
    "STANDARD_LIBRARY",
    "VALIDATION_BYTES",
    "Corpus",
    "DataError",
    "Digits",
    "DrawnBatches",
    "Images",
    "Imdb",
    "Labelled",
    "LabelledBatch",
    "LabelledBatches",
    "MaskedBatch",
    "MaskedBatches",
    "NoConnection",
    "Pairs",
    "ParallelCorpus",
    "PublishedTokenizer",
    "SegmentBatch",
    "SegmentBatches",
    "Subwords",
    "TextBatch",
    "TextBatches",
    "TokenPairs",
    "TranslationBatch",
    "TranslationBatches",
    "Vocabulary",
    "as_text",
    "cache_dir",
    "encode_pairs",
    "fetch",
    "in_order",
    "load_digits",
    "load_enwik8",
    "load_imdb",
    "load_imdb_subwords",
    "load_multi30k",
    "load_photos",
    "load_standard_library",
    "load_text",
    "pairs_in_order",
    "read_splits",
    "single_texts",
    "tokenize",
    "windows",
]

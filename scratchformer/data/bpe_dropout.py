"""BPE-dropout: random splits of the words of a training text, different in each epoch.

Byte-pair encoding always splits a word in the same way. A frequent word is then one token, and the model learns nothing
about its parts. BPE-dropout skips merges at random, so the model sees the same word split in several ways. This noise
regularises training on a small corpus, and related words share more sub-words. For translation no merge is skipped.

Source: Provilkov, Emelianenko, Voita, "BPE-dropout: simple and effective subword regularization", 2020.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..ops.checks import expect_fraction, expect_instance, expect_positive, expect_texts
from ..rng import Key, expect_key
from ..shell.progress import counted
from .subwords import UNKNOWN, Subwords


def split_word(word: str, ranks: Mapping[tuple[str, str], int], p: float, draw: np.random.Generator) -> list[str]:
    """The pieces of a word by byte-pair encoding in which merges are skipped with probability p.

    ranks: the rank of each pair of pieces in the list of merges, from 0. draw: the generator. The word starts as single
    characters. In each round, every merge that applies is skipped with probability p; of the others, the one with the
    lowest rank is made, the leftmost if there are several. A round without any is the last. With p = 0 this is ordinary
    byte-pair encoding.
    """
    pieces = list(word)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        kept = [pair for pair, u in zip(pairs, draw.random(len(pairs)), strict=True) if u >= p]
        if not kept:
            return pieces
        _, i = min(kept)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


class DroppedMerges:
    """Encodings of `texts` with BPE-dropout.

    For each word, `variants` random splits are drawn once, from `key`; in `encode`, each occurrence takes one of them
    at random. subwords: from `Subwords.bpe`. p: the probability of skipping a merge; the paper recommends 0.1.

    Raises ValueError if `subwords` is of another kind, or for p outside [0, 1) or variants below 1; TypeError for
    arguments of a wrong type.
    """

    def __init__(self, subwords: Subwords, texts: Sequence[str], p: float, key: Key, variants: int = 16) -> None:
        expect_instance("subwords", subwords, Subwords)
        expect_texts("texts", texts)
        expect_fraction("p", p)
        expect_key(key)
        expect_positive(variants=variants)
        tokenizer, model = subwords.tokenizer, json.loads(subwords.tokenizer.to_str())["model"]
        if model.get("type") != "BPE" or tokenizer.token_to_id(UNKNOWN) is None:
            raise ValueError("subwords: BPE-dropout needs a vocabulary from Subwords.bpe")
        ids, unknown = model["vocab"], tokenizer.token_to_id(UNKNOWN)
        merges = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        ranks = {(first, second): i for i, (first, second) in enumerate(merges)}
        places: dict[str, int] = {}  # of words, in the order in which they first occur
        rows = []
        for text in counted(texts, "splitting words", "texts"):
            words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
            rows.append([places.setdefault(word, len(places)) for word, _ in words])
        draw = key.generator()
        found = [
            np.array([ids.get(piece, unknown) for piece in split_word(word, ranks, p, draw)], np.int32)
            for word in counted(places, "drawing sub-words", "words")
            for _ in range(variants)
        ]
        self.variants = variants
        self.pieces = np.concatenate([*found, np.empty(0, np.int32)])  # of all variants of all words
        self.sizes = np.array([len(pieces) for pieces in found], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.lengths = np.array([len(row) for row in rows], np.int64)  # of texts, in words
        self.words = np.array([place for row in rows for place in row], np.int64)

    def encode(self, key: Key) -> list[np.ndarray]:
        """The token ids of every text, int32 (T,) each. Another key gives other ways to split the words."""
        expect_key(key)
        if not len(self.lengths):
            return []
        chosen = self.words * self.variants + key.generator().integers(0, self.variants, len(self.words))
        sizes = self.sizes[chosen]
        ends = np.cumsum(sizes)
        places = np.arange(sizes.sum()) + np.repeat(self.starts[chosen] - (ends - sizes), sizes)
        cuts = np.append(0, ends)[np.cumsum(self.lengths)]  # in tokens
        return np.split(self.pieces[places], cuts[:-1])

"""BPE-dropout: the words of a training text, split into other sub-words in every epoch.

Byte-pair encoding always splits a word in the same way. A model then meets the pieces of a frequent word only as a
whole, and learns little about them. If some merges are left out at random, it sees the same word in several ways: that
is noise, which keeps a small corpus from being memorised, and it shows how words are related. Translation uses the
usual encoding, in which nothing is left out.

Source: Provilkov, Emelianenko, Voita, "BPE-dropout: simple and effective subword regularization", 2020.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..ops.checks import expect_fraction, expect_instance, expect_positive, expect_texts
from ..progress import counted
from ..rng import Key, expect_key
from .subwords import UNKNOWN, Subwords


def split_word(word: str, ranks: Mapping[tuple[str, str], int], p: float, draw: np.random.Generator) -> list[str]:
    """The pieces of a word by byte-pair encoding, in which a merge is left out with probability p.

    ranks: the place of each pair of pieces among the merges. The word begins as single characters. In every round each
    merge that applies is left out with probability p, and the first of the others is made. The word is finished when a
    round has none. With p = 0 this is byte-pair encoding.
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
    """Encodings of `texts` with BPE-dropout: a word has `variants` ways to be split, drawn once, and each time that it
    occurs one of them is drawn.

    subwords: from `Subwords.bpe`. p: the probability that a merge is left out; the paper recommends 0.1. Drawing the
    ways once takes some seconds, and encoding all texts then is as fast as looking words up. Raises ValueError for
    another kind of vocabulary, and for numbers out of range.
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
        chosen = self.words * self.variants + key.generator().integers(0, self.variants, len(self.words))
        sizes = self.sizes[chosen]
        ends = np.cumsum(sizes)
        places = np.arange(sizes.sum()) + np.repeat(self.starts[chosen] - (ends - sizes), sizes)
        cuts = np.append(0, ends)[np.cumsum(self.lengths)]  # in tokens
        return np.split(self.pieces[places], cuts[:-1])

"""Vocabularies of words: from words to ids and back.

A vocabulary is a list of words, and the id of a word is its index in the list. Id 0 is padding, id 1 any word that is
not in the list.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..checks import expect_array, expect_at_least, expect_ids, expect_instance, expect_shape, expect_texts
from ..shell.files import replacing
from ..shell.reading import MAX_VOCABULARY, DataError, read_text
from ..shell.text import shown

PAD, UNKNOWN = 0, 1
SPECIALS = ("<pad>", "<unk>")

_LETTERS = r"[^\W_]+"  # letters and digits of any script
_WORD = re.compile(_LETTERS)
_TOKEN = re.compile(rf"{_LETTERS}(?:'{_LETTERS})*|\S")


def tokenize(text: str) -> list[str]:
    """The words and punctuation marks of `text`, in lower case.

    A word is a run of letters and digits, which may contain apostrophes ("don't", curly or straight). Every other
    character that is not white space is a token of its own, also a combining mark, such as a vowel sign of Devanagari.
    The HTML line break `<br />` counts as white space.
    """
    expect_instance("text", text, str)
    return _TOKEN.findall(_plain(text))


def has_word(text: str) -> bool:
    """Whether `text` contains a word; punctuation and `<br />` do not count."""
    return _WORD.search(_plain(text)) is not None


def _plain(text: str) -> str:
    return text.lower().replace("<br />", " ").replace("’", "'")


def expect_sequence(ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """`ids` as an array (T,) of integers from 0 to `size` − 1; raises an error if they are not."""
    array = expect_array("ids", ids)
    if not array.size:
        return array.astype(np.int64)
    expect_shape("ids", array, "T")
    expect_ids("ids", array, size)
    return array


class Vocabulary:
    """A list of words: `<pad>` with id 0, `<unk>` with id 1, then the given ones.

    The attribute `words` is the whole list, including these two. `encode` finds a word only if `tokenize` makes it, so
    words must be in lower case. Raises ValueError if a word occurs twice, is empty or contains white space (`save`
    writes one word per line).
    """

    words: tuple[str, ...]

    def __init__(self, words: Iterable[str]) -> None:
        expect_texts("words", words)
        self.words = (*SPECIALS, *words)
        for i, word in enumerate(self.words):
            expect_instance(f"words: number {i}", word, str)
        self._index = {word: i for i, word in enumerate(self.words)}
        if len(self._index) < len(self.words):
            word, count = Counter(self.words).most_common(1)[0]
            raise ValueError(f"words: {shown(word)} occurs {count} times")
        for i, word in enumerate(self.words):
            if word.split() != [word]:
                raise ValueError(f"words: number {i}, {shown(word)}, is empty or contains white space")

    @classmethod
    def build(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """The vocabulary of the most frequent words of `texts`: at most `size`, including `<pad>` and `<unk>`.

        Equally frequent words are sorted alphabetically, so the order of `texts` does not matter.
        """
        expect_at_least(0, size=size)
        expect_texts("texts", texts)
        if size < len(SPECIALS):
            raise ValueError(f"size: expected at least {len(SPECIALS)}, for {' and '.join(SPECIALS)}, got {size}")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(tokenize(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: size - len(SPECIALS)])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """The ids of the words of `text`, int32 (T,); a word that is not in the list has id 1."""
        number = self._index.get
        return np.array([number(word, UNKNOWN) for word in tokenize(text)], dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The words of `ids` (T,), separated by spaces. Raises IndexError if an id is out of range, TypeError or
        ValueError unless they are one row of integers.
        """
        return " ".join(self.words[i] for i in expect_sequence(ids, len(self)).tolist())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the words in order, in hexadecimal: equal only for equal vocabularies."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words to `path` in order, UTF-8, one per line; a failure leaves no partial file."""
        with replacing(Path(path)) as unfinished:
            unfinished.write_bytes("".join(f"{word}\n" for word in self.words).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """The vocabulary that `save` wrote to `path`. Raises DataError if the file is missing or damaged."""
        lines = read_text(path, max_bytes=MAX_VOCABULARY).split("\n")
        if lines.pop() != "":
            raise DataError(f"{path} is damaged: its last line is cut short")
        if tuple(lines[: len(SPECIALS)]) != SPECIALS:
            raise DataError(f"{path} is damaged: it does not begin with {' and '.join(SPECIALS)}")
        try:
            return cls(lines[len(SPECIALS) :])
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from error

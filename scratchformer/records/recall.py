"""Texts with the tokens that followed earlier n-grams, for models with `Recall`: whole texts and growing ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import Array, to_cpu
from ..checks import checked_on_host, expect_array, expect_ids, expect_integers, expect_range, expect_shape
from ..data import Corpus, tokens_of
from ..generation import KeyValueCache
from ..parallel.ranks import Ranks
from ..shell.progress import progress_bar
from ..shell.text import one_line
from ..training import best_snapshot, load_snapshot
from ..training.start import find_program, open_run
from .ngrams import expect_orders, recalled


def recalling(text: np.ndarray, orders: Sequence[int]) -> np.ndarray:
    """A text as rows for a model with `Recall`: each token, and what followed earlier occurrences of its n-grams.

    text: (n,), integers from 0 to 2³¹ − 2. Returns (n, 1 + len(orders)): uint16 if all values fit, otherwise int32.
    Column 0 is the token, and the others are those of `recall`, with the whole text as one sequence. `TextBatches`,
    `windows` and the functions that use them take these rows in place of tokens. To find matches in earlier parts of a
    text, such as the training part, call this before the text is split. It takes time O(n log n), and 70 bytes a token
    beside the rows. Raises ValueError for a wrong shape, wrong lengths or values out of range, TypeError for anything
    but integers.
    """
    expect_shape("text", text, "n")
    expect_integers("text", text)
    expect_range("text", text, 0, np.iinfo(np.int32).max - 1)
    expect_orders(orders)
    end = int(text.max(initial=0)) + 1
    rows = np.empty((len(text), 1 + len(orders)), np.uint16 if end < 2**16 else np.int32)
    rows[:, 0] = text
    with progress_bar("looking up n-grams", len(orders), "lengths") as bar:
        for i, column in recalled(text[None], orders):
            rows[:, 1 + i] = column[0]
            bar.update(1)
    return rows


def with_recalled(corpus: Corpus, orders: Sequence[int]) -> Corpus:
    """The corpus with its parts as rows (n, 1 + K) from `recalling`. Matches are searched in all that precedes a token,
    in its own part and in earlier ones.
    """
    parts = corpus.train, corpus.validation, corpus.test
    rows, ends = recalling(np.concatenate(parts), orders), np.cumsum([len(part) for part in parts])
    return Corpus(corpus.name, *np.split(rows, ends[:-1]))


class RecalledTexts:
    """B texts, and for each new token what followed earlier n-grams in its text: the rows of `recalling`.

    orders: those of `Recall`. before: the tokens (n,) with which each of the B texts begins. Tokens are kept as
    characters of a string, which Python searches fast from its end.
    """

    def __init__(self, orders: Sequence[int], before: Sequence[np.ndarray]) -> None:
        self.orders = list(orders)
        self.texts = ["".join(map(chr, tokens.tolist())) for tokens in before]

    def append(self, ids: np.ndarray) -> np.ndarray:
        """Append the tokens ids (B, T), and return their rows, int32 (B, T, 1 + len(orders))."""
        rows = np.zeros((*ids.shape, 1 + len(self.orders)), np.int32)
        rows[:, :, 0] = ids
        for b, new in enumerate(ids.tolist()):
            for t, token in enumerate(new):
                self.texts[b] += chr(token)
                rows[b, t, 1:] = self._followed(self.texts[b])
        return rows

    def _followed(self, text: str) -> list[int]:
        """For each order, 1 + the token that followed the previous occurrence of the last n-gram of a text, or 0."""
        ids = [0] * len(self.orders)
        for n in sorted({*self.orders}):
            ngram, start = text[-n:], len(text) - n
            places = [i for i, order in enumerate(self.orders) if order == n]
            for i in places:
                start = text.rfind(ngram, 0, start + n - 1) if start > 0 else -1
                if start < 0:
                    break
                ids[i] = 1 + ord(text[start + n])
            if not ids[places[0]]:
                break  # a longer n-gram has not occurred either
        return ids


class RecallCache(KeyValueCache):
    """A cache for a model with `Recall` that looks n-grams up in all the text before, and not only in what it keeps.

    before: the tokens (n,) that precede each of the B sequences.
    """

    def __init__(self, model: Any, before: Sequence[np.ndarray]) -> None:
        if (reader := getattr(getattr(model, "body", None), "column_reader", None)) is None:
            raise ValueError("before: the model reads no further columns of ids, so it takes none")
        for tokens in before:
            expect_ids("before", tokens, model.config["vocab_size"])
        super().__init__(model, len(before))
        self.recalls = False  # what its texts have taken in cannot be forgotten
        self.texts = reader.texts_after(before)

    def logits(self, ids: Array) -> Array:
        self.check(ids)
        rows = self.texts.append(to_cpu(ids)).astype(np.int64)
        with checked_on_host():
            return self._append(rows)


def open_recall_cache(before: np.ndarray, model: Any, cut: Sequence[np.ndarray]) -> RecallCache:
    """The cache for B prompts of which `cut`, each (n,), was cut off, after a text of the tokens `before` (n,)."""
    before = expect_array("before", before)
    expect_integers("before", before)
    expect_shape("before", before, "n")
    return RecallCache(model, [np.concatenate([before.astype(np.int64), row.astype(np.int64)]) for row in cut])


def searching(before: np.ndarray) -> Callable[[Any, Sequence[np.ndarray]], RecallCache]:
    """The `open_cache` of `generate` and `stream_text` for a text (n,) before the prompts."""
    return partial(open_recall_cache, before)


def in_text_of(run: Path, program: str | None) -> Callable[[Any, Sequence[np.ndarray]], RecallCache] | None:
    """`searching` in the text on which a run was trained; None, with a note, if it cannot be read.

    run: the folder, or a snapshot in it. program: the file of its program, unless that is known.
    """
    folder = run if run.is_dir() else run.parent
    try:
        names = find_program(folder, program)
        with Ranks.find() as ranks:
            opened = open_run(folder, names, "cpu", None, ranks)
            corpus = opened.load(names["data"])
            opened.expect_same_data(load_snapshot(best_snapshot(run), earlier=True))
            return searching(np.concatenate([tokens_of(part) for part in (corpus.train, corpus.validation)]))
    except (ValueError, OSError) as error:
        print(one_line(f"matches are searched only in the text that is written: {error}"), file=sys.stderr)
        return None

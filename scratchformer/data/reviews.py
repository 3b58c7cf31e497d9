"""Reviews in tables, such as the file `IMDB Dataset.csv` of Kaggle or the Parquet files of the library datasets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..rng import Key
from ..shell.reading import DataError
from ..shell.text import printable, shown
from .tables import rows
from .vocabulary import has_word

TEXT = ("review", "text", "sentence", "content")  # names of the columns that are read
LABEL = ("sentiment", "label", "class")
CLASSES = {
    **dict.fromkeys(("neg", "negative", "0", "0.0", "false"), 0),
    **dict.fromkeys(("pos", "positive", "1", "1.0", "true"), 1),
    "unsup": -1,
}
# The split of a file, or of a value in a column `split`, by what is in its name.
_SPLITS = {"unsup": re.compile("unsup|unlabel", re.I), "test": re.compile("test", re.I), "train": re.compile("", re.I)}

Reviews = dict[tuple[int, ...], str]  # texts by (label, number, rating)


def read_tables(files: Sequence[Path], path: Path) -> dict[str, Reviews]:
    """The reviews in `files`, below or at `path`, for each split (train, test, unsup), numbered in their order.

    Each file has a column with the text (review, text, sentence or content) and one with the class (sentiment, label or
    class: neg, negative, 0 or false, and pos, positive, 1 or true); without the second, or with the class unsup, its
    reviews are unlabelled. The split stands in a column `split`, or in the file's name; in an unlabelled one the class
    may be -1. If there is no test part, half of the reviews of the rarer class and as many of the other become one, as
    a warning says.

    Raises DataError, naming the file and the row.
    """
    found: dict[str, list[tuple[int, str]]] = {split: [] for split in _SPLITS}
    for file in files:
        name = str(file.relative_to(path))  # "." if it is the file itself
        for where, row in rows(file, header=(*TEXT, *LABEL)):
            columns = [next((name for name in names if name in row), None) for names in (TEXT, LABEL)]
            if columns[0] is None:
                got = ", ".join(printable(str(name)[:40]) for name in list(row)[:6])
                raise DataError(
                    f"{where}: expected a table with a column {' or '.join(TEXT)}, and with "
                    f"{' or '.join(LABEL)}, got the columns {got}"
                )
            text, split = row[columns[0]], _split(str(row.get("split", name)))
            label = _class("unsup" if columns[1] is None else row[columns[1]], split, where)
            if not isinstance(text, str) or not has_word(text):
                raise DataError(f"{where}: an empty review (no word in it)")
            found["unsup" if label < 0 else split].append((label, text))
    if found["train"] and not found["test"]:
        found["train"], found["test"] = _halved(found["train"], path)
    return {split: {(label, i, 0): text for i, (label, text) in enumerate(reviews)} for split, reviews in found.items()}


def _class(value: object, split: str, where: str) -> int:
    classes = CLASSES | {"-1": -1} if split == "unsup" else CLASSES
    label = classes.get(str(value).strip().casefold())
    if label is None:
        raise DataError(f"{where}: expected a class, one of {', '.join(classes)}, got {shown(value)}")
    return label


def _split(name: str) -> str:
    return next(split for split, pattern in _SPLITS.items() if pattern.search(name))


def _halved(reviews: list[tuple[int, str]], path: Path) -> list[list[tuple[int, str]]]:
    """A training and a test part, each review in one of them, and once."""
    unique = [(label, text) for text, label in dict((text, label) for label, text in reviews).items()]
    labels = np.array([label for label, _ in unique])
    order = Key(0).fold("test").generator().permutation(len(unique))
    share = int(np.bincount(labels, minlength=2).min()) // 2
    test = {i for label in (0, 1) for i in order[labels[order] == label][:share].tolist()}
    warnings.warn(
        f"{printable(str(path), 4096)}: no test reviews in it, so {len(test):,} of {len(unique):,} were drawn (always "
        "the same); films may be in both parts, and results cannot be compared with those on the official test reviews",
        stacklevel=4,
    )
    return [[review for i, review in enumerate(unique) if (i in test) == part] for part in (False, True)]

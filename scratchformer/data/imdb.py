"""The Large Movie Review Dataset: 50,000 labelled and 50,000 unlabelled reviews from IMDb.

Source: Maas, Daly, Pham, Huang, Ng, Potts, "Learning Word Vectors for Sentiment Analysis", ACL 2011.

Archives are read as a stream, in memory, and nothing is extracted to disk. Only files named
`aclImdb/{train,test}/{pos,neg}/ID_RATING.txt` or `aclImdb/train/unsup/ID_RATING.txt` are read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import expect_at_least, expect_instance
from ..rng import Key
from ..shell.progress import counted, progress_bar
from ..shell.reading import MEGABYTE, DataError, decoded, read_bytes
from ..shell.text import printable
from ..shell.unpacking import is_tar, open_tar
from .batching import Labelled
from .download import fetch
from .films import films_of
from .reviews import LABEL, Reviews, read_tables
from .subwords import Subwords
from .tables import SUFFIXES
from .vocabulary import Vocabulary, has_word

URL = "http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
CHECKSUM = "md5:7c2ac02c03563afcf9b574c7e56c153a"
FILENAME = "aclImdb_v1.tar.gz"

LABELS = {"neg": 0, "pos": 1, "unsup": -1}
FOLDERS = {"train": ("train/neg", "train/pos"), "test": ("test/neg", "test/pos"), "unsup": ("train/unsup",)}
SPLITS = tuple(FOLDERS)

MAX_REVIEW = MEGABYTE  # bytes of a review; the longest of the dataset has 14,106
MAX_ARCHIVE, ARCHIVE_RATIO = 32 * MEGABYTE, 20  # limits of unpacking: see `open_tar`. The dataset has a ratio of 4.
DEPTH = 3  # folders below the one that is given, in which data is looked for

_ARCHIVE = re.compile(r"\.(tar|tgz)\b")
_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos|unsup)/([0-9]+)_([0-9]+)\.txt")

LabelledTexts = tuple[list[str], np.ndarray]


class Imdb(NamedTuple):
    """The dataset, ready for a classifier: three parts and the vocabulary that encoded them.

    `unlabelled`: texts to pre-train on, an int32 array (T,) each; empty from `load_imdb`.
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    vocabulary: Vocabulary | Subwords
    unlabelled: Sequence[np.ndarray] = ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all parts except the test, encoded texts and labels in order, in hexadecimal."""
        digest = hashlib.sha256()
        unlabelled = [Labelled(list(self.unlabelled), np.empty(0))] if self.unlabelled else []
        for part in (self.train, self.validation, *unlabelled):
            for array in (part.labels, np.array([len(text) for text in part.ids]), *part.ids):
                digest.update(array.astype("<i8").data)
        return digest.hexdigest()


def load_imdb(
    path: str | os.PathLike[str] | None = None,
    vocabulary_size: int = 50_000,
    validation: int = 2_500,
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
) -> Imdb:
    """The dataset at `path` (as for `read_splits`), or the official archive, downloaded, if `path` is None.

    `validation` reviews, equally many of each class, are drawn from the training part by `seed` alone. Films are drawn
    whole, as far as the names in the reviews show (`films_of`), and divided only if none fits any more. A model that
    has read some reviews of a film recognises the others by the names they mention, and knows whether people liked it.
    The test part shares no films with the training part, so a validation part that does would have another accuracy.

    The vocabulary, of at most `vocabulary_size` words, is built from the remaining training reviews. If `vocabulary` is
    given, as on resume, it is used unchanged. Raises DataError.
    """
    expect_at_least(0, validation=validation)
    expect_instance("vocabulary", vocabulary, Vocabulary, none=True)
    path = fetch(URL, CHECKSUM, FILENAME) if path is None else path
    parts = read_splits(path, ("train", "test"))
    train, held_out = hold_out(*parts["train"], validation, seed, path)
    if vocabulary is None:
        vocabulary = Vocabulary.build(counted(train[0], "counting words", "reviews"), vocabulary_size)

    def encode(texts: list[str], labels: np.ndarray) -> Labelled:
        return Labelled([vocabulary.encode(text) for text in counted(texts, "encoding", "reviews")], labels)

    return Imdb(encode(*train), encode(*held_out), encode(*parts["test"]), vocabulary)


def load_imdb_subwords(
    path: str | os.PathLike[str] | None = None,
    vocabulary_size: int = 8_000,
    validation: int = 2_500,
    seed: int = 0,
    vocabulary: Subwords | None = None,
) -> Imdb:
    """The dataset in BERT's WordPieces, with texts to pre-train on; arguments and validation part as in `load_imdb`.

    `unlabelled` holds the training reviews, and the dataset's unlabelled reviews if `path` has them. Exact copies of
    validation or test reviews (IMDb has some) and reviews of a single token are left out. The vocabulary, of at most
    `vocabulary_size` pieces, is learned from the same texts. If `vocabulary` is given, as on resume or with published
    weights, it is used unchanged. Raises DataError.
    """
    expect_at_least(0, validation=validation)
    expect_instance("vocabulary", vocabulary, Subwords, none=True)
    path = fetch(URL, CHECKSUM, FILENAME) if path is None else path
    parts = read_splits(path, optional=("unsup",))
    train, held_out = hold_out(*parts["train"], validation, seed, path)

    def without_breaks(texts: list[str], labels: np.ndarray) -> LabelledTexts:
        return [text.replace("<br />", " ") for text in texts], labels

    train, held_out, test, unsup = (without_breaks(*part) for part in (train, held_out, parts["test"], parts["unsup"]))
    seen = {*held_out[0], *test[0]}
    texts = [text for text in (*train[0], *unsup[0]) if text not in seen]
    if vocabulary is None:
        vocabulary = Subwords.wordpiece(texts, vocabulary_size)

    def encode(texts: list[str], labels: np.ndarray) -> Labelled:
        return Labelled(vocabulary.encode_all(texts), labels)

    unlabelled = [ids for ids in vocabulary.encode_all(texts) if len(ids) > 1]
    return Imdb(encode(*train), encode(*held_out), encode(*test), vocabulary, unlabelled)


def read_splits(
    path: str | os.PathLike[str],
    splits: Collection[str] = SPLITS,
    optional: Collection[str] = (),
) -> dict[str, LabelledTexts]:
    """The reviews at `path`, read once: for each of `splits` the texts and their labels, an int64 array.

    Labels are 0 (neg), 1 (pos) or -1 (unsup). Reviews are sorted by label, then by review number, whatever their order
    in the archive or the file system. `path` is the official archive, a tar of the same layout, compressed or not, the
    folder `aclImdb`, a folder with it or with archives named aclImdb*.tar* (which are read together) up to three
    folders below, or a table or a folder of tables: see `read_tables`.

    Raises DataError, naming the file or member, if `path` is missing or damaged; if a split is empty and not in
    `optional`; if a split has reviews of only one class; or if a review is not UTF-8, contains no word, or is longer
    than a megabyte. A review that is in two archives counts once.
    """
    for split in splits:
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    sources = _sources(Path(path))
    members = sources[0].is_dir() or bool(_ARCHIVE.search(sources[0].name)) or is_tar(sources[0])
    if members:
        reviews_of = _read_members(sources, splits)
    else:
        tables = read_tables(sources, Path(path))
        reviews_of = {split: tables[split] for split in splits}
    for split, reviews in reviews_of.items():
        labels = {label for label, *_ in reviews}
        absent = [folder for folder in FOLDERS[split] if labels and LABELS[Path(folder).name] not in labels]
        if absent or (not reviews and split not in optional):
            names = (absent[0],) * 2 if absent else (split, _folders(split))
            expected = f"aclImdb/{names[1]}/ID_RATING.txt" if members else f"its class in {' or '.join(LABEL)}"
            raise DataError(f"{path}: no {names[0]} review in it; expected {expected}")
    return {
        split: (
            [reviews[place] for place in sorted(reviews)],
            np.array([place[0] for place in sorted(reviews)], np.int64),
        )
        for split, reviews in reviews_of.items()
    }


def _read_members(sources: Sequence[Path], splits: Collection[str]) -> dict[str, Reviews]:
    """The reviews of `splits` in archives or folders in the dataset's own layout."""
    reviews_of: dict[str, Reviews] = {split: {} for split in splits}
    with progress_bar("reading", unit="reviews") as bar:
        for source in sources:
            members = _folder_members if source.is_dir() else _archive_members
            for where, split, place, data in members(source, splits):
                if not has_word(text := decoded(data, where)):
                    raise DataError(f"{where}: an empty review (no word in it)")
                reviews_of[split][place] = text
                bar.update()
    return reviews_of


def _sources(path: Path) -> list[Path]:
    """What to read for `path`: the folder aclImdb, archives, or tables."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    folders = [path]
    for _ in range(DEPTH):
        folders += [
            each
            for folder in folders
            for each in sorted(folder.iterdir(), key=str)
            if each.is_dir() and each not in folders
        ]
    for folder in folders:
        if any((folder / part).is_dir() for parts in FOLDERS.values() for part in parts):
            return [folder]
    files = [file for folder in folders for file in sorted(folder.iterdir(), key=str) if file.is_file()]
    archives = [file for file in files if file.name.startswith("aclImdb") and _ARCHIVE.search(file.name)]
    tables = [file for file in files if {suffix.lower() for suffix in file.suffixes} & {*SUFFIXES, ".zip"}]
    if not archives and not tables:
        raise DataError(f"{path}: neither the folder aclImdb nor an archive aclImdb*.tar.gz nor a table in it")
    return archives or tables


# What both readers yield for each review: its location (for messages), split, (label, number, rating), content.
_Member = tuple[str, str, tuple[int, ...], bytes]


def _archive_members(archive: Path, splits: Collection[str]) -> Iterator[_Member]:
    """The reviews of `splits` in a tar archive, in its own order; raises DataError if it is truncated or corrupt."""
    with open_tar(archive, DataError, MAX_ARCHIVE, ARCHIVE_RATIO) as tar:
        for member in tar:
            if member.isreg() and (parsed := _parse(member.name, splits)):
                where = f"{archive}: {printable(member.name)}"
                if member.size > MAX_REVIEW:
                    raise DataError(f"{where}: expected at most {MAX_REVIEW:,} bytes, got {member.size:,}")
                yield where, *parsed, tar.extractfile(member).read()


def _folder_members(folder: Path, splits: Collection[str]) -> Iterator[_Member]:
    """The reviews of `splits` in the folder aclImdb, which may have another name."""
    for half in sorted({Path(part).parent for split in splits for part in FOLDERS[split]}):
        for file in sorted((folder / half).glob("*/*.txt"), key=str):
            parsed = _parse(f"aclImdb/{half}/{file.parent.name}/{file.name}", splits)
            if parsed:
                yield str(file), *parsed, read_bytes(file, max_bytes=MAX_REVIEW)


def _parse(name: str, splits: Collection[str]) -> tuple[str, tuple[int, ...]] | None:
    """Split and (label, number, rating) of the member `name`; None if it is not a review of `splits`."""
    match = _MEMBER.fullmatch(name)
    if match is None:
        return None
    half, kind, number, rating = match.groups()
    if kind == "unsup" and half == "test":
        return None
    split = "unsup" if kind == "unsup" else half
    return (split, (LABELS[kind], int(number), int(rating))) if split in splits else None


def _folders(split: str) -> str:
    return "train/unsup" if split == "unsup" else f"{split}/{{pos,neg}}"


def hold_out(
    texts: list[str], labels: np.ndarray, count: int, seed: int, path: str | os.PathLike[str]
) -> list[LabelledTexts]:
    """The training part of `path` without `count` reviews, and those reviews: see `load_imdb`."""
    classes = np.unique(labels)
    shares = np.array([count // len(classes) + (i < count % len(classes)) for i in range(len(classes))])
    for label, share in zip(classes, shares.tolist(), strict=True):
        size = int(np.sum(labels == label))
        if not 0 <= share < size:
            raise DataError(
                f"{path}: {count} validation reviews need {share} of class {label}, "
                f"but the training part has only {size}"
            )
    films = films_of(texts, labels)
    chosen = _whole_films(films, np.searchsorted(classes, labels), shares, Key(seed))
    kept = np.setdiff1d(np.arange(len(labels)), chosen)
    return [([texts[i] for i in part.tolist()], labels[part]) for part in (kept, chosen)]


def _whole_films(films: np.ndarray, classes: np.ndarray, shares: np.ndarray, key: Key) -> np.ndarray:
    """Indices of reviews, shares[k] of class k: films in an order drawn from `key`, each if it still fits, and then the
    first of the other reviews if some are missing.

    films, classes: (reviews,), the numbers of each review's film and class.
    """
    order = key.fold("validation").generator().permutation(int(films.max(initial=-1)) + 1)
    sizes = np.zeros((len(order), len(shares)), int)
    np.add.at(sizes, (films, classes), 1)
    missing, chosen = shares.copy(), np.zeros(len(films), bool)
    for film in order:
        if (sizes[film] <= missing).all():
            missing -= sizes[film]
            chosen[films == film] = True
    for k in np.flatnonzero(missing):  # no film fits: a part of some
        chosen[np.flatnonzero(~chosen & (classes == k))[: missing[k]]] = True
    return np.flatnonzero(chosen)

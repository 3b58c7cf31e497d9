"""Multi30k: descriptions of 31,014 photographs in English and German (task 1, 2016).

29,000 pairs for training, 1,014 for validation, and 1,000 for testing (the 2016 test set). Source: Elliott et al.,
"Multi30K: multilingual English-German image descriptions", 2016; https://github.com/multi30k/dataset.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..shell.reading import MEGABYTE, DataError, decoded
from ..shell.unpacking import read_unpacked
from .download import fetch

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
CHECKSUMS = {
    "train.de.gz": "sha256:726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "sha256:d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "sha256:f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "sha256:14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "sha256:9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "sha256:611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
_EMPTY_LINE = re.compile(r"\n[^\S\n]*\n")
PARTS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}


class Pairs(NamedTuple):
    """Sentences and their translations: source[i] and target[i] are a pair."""

    source: list[str]
    target: list[str]


class Multi30k(NamedTuple):
    train: Pairs
    validation: Pairs
    test: Pairs

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all sentences, in hexadecimal: equal only for equal data in the same direction."""
        digest = hashlib.sha256()
        for part in self:
            for side in part:
                digest.update("\n".join(side).encode() + b"\0")
        return digest.hexdigest()


def load_multi30k(path: str | os.PathLike[str] | None = None, source: str = "en", target: str = "de") -> Multi30k:
    """The sentence pairs, `source` and `target` being "en" or "de", from the folder `path`, or downloaded if None.

    The folder holds train, val and test_2016_flickr, each as .en and .de, plain or gzipped (.gz). Raises DataError,
    naming the file and the line, if a file is missing or damaged, if the two files of a pair differ in their number of
    lines, or if a line is empty.
    """
    for name, language in (("source", source), ("target", target)):
        if language not in ("en", "de"):
            raise ValueError(f"{name}: expected 'en' or 'de', got {language!r}")
    return Multi30k(*(_pairs(path, stem, source, target) for stem in PARTS.values()))


def _pairs(path: str | os.PathLike[str] | None, stem: str, source: str, target: str) -> Pairs:
    files = [_file(path, f"{stem}.{language}") for language in (source, target)]
    texts = [_text(file) for file in files]
    lines = [text.count("\n") + 1 for text in texts]
    if lines[0] != lines[1]:
        raise DataError(
            f"{files[0]} has {lines[0]:,} lines, but {files[1].name} has {lines[1]:,}: "
            "they are not translations of each other"
        )
    return Pairs(*([line.strip() for line in text.split("\n")] for text in texts))


def _file(path: str | os.PathLike[str] | None, name: str) -> Path:
    if path is None:
        return fetch(URL + f"{name}.gz", CHECKSUMS[f"{name}.gz"], f"multi30k-{name}.gz")
    if not Path(path).is_dir():
        raise DataError(f"{path}: no such folder; expected one with train.en, train.de and so on, plain or .gz")
    for file in (Path(path) / f"{name}.gz", Path(path) / name):
        if file.is_file():
            return file
    raise DataError(f"{path}: neither {name} nor {name}.gz in it")


def _text(file: Path) -> str:
    """The lines of a file, none of them empty."""
    text = decoded(read_unpacked(file, max_bytes=MEGABYTE), file).removesuffix("\n")
    if empty := _EMPTY_LINE.search(f"\n{text}\n"):
        raise DataError(f"{file}: line {text.count(chr(10), 0, empty.start()) + 1} is empty")
    return text

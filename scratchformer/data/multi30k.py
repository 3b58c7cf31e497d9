"""Multi30k: descriptions of 31,014 photographs in English and German (task 1, 2016).

29,000 pairs for training, 1,014 for validation, and 1,000 for testing (the 2016 test set). Source: Elliott et al.,
"Multi30K: multilingual English-German image descriptions", 2016; https://github.com/multi30k/dataset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..shell.reading import MEGABYTE, DataError
from ..shell.unpacking import PACKED_SUFFIXES
from .download import fetch
from .pairs import ParallelCorpus, load_pairs, parallel_lines

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
CHECKSUMS = {
    "train.de.gz": "sha256:726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "sha256:d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "sha256:f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "sha256:14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "sha256:9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "sha256:611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
DOWNLOADED = ("en", "de")
# The names of each part's files, and the folders in which they may be: in a clone of the repository, or torchtext's.
PARTS = {"train": ("train",), "validation": ("val",), "test": ("test_2016_flickr", "test2016", "test")}
PLACES = (".", "data/task1/raw", "task1/raw", "raw", "Multi30k", "datasets/Multi30k")


def load_multi30k(path: str | os.PathLike[str] | None = None, source: str = "en", target: str = "de") -> ParallelCorpus:
    """The sentence pairs in the folder `path`, downloaded if it is None, or those of another text: see `load_pairs`.

    source, target: languages, such as "en", "de", "fr" or "cs"; only English and German are downloaded. The folder, or
    one where a clone of the dataset's repository or torchtext put it, holds train, val and test_2016_flickr (or test,
    or test2016), each in both languages, such as train.en, plain or packed.

    Raises DataError, naming the file and the line, if a file is missing or damaged, if the two files of a pair differ
    in their number of lines, or if a line is empty.
    """
    for name, language in (("source", source), ("target", target)):
        if not re.fullmatch("[a-z]{2,3}", language):
            raise ValueError(f"{name}: expected a language, such as 'en' or 'de', got {language!r}")
        if path is None and language not in DOWNLOADED:
            raise ValueError(f"{name}: expected 'en' or 'de', or a path to data in other languages, got {language!r}")
    if source == target:
        raise ValueError(f"target: expected another language than the source, {source!r}")
    if path is not None and not Path(path).is_dir():
        if not Path(path).exists():
            raise DataError(f"{path}: no such file or folder; expected one with train.en, train.de and so on")
        return load_pairs(Path(path), source, target)
    files = [[_file(path, stems, language) for language in (source, target)] for stems in PARTS.values()]
    return ParallelCorpus(*(parallel_lines(*pair, max_bytes=MEGABYTE) for pair in files))


def _file(path: str | os.PathLike[str] | None, stems: Sequence[str], language: str) -> Path:
    if path is None:
        name = f"{stems[0]}.{language}.gz"
        return fetch(URL + name, CHECKSUMS[name], f"multi30k-{name}")
    names = [f"{stem}.{language}" for stem in stems]
    for place in PLACES:
        for name in names:
            for suffix in (*PACKED_SUFFIXES, ""):
                if (file := Path(path) / place / (name + suffix)).is_file():
                    return file
    raise DataError(f"{path}: neither {names[0]} nor {names[0]}.gz in it")

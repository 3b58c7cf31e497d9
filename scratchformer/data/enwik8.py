"""Byte corpora for language models: enwik8, Python's standard library (no download), or any text file.

enwik8 is the first 100,000,000 bytes of the English Wikipedia of 3 March 2006. Source: Hutter and Mahoney,
http://mattmahoney.net/dc/textdata.html.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import describe, expect_positive
from ..rng import Key
from ..shell.reading import BEGINNING, DataError, expect_itself, read_bytes, what_else
from ..shell.text import printable
from ..shell.unpacking import read_unpacked
from .download import fetch

URL = "http://mattmahoney.net/dc/enwik8.zip"
CHECKSUM = "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
FILENAME = "enwik8.zip"
VALIDATION_BYTES = 100_000  # how much of the validation part a run is scored on during training
STANDARD_LIBRARY = "stdlib"  # as a path, means `load_standard_library()`
MEMBER = "enwik8"
MEMBER_SIZE = 100_000_000

_BEGINNING = b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.3/"'
_STANDARD_LIBRARY_LIMIT = 8_000_000
_NOT_LIBRARY = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


class Corpus(NamedTuple):
    """A text, or other data, as bytes: its name, and three parts, uint8 (n,) each."""

    name: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole text, in hexadecimal: equal only for equal texts, whatever their names."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def load_enwik8(path: str | os.PathLike[str] | None = None, limit: int | None = None) -> Corpus:
    """enwik8, or as much of it as `path` holds: 90% for training, then 5% for validation and 5% for testing.

    `path` is a file, packed or not, as for `load_text`, or a folder that holds enwik8.zip, enwik8.gz, enwik8 or
    enwik8*.gz (the first one found, in this order, is read). If it is None, the official archive is downloaded. The
    corpus is named "enwik8" if it is complete, "enwik8 (first N bytes)" if it is the beginning of enwik8, and after its
    file if it is another text. The path STANDARD_LIBRARY, "stdlib", gives `load_standard_library()`. limit: take only
    so many bytes from the beginning, and name the corpus after that. Raises DataError, as `load_text` does.
    """
    if path is not None and os.fspath(path) == STANDARD_LIBRARY:
        return _beginning(load_standard_library(), limit)
    path = fetch(URL, CHECKSUM, FILENAME) if path is None else _find(Path(path))
    data = load_text(path)
    return _beginning(_split(_name(data, path), data), limit)


def _beginning(corpus: Corpus, limit: int | None) -> Corpus:
    """The first `limit` bytes of a corpus, split in the same proportions; the corpus itself if it has no more."""
    if limit is not None:
        expect_positive(limit=limit)
    if limit is None or sum(map(len, corpus[1:])) <= limit:
        return corpus
    name = re.sub(r" \((first )?[\d,]+ bytes\)$", "", corpus.name)
    return _split(f"{name} (first {limit:,} bytes)", np.concatenate(corpus[1:])[:limit].tobytes())


def load_standard_library() -> Corpus:
    """The source code of this Python's standard library, up to 8,000,000 bytes: a corpus that needs no download.

    The files are put in a fixed random order, so that the three parts are alike. Tests, IDLE, lib2to3, installed
    packages, and modules that are mostly tables (encodings, pydoc_data) are left out. Raises DataError if the
    interpreter is installed without the sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        relative = Path(parent).relative_to(folder)
        files += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    files.sort()
    parts, size = [], 0
    for i in Key(0).fold("standard library").generator().permutation(len(files)):
        if size >= _STANDARD_LIBRARY_LIMIT:
            break
        source = read_bytes(folder / files[i])
        if _is_utf8(source):
            parts.append(source)
            size += len(source)
    data = b"".join(parts)[:_STANDARD_LIBRARY_LIMIT]
    if not data:
        raise DataError(f"{folder}: this Python is installed without the sources of its standard library")
    return _split(f"python-{platform.python_version()}-stdlib ({len(data):,} bytes)", data)


def as_text(data: np.ndarray, name: str) -> str:
    """UTF-8 bytes, uint8 (n,), as text, without a byte-order mark and without characters cut off at either end. Raises
    DataError naming `name`.
    """
    if getattr(data, "dtype", None) != np.uint8:
        raise TypeError(f"data: expected an array of bytes, uint8, got {describe(data)}")
    raw = data.tobytes()  # may begin with up to 3 bytes of a cut character; the decoder drops one at the end
    start = next((i for i, byte in enumerate(raw[:3]) if byte & 0xC0 != 0x80), min(3, len(raw)))
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(raw[start:]).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 at byte {start + error.start:,}") from error


def _find(path: Path) -> Path:
    """The file to read for `path`: the path itself, or the best file in a folder, preferring the whole of enwik8.

    Archives come before the plain file, which has no checksum and may be only partly unpacked.
    """
    if not path.is_dir():
        return path
    candidates = [path / FILENAME, path / f"{MEMBER}.gz", path / MEMBER, *sorted(path.glob(f"{MEMBER}*.gz"), key=str)]
    for file in candidates:
        if file.is_file():
            return file
    raise DataError(f"{path}: no file {MEMBER}, {FILENAME} or {MEMBER}*.gz in it")


def load_text(path: str | os.PathLike[str]) -> bytes | bytearray:
    """The bytes of the text at `path`: of a plain file, or unpacked in memory from gzip, bzip2, xz, Zstandard, or a zip
    or a tar of one file (or one named enwik8), and from those packed in each other.

    Raises DataError, naming the file, if it is missing, empty, truncated or corrupt, if it unpacks to far more than
    text does, or if it is not text: another kind of file, text in UTF-16, a pointer of Git LFS, or a web page that is
    not named .html.
    """
    data = read_unpacked(path, member=MEMBER)
    if not data:
        raise DataError(f"{path}: empty")
    expect_itself(data[:BEGINNING], path)
    if kind := what_else(data[:BEGINNING]):
        raise DataError(f"{path}: expected a text, got {kind}")
    return data


def _name(data: bytes | bytearray, path: Path) -> str:
    if not data.startswith(_BEGINNING) or len(data) > MEMBER_SIZE:
        return printable(path.name)
    return MEMBER if len(data) == MEMBER_SIZE else f"{MEMBER} (first {len(data):,} bytes)"


def _split(name: str, data: bytes | bytearray) -> Corpus:
    array = np.frombuffer(data, dtype=np.uint8)
    array.flags.writeable = False
    return Corpus(name, *np.split(array, [len(array) * 90 // 100, len(array) * 95 // 100]))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True

"""Safe reading of files that this package did not write, such as data and published weights; all are opened here.

Such a file may be damaged or enormous, so only files of limited size are read. The message of every error is one line
that begins with the path.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from .text import shown

MEGABYTE = 1 << 20
MAX_BYTES = 4096 * MEGABYTE  # bytes of any file that is read into memory
MAX_JSON = 2 * MEGABYTE  # bytes of a file of settings
JSON_PARTS = 1_000_000  # objects and lists in a JSON file; published tokenizers have up to 600,000
MAX_VOCABULARY = 64 * MEGABYTE  # bytes of a vocabulary; the largest published ones have 35 MB
MAX_HEADER = 16 * MEGABYTE  # bytes of the header of a safetensors file, which has 100 for each tensor

BEGINNING = 8192  # bytes of a file that show what it is

_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(  # of a server: HTML, or the XML in which file stores report errors
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!doctype\s+html|<html|<head>|<error>\s*<code>)",
    re.I | re.S,
)
# How files other than text begin. Any other binary file is recognised by its control characters.
_BEGINNINGS = {
    rb"\x1f\x8b": "a gzip",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "a bzip2 file",
    rb"\xfd7zXZ\0": "an xz file",
    rb"\x28\xb5\x2f\xfd": "a Zstandard file",
    rb"PK(\x03\x04|\x05\x06|\x07\x08)": "a zip archive",
    rb".{257}ustar": "a tar archive",
    rb"\x80[\x02-\x05][\x80-\xff(\]})cKX]|\([dlt]p\d\n|c(copy_reg|numpy|pandas)[\w.]*\n\w+\n": "a pickle",
    rb"PAR1[\0-\x1f]": "a Parquet file",
    rb"ARROW1\0|\xff{4}.{2}\0\0\x10\0\0\0": "an Arrow file",
    rb"GGUF[\1-\x09]\0\0\0": "a GGUF file",
}
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})

PathLike = os.PathLike[str] | str
Error = Callable[[str], Exception]


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be, or a download failed."""


def expect_file(path: PathLike, error: Error = DataError) -> None:
    """Raise `error` unless there is a regular file at `path`: the size of a FIFO or a device is unknown."""
    with _reading(path, error):
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise error(f"{path}: expected a file, got {'a folder' if stat.S_ISDIR(mode) else 'a FIFO or a device'}")


def read_bytes(path: PathLike, error: Error = DataError, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of the file at `path`. Raises `error` if it cannot be read: see `open_file`."""
    with open_file(path, error, max_bytes) as (file, size), _reading(path, error):
        return file.read(size)


def read_text(path: PathLike, error: Error = DataError, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, without a byte-order mark. Raises `error` if it cannot be read or is not UTF-8."""
    return decoded(read_bytes(path, error, max_bytes), path, error)


def read_json(path: PathLike, error: Error = DataError, max_bytes: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file. Raises `error` if the file cannot be read or holds anything else."""
    return parsed(read_text(path, error, max_bytes), path, error)


def decoded(data: bytes | bytearray, where: PathLike, error: Error = DataError) -> str:
    """UTF-8 `data` as text, without a byte-order mark. Raises `error` naming `where` if it is not UTF-8, or something
    else in the place of the file: see `expect_itself`.
    """
    expect_itself(data[:BEGINNING], where, error)
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        hint = "convert text in another encoding, such as Latin-1, to UTF-8 first"
        raise error(f"{where} is damaged: not UTF-8 at byte {problem.start}; {hint}") from problem


def expect_itself(start: bytes | bytearray, where: PathLike, error: Error = DataError) -> None:
    """Raise `error` if a file that begins with `start` has something else in its place: the pointer that Git LFS leaves
    for a file that was not fetched, or a page that a server sent instead. A file named .html may be a page.
    """
    if start.startswith(_LFS):
        raise error(f"{where}: a Git LFS pointer, not the file itself; to fetch that, run: git lfs pull")
    if _PAGE.match(start) and not str(where).lower().endswith((".html", ".htm", ".xhtml", ".xml")):
        raise error(f"{where}: a web page, perhaps a login form or an error report of the server, not the file itself")


def what_else(start: bytes | bytearray) -> str | None:
    """The kind of a file that begins with `start`; None if it is text in UTF-8, Latin-1 or a similar encoding."""
    for beginning, kind in _BEGINNINGS.items():
        if re.match(beginning, start, re.S):
            return kind
    controls = len(start) - len(start.translate(None, _CONTROLS))
    return "binary data" if 0 in start or 20 * controls > len(start) else None


def parsed(text: str, where: PathLike, error: Error = DataError) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises `error`, naming `where`, if the text is not JSON or not an object, or has more than JSON_PARTS objects and
    lists.
    """
    if text.count("{") + text.count("[") > JSON_PARTS:  # each takes 72 bytes of memory, or more
        raise error(f"{where} is damaged: more than {JSON_PARTS:,} objects and lists")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is damaged: {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{where} is damaged: expected an object {{...}}, got {shown(value)}")
    return value


@contextmanager
def open_file(
    path: PathLike, error: Error = DataError, max_bytes: float = MAX_BYTES
) -> Iterator[tuple[BufferedReader, int]]:
    """The file at `path`, open for reading, and its size in bytes. Raises `error` unless it is a regular file (see
    `expect_file`) of at most `max_bytes` bytes.

    The size is that of the file that was opened, since another process may replace the file at `path` at any time.
    """
    expect_file(path, error)
    with _reading(path, error):
        file = open(path, "rb")
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{path}: expected at most {max_bytes:,} bytes, got {size:,}")
        yield file, size


@contextmanager
def _reading(path: PathLike, error: Error) -> Iterator[None]:
    """Raise the system's errors about `path` as `error`."""
    try:
        yield
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from problem

"""Reading files that this package did not write, such as data and published weights. All of them are opened here.

Such a file may be damaged, enormous, or not a regular file. Only regular files of limited size are read: opening a FIFO
may wait for ever, and a device may have no end. Compressed files are unpacked up to a limit, since a few kilobytes can
unpack to gigabytes. The message of every error is one line that begins with the path.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from ..ops.checks import shown

MEGABYTE = 1 << 20
MOST = 4096 * MEGABYTE  # bytes of any file that is read into memory
JSON_MOST = 2 * MEGABYTE  # bytes of a file of settings
JSON_PARTS = 1_000_000  # objects and lists in a JSON file; published tokenizers have up to 600,000
VOCABULARY_MOST = 64 * MEGABYTE  # bytes of a vocabulary; the largest published ones have 35 MB
UNPACKED_MOST = 16 * MEGABYTE  # bytes that any compressed file may unpack to
RATIO = 8  # unpacked to compressed size, the limit for larger files; English text has 3 to 4
GZIP = b"\x1f\x8b"  # the first bytes of a gzip

_PIECE = MEGABYTE
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

PathLike = os.PathLike[str] | str
Error = Callable[[str], Exception]


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be, or a download failed."""


def expect_file(path: PathLike, error: Error = DataError, most: float = MOST) -> int:
    """The size of the file at `path`. Raises `error` unless it is a regular file of at most `most` bytes."""
    with _reading(path, error):
        try:
            found = os.stat(path)
        except ValueError as problem:  # a NUL in the path
            raise error(f"{str(path)!r}: not the name of a file") from problem
    if stat.S_ISDIR(found.st_mode):
        raise error(f"{path}: expected a file, got a folder")
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path}: expected a regular file, got {_kind(found.st_mode)}")
    if found.st_size > most:
        raise error(f"{path}: expected at most {most:,} bytes, got {found.st_size:,}")
    return found.st_size


def read_bytes(path: PathLike, error: Error = DataError, most: int = MOST) -> bytes:
    """The contents of the file at `path`. Raises `error` if it cannot be read: see `expect_file`."""
    size = expect_file(path, error, most)
    with _reading(path, error), open(path, "rb") as file:
        return file.read(size)


def read_text(path: PathLike, error: Error = DataError, most: int = MOST) -> str:
    """The text of a UTF-8 file, without a byte-order mark. Raises `error` if it cannot be read or is not UTF-8."""
    return decoded(read_bytes(path, error, most), path, error)


def read_json(path: PathLike, error: Error = DataError, most: int = JSON_MOST) -> dict[str, Any]:
    """The object in a JSON file. Raises `error` if the file cannot be read or holds anything else."""
    return parsed(read_text(path, error, most), path, error)


def decoded(data: bytes | bytearray, where: PathLike, error: Error = DataError) -> str:
    """UTF-8 `data` as text, without a byte-order mark. Raises `error` naming `where` if it is not UTF-8."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as found:
        raise error(f"{where} is damaged: not UTF-8 at byte {found.start}") from found


def parsed(text: str, where: PathLike, error: Error = DataError) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises `error`, naming `where`, if the text is not JSON or not an object, is nested too deeply, has more than
    JSON_PARTS objects and lists or a number of too many digits, gives two values for one name, or has an unpaired
    surrogate.
    """
    if text.count("{") + text.count("[") > JSON_PARTS:  # each takes 72 bytes of memory, or more
        raise error(f"{where} is damaged: more than {JSON_PARTS:,} objects and lists")
    try:
        found = json.loads(text, object_pairs_hook=_object)
        if _SURROGATE.search(text):  # surrogateescape, since a byte of a path that is not UTF-8 is kept as a surrogate
            json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
    except json.JSONDecodeError as problem:
        what = f"not JSON at line {problem.lineno}, column {problem.colno}: {problem.msg}"
    except UnicodeEncodeError as problem:
        what = f"an unpaired surrogate, {problem.object[problem.start]!r}, in a text"
    except RecursionError:
        what = "nested too deeply"
    except _Twice as problem:
        what = f"two values for {shown(problem.args[0])}"
    except ValueError:  # int() refuses thousands of digits
        what = "a number with thousands of digits"
    else:
        if isinstance(found, dict):
            return found
        what = f"expected an object {{...}}, got {shown(found)}"
    raise error(f"{where} is damaged: {what}")


def read_unpacked(path: PathLike, error: Error = DataError, most: int = UNPACKED_MOST) -> bytes | bytearray:
    """The contents of a file, unpacked if it is a gzip by its name (.gz) or its first bytes.

    Raises `error` if it cannot be read, is damaged, or unpacks to more than `most` bytes and more than RATIO times its
    own size.
    """
    with open_file(path, error) as file, _reading(path, error):
        packed = str(path).endswith(".gz") or file.peek(2)[:2] == GZIP
    if not packed:
        return read_bytes(path, error)
    with open_gzip(path, error, most) as stream:
        return read_all(stream)


@contextmanager
def open_file(path: PathLike, error: Error = DataError, most: float = MOST) -> Iterator[BufferedReader]:
    """The file at `path`, open for reading: see `expect_file`."""
    expect_file(path, error, most)
    with _reading(path, error):
        file = open(path, "rb")
    with file:
        yield file


@contextmanager
def open_gzip(path: PathLike, error: Error = DataError, most: int = UNPACKED_MOST, ratio: int = RATIO) -> Iterator[Any]:
    """The unpacked content of a gzip, open for reading: see `Unpacking`. Errors of reading it are raised as `error`."""
    with open_file(path, error) as file, unpacking_errors(path, error), gzip.GzipFile(fileobj=file) as stream:
        if (start := file.peek(2)[:2]) != GZIP:
            raise error(
                f"{path}: expected a gzip, got a file that begins with {start!r}" if start else f"{path}: empty"
            )
        yield Unpacking(stream, path, error, most, ratio)


@contextmanager
def unpacking_errors(path: PathLike, error: Error) -> Iterator[None]:
    """Raise the errors of gzip, zlib and the system about a damaged archive as `error`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise error(f"{path}: truncated or corrupt ({problem})") from problem
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from problem


class Unpacking:
    """A compressed stream that can be read up to a limit: `most` bytes, or `ratio` times the size of the file at
    `path`, whichever is more. Reading beyond the limit raises `error`.
    """

    def __init__(
        self, stream: Any, path: PathLike, error: Error, most: int = UNPACKED_MOST, ratio: int = RATIO
    ) -> None:
        self.stream, self.path, self.error = stream, path, error
        self.left = self.most = max(most, ratio * os.path.getsize(path))

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none at the end."""
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise self.error(
                f"{self.path}: unpacks to more than {self.most:,} bytes, far more than text does; "
                "if you trust it, unpack it first"
            )
        return data


def read_all(stream: Any) -> bytearray:
    """All remaining bytes of a stream."""
    data = bytearray()
    while piece := stream.read(_PIECE):
        data += piece
    return data


@contextmanager
def _reading(path: PathLike, error: Error) -> Iterator[None]:
    """Raise the system's errors about `path` as `error`."""
    try:
        yield
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from problem


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "something else")


class _Twice(Exception):
    """A name in a JSON object has two values."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise _Twice(name)
    return found

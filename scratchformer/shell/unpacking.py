"""Compressed files, and archives of a single file, unpacked in memory up to a limit; nothing is extracted to disk.

A few kilobytes can unpack to gigabytes. So what comes out may have `max_bytes` bytes, or RATIO times the bytes of the
file, whichever is more.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import IO, Any

from .reading import BEGINNING, MEGABYTE, DataError, Error, PathLike, open_file, read_bytes, what_else
from .text import shown

MAX_UNPACKED = 16 * MEGABYTE  # bytes that any compressed file may unpack to
RATIO = 8  # unpacked to compressed size, the limit for larger files; English text has 3 to 4
MAX_LAYERS = 4  # such as a gzip of a tar

_PIECE = MEGABYTE


class _Refused(Exception):
    """Why a file is not unpacked."""


@contextmanager
def _zstandard(file: IO[bytes]) -> Iterator[Any]:
    try:
        from compression import zstd  # type: ignore[import-not-found]  # from Python 3.14 on
    except ImportError:
        try:
            from backports import zstd
        except ImportError as missing:
            raise _Refused(
                "packed by Zstandard: pip install 'scratchformer[files]', or unpack it with unzstd"
            ) from missing
    try:
        with zstd.ZstdFile(file) as stream:
            yield stream
    except zstd.ZstdError as problem:
        raise EOFError(str(problem)) from problem


@contextmanager
def _zip(file: io.BytesIO, member: str | None) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            end = file.getvalue().rfind(b"PK\5\6")
            if len(archive.infolist()) != int.from_bytes(file.getvalue()[end + 10 : end + 12], "little"):
                raise zipfile.BadZipFile("its list of files is damaged")  # zipfile does not compare their number
            names = [each.filename for each in archive.infolist() if not each.is_dir()]
            names = [name for name in names if not name.startswith("__MACOSX/")]  # which macOS adds
            with archive.open(_only(names, "zip", member)) as stream:
                yield stream
    except (ValueError, struct.error) as problem:
        raise zipfile.BadZipFile(str(problem)) from problem


@contextmanager
def _tar(file: IO[bytes], member: str | None) -> Iterator[Any]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        files = {each.name: each for each in archive if each.isfile()}
        yield archive.extractfile(files[_only(list(files), "tar", member)])


def _only(names: list[str], kind: str, member: str | None) -> str:
    """`member` if it is among the names in an archive, or the only name. Otherwise it is refused."""
    if member in names or len(names) == 1:
        return member if member in names else names[0]
    listed = f": {', '.join(shown(name) for name in names[:2])} and so on" if names else ""
    raise _Refused(f"a {kind} archive of {len(names):,} files{listed}; expected a single one: unpack the archive")


_COMPRESSED: dict[str, Callable[..., Any]] = {
    "a gzip": lambda file: gzip.GzipFile(fileobj=file),
    "a bzip2 file": bz2.BZ2File,
    "an xz file": lzma.LZMAFile,
    "a Zstandard file": _zstandard,
}
_ARCHIVES: dict[str, Callable[..., Any]] = {"a zip archive": _zip, "a tar archive": _tar}
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")


def read_unpacked(
    path: PathLike, error: Error = DataError, max_bytes: int = MAX_UNPACKED, member: str | None = None
) -> bytes | bytearray:
    """The contents of a file, unpacked as often as it is packed: by gzip, bzip2, xz or Zstandard, or as a zip or a tar
    with a single file in it, or one named `member`.

    Raises `error` if the file cannot be read, is damaged, or unpacks to more than `max_bytes` bytes and more than RATIO
    times its own size.
    """
    data: bytes | bytearray = read_bytes(path, error)
    limit = max(max_bytes, RATIO * len(data))
    openers = _COMPRESSED | {kind: partial(opener, member=member) for kind, opener in _ARCHIVES.items()}
    for _ in range(MAX_LAYERS):
        kind = what_else(data[:BEGINNING])
        if kind not in openers:
            return data
        with unpacking_errors(path, error), openers[kind](io.BytesIO(data)) as stream:
            data = read_all(Limited(stream, limit))
    raise error(f"{path}: packed more than {MAX_LAYERS} times")


@contextmanager
def open_tar(path: PathLike, error: Error, max_bytes: int, ratio: int) -> Iterator[Any]:
    """A tar archive, compressed or not, as a `tarfile.TarFile` whose members can be read once, in order, to the last.
    Errors of reading it are raised as `error`.
    """
    with _decompressed(path, error) as (stream, size):
        limited: Any = Limited(stream, max(max_bytes, ratio * size))
        with tarfile.open(fileobj=limited, mode="r|") as archive:
            yield archive
            # `tarfile` takes a damaged header for the end, which is really two or more blocks of zeros. Reading on also
            # makes gzip verify its checksum.
            if not (rest := read_all(archive.fileobj)) or rest.strip(b"\0"):
                raise EOFError("the archive does not end with its end marker")


def is_tar(path: PathLike, error: Error = DataError) -> bool:
    """Whether the file at `path` is a tar archive, compressed or not."""
    with _decompressed(path, error) as (stream, _):
        return what_else(stream.read(BEGINNING)) == "a tar archive"


@contextmanager
def _decompressed(path: PathLike, error: Error) -> Iterator[tuple[Any, int]]:
    """The content of a file, decompressed if it is compressed, open for reading, and the size of the file."""
    with open_file(path, error) as (file, size), unpacking_errors(path, error):
        kind = what_else(file.peek(BEGINNING)[:BEGINNING])
        with _COMPRESSED.get(kind or "", nullcontext)(file) as stream:
            yield stream, size


@contextmanager
def unpacking_errors(path: PathLike, error: Error) -> Iterator[None]:
    """Raise what is wrong with the packed file at `path` as `error`."""
    try:
        yield
    except _Refused as problem:
        raise error(f"{path}: {problem}") from problem
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError) as problem:
        raise error(f"{path}: truncated or corrupt ({problem})") from problem
    except RuntimeError as problem:  # of zipfile: a password, or a method that it does not know
        raise error(f"{path}: cannot be unpacked ({problem})") from problem
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or f'truncated or corrupt ({problem})'}") from problem


class Limited:
    """A stream of unpacked bytes that raises an error once more than `max_bytes` bytes have come out of it."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self.stream = stream
        self.left = self.max_bytes = max_bytes

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none at the end."""
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise _Refused(
                f"unpacks to more than {self.max_bytes:,} bytes, far more than text does; "
                "if you trust it, unpack it first"
            )
        return data


def read_all(stream: Any) -> bytearray:
    """All remaining bytes of a stream."""
    data = bytearray()
    while piece := stream.read(_PIECE):
        data += piece
    return data

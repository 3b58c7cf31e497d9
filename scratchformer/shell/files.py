"""Files that survive a kill or a power cut while they are written, and the lock of a folder.

A folder may come from a stranger, and a link in it may name any file of the user. No link inside a folder is followed
for writing: a file is replaced as a whole (`replacing`), which replaces a link too, or it is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .reading import DataError, Error
from .text import printable

LOCK = "run.lock"


class InUse(RuntimeError):
    """Another process is using this folder."""


def cache_dir() -> Path:
    """The folder for downloads: $SCRATCHFORMER_DATA if set, otherwise the user's cache folder."""
    import pooch  # here, since it takes 7 MB of memory

    return Path(os.environ.get("SCRATCHFORMER_DATA") or pooch.os_cache("scratchformer")).expanduser()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in a folder of its own beside `path`; at the end the new file is flushed to disk and renamed
    to `path`.

    If the program is killed, the power fails or the disk is full, the old file is still there. Everything that a killed
    program leaves, including temporary files of other libraries, is in that folder, which the next write removes. The
    umask sets the permissions.
    """
    folder = path.with_name(path.name + ".unfinished")
    unfinished = folder / "new"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with _naming(path):
            folder.mkdir()
            unfinished.touch()
            mode = unfinished.stat().st_mode
            yield unfinished
            unfinished.chmod(mode)  # safetensors makes files that only the owner may read
            force_to_disk(unfinished)
            os.replace(unfinished, path)
            force_to_disk(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into, beside `path`; at the end it takes the place of the folder `path`, which is removed.

    If the program is killed, the folder at `path` is the old one, the new one or missing, and never a mixture. What a
    killed program leaves beside it is removed by the next call.
    """
    beside = path.with_name(path.name + ".unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with _naming(path):
            (beside / "new").mkdir(parents=True)
            yield beside / "new"
            if path.exists():
                os.rename(path, beside / "old")
            os.rename(beside / "new", path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files that a killed program has left. The caller must hold the folder's lock."""
    for path in folder.glob("*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, where missing, and flush each to disk."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        force_to_disk(path.parent)


def force_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk, so that they survive a power cut."""
    folder = path.is_dir()
    if folder and os.name != "posix":  # Windows cannot open folders
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (folder and error.errno in (errno.EACCES, errno.EINVAL)):  # a folder that cannot be flushed
            raise


def append(path: Path, line: str) -> None:
    """Add a line to the end of a text file. It may be lost in a power cut until `force_to_disk` is called."""
    with _naming(path), open(expect_no_link(path), "a", encoding="utf-8", newline="\n") as file:
        file.write(line + "\n")


def expect_no_link(path: Path, error: Error = DataError) -> Path:
    """`path`, a file or a folder that is to be written to, and may be missing. Raises `error` if it is a link."""
    if path.is_symlink():
        raise error(f"{path}: expected no link, got one to {printable(os.readlink(path))}: remove it")
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process and thread out of `folder`, which is created if necessary, while the block runs.

    The operating system locks the file `LOCK`, which stays, and unlocks it when the process ends, even if it is killed.
    Raises InUse if another one holds the lock. A warning says if the file system has no locks.
    """
    make_folder(folder)
    with open(expect_no_link(folder / LOCK, InUse), "ab") as file:
        try:
            _lock(file)
        except (BlockingIOError, PermissionError) as error:
            raise InUse(
                f"{folder} is in use by another process: wait until it ends, or choose another folder"
            ) from error
        except OSError as error:
            name = printable(str(folder), 4096)
            warnings.warn(f"{name} cannot be locked: this file system has no locks ({error})", stacklevel=2)
        yield


def _lock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # there on Windows
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of this file to write errors that name none, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise

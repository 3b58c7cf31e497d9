"""Writing files all or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; afterwards what was written is forced to disk and renamed over `path`.

    Whenever the program is killed, or the disk is full, the old file is still there. Permissions are the umask's.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)  # safetensors makes a file that only its owner may read
        _force_to_disk(unfinished, os.O_RDWR)
        os.replace(unfinished, path)
        if os.name == "posix":  # Windows opens no folders
            _force_to_disk(path.parent, os.O_RDONLY)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _force_to_disk(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The record of what a student has done, in a file beside the exercises: it moves with the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..shell.files import InUse, locked, replacing
from ..shell.reading import read_json
from ..shell.text import shown
from .course import NAMES

FILE = "progress.json"
FOLDER = "exercises"
PATIENCE = 30.0  # seconds to wait for another command, which holds the lock for a few milliseconds


@dataclass
class Record:
    """The record of one exercise. hints: how many were given. solution: whether it was seen before passing."""

    passed: bool = False
    hints: int = 0
    solution: bool = False


@dataclass
class Progress:
    """The records by exercise, as they were when they were read.

    written: the whole file, so that what is unknown here is kept.
    """

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> Record:
        return self.records.setdefault(name, Record())

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.py"

    def started(self, name: str) -> bool:
        return self.path(name).is_file()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Read the records, let the block change them, and write them, while no other command can.

        A full disk or a crash leaves the old file.
        """
        with ExitStack() as stack:
            give_up = time.monotonic() + PATIENCE
            while True:
                try:
                    stack.enter_context(locked(self.folder))
                    break
                except InUse:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.01)
            current = find(str(self.folder))
            self.records, self.written = current.records, current.written
            yield
            for name, each in self.records.items():
                if name in self.written or each != Record():
                    self.written[name] = self.written.get(name, {}) | asdict(each)
            write(self.folder / FILE, json.dumps(self.written, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


def find(folder: str | None = None) -> Progress:
    """The progress in `folder`; by default in the current folder if it has exercises, otherwise in ./exercises.

    Raises ValueError if the progress file cannot be read.
    """
    if folder is None:
        folder = "." if Path(FILE).is_file() else FOLDER
    path = Path(folder) / FILE
    if not path.exists():
        return Progress(Path(folder))
    contents = read_json(path, unreadable)
    known = [each.name for each in fields(Record)]
    records = {}
    for name in (name for name in NAMES if name in contents):
        if not isinstance(contents[name], dict):
            raise unreadable(f"{path}: {name}: expected an object {{...}}, got {shown(contents[name])}")
        records[name] = Record(**{each: value for each, value in contents[name].items() if each in known})
    return Progress(Path(folder), records, contents)


def unreadable(what: str) -> ValueError:
    return ValueError(f"{what}. Your progress cannot be read: repair this file, or move it away to start over")

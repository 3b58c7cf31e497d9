"""The record of what a student has done, in a file beside the exercises: it moves with the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..shell.files import InUse, locked, replacing
from ..shell.reading import read_json

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
    """The records by exercise, as they were when they were read."""

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)

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
            self.records = find(str(self.folder)).records
            yield
            noted = {name: asdict(each) for name, each in self.records.items() if each != Record()}
            write(self.folder / FILE, json.dumps(noted, indent=1) + "\n")


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
    try:
        return Progress(Path(folder), {name: Record(**each) for name, each in contents.items()})
    except TypeError as error:
        raise unreadable(f"{path}: {error}") from error


def unreadable(what: str) -> ValueError:
    return ValueError(f"{what}. Your progress cannot be read: repair this file, or move it away to start over")

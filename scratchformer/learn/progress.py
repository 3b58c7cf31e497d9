"""What a student has done, in a file beside the exercises: it moves with the folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..data.files import replacing
from ..data.reading import read_json
from ..ops.checks import printable

FILE = "progress.json"
FOLDER = "exercises"


@dataclass
class Record:
    """The record of one exercise. hints: how many were given. solution: whether it was seen before passing."""

    passed: bool = False
    hints: int = 0
    solution: bool = False


@dataclass
class Progress:
    folder: Path
    records: dict[str, Record] = field(default_factory=dict)

    def of(self, name: str) -> Record:
        return self.records.setdefault(name, Record())

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.py"

    def started(self, name: str) -> bool:
        return self.path(name).exists()

    def reload(self) -> None:
        """Read the records again: another command may have changed them while this one ran."""
        self.records = find(str(self.folder)).records

    def save(self) -> None:
        """Write the file; a full disk or a crash leaves the old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = {name: asdict(record) for name, record in self.records.items() if record != Record()}
        with replacing(self.folder / FILE) as unfinished:
            unfinished.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


def find(folder: str | None = None) -> Progress:
    """The progress in `folder`; by default in the current folder if it has exercises, otherwise in ./exercises.

    Raises ValueError if the progress file cannot be read.
    """
    if folder is None:
        folder = "." if Path(FILE).is_file() else FOLDER
    path = Path(folder) / FILE
    if not path.exists():
        return Progress(Path(folder))
    try:
        records = {name: Record(**record) for name, record in read_json(path).items()}
    except (ValueError, TypeError, AttributeError) as error:
        found = printable(str(error))
        raise ValueError(f"{path} cannot be read ({found}); repair it, or move it away to start over") from None
    return Progress(Path(folder), records)

"""Metrics as JSON lines, one record a line, and if wanted to TensorBoard as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first; a last line that a killed run left half-written is skipped."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Metrics:
    """Appends records to RUN/metrics.jsonl; each has the "step" it belongs to, counted from 1.

    resume_at: keep the records up to this step, and drop those of steps that will be done again.
    tensorboard: also write scalars to RUN/tensorboard (needs the extra: pip install 'scratchformer[tensorboard]').
    """

    def __init__(self, run: Path, resume_at: int = 0, tensorboard: bool = False) -> None:
        self.path = run / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] <= resume_at] if self.path.exists() else []
        unfinished = run / "metrics.jsonl.unfinished"
        unfinished.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        unfinished.replace(self.path)
        self.board = _summary_writer(run / "tensorboard") if tensorboard else None

    def write(self, step: int, **values: float) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs: pip install 'scratchformer[tensorboard]'") from error
    return SummaryWriter(str(folder))

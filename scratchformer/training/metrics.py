"""Metrics as JSON lines, one record per line, and optionally for TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..data.files import append, replacing

METRICS = "metrics.jsonl"


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first. An incomplete last line, left by a killed run, is skipped.

    Raises ValueError if any other line is not a JSON object with a "step".
    """
    records, lines = [], Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path} line {number} is damaged")
    return records


class Metrics:
    """Appends records to RUN/metrics.jsonl, each with its "step", counted from 1. NaN becomes null.

    resume_at: keep the records up to this step, and drop those of later steps, which will be repeated.
    tensorboard: also write scalars to RUN/tensorboard (requires: pip install 'scratchformer[tensorboard]').
    """

    def __init__(self, run: Path, resume_at: int = 0, tensorboard: bool = False) -> None:
        self.path = run / METRICS
        kept = [r for r in read_metrics(self.path) if r["step"] <= resume_at] if self.path.exists() else []
        self.board = _summary_writer(run / "tensorboard") if tensorboard else None
        with replacing(self.path) as unfinished:
            unfinished.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")

    def write(self, step: int, **values: float) -> None:
        record = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        append(self.path, json.dumps(record))
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _json_number(value: float) -> float | int | None:
    """`value` for JSON: a Python number, or None if it is not finite."""
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _summary_writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs: pip install 'scratchformer[tensorboard]'") from error
    return SummaryWriter(str(folder))

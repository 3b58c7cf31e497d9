"""Metrics as JSON lines, one record per line, and optionally for TensorBoard."""

from __future__ import annotations

import json
import math
import secrets
import sys
from pathlib import Path
from typing import Any

from ..shell.files import append, expect_no_link, force_to_disk, replacing
from ..shell.reading import decoded, parsed, read_bytes
from ..shell.text import one_line, shown

METRICS = "metrics.jsonl"
MAX_METRICS = 1 << 27  # bytes; a run of a million steps has 20 MB


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first. An incomplete last line, left by a killed run, is skipped.

    Raises ValueError if there is none, or if any other line is not a JSON object with a number as "step".
    """
    *lines, _ = read_bytes(path, ValueError, MAX_METRICS).split(b"\n")
    return [_record(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parsed(decoded(line, where, ValueError), where, ValueError)
    if type(record.get("step")) is not int:
        raise ValueError(f"{where} is damaged: step is {shown(record.get('step'))}, expected a whole number")
    return record


class Metrics:
    """Appends records to RUN/metrics.jsonl, each with its "step", counted from 1. NaN becomes null.

    resume_at: keep the records up to this step, and drop those of later steps, which will be repeated.
    tensorboard: also write scalars to RUN/tensorboard (requires: pip install 'scratchformer[tensorboard]').
    """

    def __init__(self, run: Path, resume_at: int = 0, tensorboard: bool = False) -> None:
        self.path = run / METRICS
        kept: list[dict[str, Any]] = []
        if self.path.exists():
            kept = [record for record in read_metrics(self.path) if record["step"] <= resume_at]
        elif resume_at:
            print(one_line(f"{self.path} is missing: a new one begins at step {resume_at + 1}"), file=sys.stderr)
        self.board = _summary_writer(run / "tensorboard", resume_at) if tensorboard else None
        with replacing(self.path) as unfinished:
            unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8", newline="\n")

    def write(self, step: int, **values: float) -> None:
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        append(self.path, json.dumps(record))
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Wait until all records are on the disk."""
        force_to_disk(self.path)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _summary_writer(folder: Path, resume_at: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs: pip install 'scratchformer[tensorboard]'") from error
    expect_no_link(folder)
    unique = f".{secrets.token_hex(8)}"  # so that no link can be waiting under the name of the file
    return SummaryWriter(str(folder), purge_step=resume_at + 1, filename_suffix=unique)  # later steps will be repeated

"""Metrics as JSON lines, one record per line, and optionally for TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from ..shell.files import append, expect_no_link, force_to_disk, replacing
from ..shell.reading import parsed, read_bytes
from ..shell.text import one_line

METRICS = "metrics.jsonl"  # each line has the checksum of itself and of all lines before it
MAX_METRICS = 1 << 27  # bytes; a run of a million steps has 20 MB
MAX_STEP = 1 << 53  # a float64 is exact up to here
MEASURED = "tokens_per_second"  # the only value that differs when steps are repeated
_SEALED = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}')


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first. An incomplete last line, left by a killed run, is skipped.

    Raises FileNotFoundError if there is none, and ValueError if any other line is damaged: if its checksum does not
    match, or if it is not a JSON object with a whole number as "step" and a number or null as every other value.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    records, damage = _read(path)
    if damage:
        raise ValueError(damage)
    return records


class Summary(NamedTuple):
    """The number and the checksum of the records before a snapshot.

    A snapshot has them, so that records that are missing or from another run are noticed.
    """

    lines: int = 0
    crc32: int = 0  # of the records without MEASURED

    def after(self, record: Mapping[str, Any]) -> Summary:
        """The summary with one more record."""
        text = json.dumps({name: value for name, value in record.items() if name != MEASURED})
        return Summary(self.lines + 1, zlib.crc32(text.encode(), self.crc32))


def kept_records(
    path: Path | str, step: int, expected: Sequence[int] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The records of a metrics file that a run keeps if it is resumed at `step`, and what is wrong with later ones.

    expected: their `Summary` in the snapshot; None if the snapshot is of an earlier version. Raises ValueError if one
    of these records is damaged, missing or from another run. Later records may be damaged: their steps will be
    repeated, and a power cut may have left anything there.
    """
    records, damage = _read(path)
    kept = [record for record in records if record["step"] <= step]
    if damage and (expected is None or len(kept) < expected[0]):
        raise ValueError(damage)
    summary = reduce(Summary.after, kept, Summary())
    if expected is not None and summary != tuple(expected):
        what = f"the records up to step {step} have another checksum"
        if summary.lines != expected[0]:
            what = f"expected {expected[0]} records up to step {step}, got {summary.lines}"
        raise ValueError(f"{path} and the last snapshot are not from the same run: {what}")
    return kept, damage


def _read(path: Path | str) -> tuple[list[dict[str, Any]], str]:
    """The records before the first damaged line, and a message about that line; "" if none is damaged."""
    *lines, last = read_bytes(path, ValueError, MAX_METRICS).split(b"\n")
    sealed = any(map(_SEALED.fullmatch, (*lines, last, last[:-1])))  # a file of an earlier version has no checksums
    records, before = [], 0
    for number, line in enumerate([*lines, last], 1):
        record, crc = _record(line, sealed, before)
        if record is not None:
            records.append(record)
            before = crc
        elif number <= len(lines) or _record(last[:-1], sealed, before)[0] is not None:  # its line break was changed
            return records, f"{path} line {number} is damaged"
    return records, ""


def _record(line: bytes, sealed: bool, before: int) -> tuple[dict[str, Any] | None, int]:
    """The record in a line and the checksum of the line. If the line is damaged, the record is None.

    sealed: whether lines have checksums. before: the checksum of the line before.
    """
    if sealed:
        match = _SEALED.fullmatch(line)
        crc = 0 if match is None else zlib.crc32(match[1], before)
        if match is None or crc != int(match[2], 16):
            return None, before
        line, before = match[1] + b"}", crc
    try:
        record = parsed(line.decode(), "")
    except ValueError:
        return None, before
    step, *values = record.get("step"), *record.values()
    if type(step) is not int or not 0 <= step <= MAX_STEP or not all(map(is_number, values)):
        return None, before
    return record, before


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number, or null."""
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)


def seal(line: str, before: int) -> tuple[str, int]:
    """A line of JSON with its checksum, and the checksum. before: the checksum of the line before; 0 for the first."""
    content = line.removesuffix("}")
    crc = zlib.crc32(content.encode(), before)
    return f'{content}, "crc32": "{crc:08x}"}}', crc


class Metrics:
    """Appends records to RUN/metrics.jsonl, each with its "step", counted from 1. NaN becomes null.

    resume_at: keep the records up to this step, and drop those of later steps, which will be repeated. expected: the
    summary of the records that are kept, from the snapshot. The attribute `summary` is of all records in the file.
    tensorboard: also write scalars to RUN/tensorboard (requires: pip install 'scratchformer[tensorboard]').
    """

    def __init__(
        self, run: Path, resume_at: int = 0, tensorboard: bool = False, expected: Sequence[int] | None = None
    ) -> None:
        self.path = run / METRICS
        kept: list[dict[str, Any]] = []
        if self.path.exists():
            kept, damage = kept_records(self.path, resume_at, expected)
            if damage:
                print(one_line(f"{damage}: it is left out, since it comes after the last snapshot"), file=sys.stderr)
        elif expected is not None and expected[0]:
            print(one_line(f"{self.path} is missing: a new one begins at step {resume_at + 1}"), file=sys.stderr)
        self.board = _summary_writer(run / "tensorboard", resume_at) if tensorboard else None
        self.summary, self.crc = Summary(), 0
        with replacing(self.path) as unfinished:
            unfinished.write_text(
                "".join(self._sealed(record) + "\n" for record in kept), encoding="utf-8", newline="\n"
            )

    def write(self, step: int, **values: float) -> None:
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        append(self.path, self._sealed(record))
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def _sealed(self, record: dict[str, Any]) -> str:
        line, self.crc = seal(json.dumps(record), self.crc)
        self.summary = self.summary.after(record)
        return line

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

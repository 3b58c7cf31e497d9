"""The folder of a run: what it contains, and whether the run can be resumed."""

from __future__ import annotations

import os
from pathlib import Path

from .metrics import METRICS, read_metrics
from .snapshot import BEST, LAST, Snapshot, SnapshotError, kept_snapshots, load_snapshot

UNSAVED = "no-snapshot-yet"  # a file that exists from the start of training until last.safetensors is first saved


def holds_run(folder: Path) -> bool:
    """Whether training has begun in `folder`. If a program failed before that, the folder can be used again."""
    metrics = folder / METRICS
    logged = os.path.lexists(metrics) and not (metrics.is_file() and metrics.stat().st_size == 0)
    saved = any(os.path.lexists(folder / name) for name in (LAST, BEST, UNSAVED))
    return logged or saved or bool(kept_snapshots(folder))


def read_run(folder: Path) -> Snapshot | None:
    """The snapshot from which the run in `folder` resumes; None if none was saved yet, so the run starts at step 0.

    Changes nothing. Raises SnapshotError if last.safetensors was saved but is missing, if it was not made by `train`,
    or if it or the best model is damaged; ValueError if metrics.jsonl is damaged.
    """
    last, best = folder / LAST, folder / BEST
    if os.path.lexists(folder / METRICS):
        read_metrics(folder / METRICS)
    if not os.path.lexists(last):
        if holds_run(folder) and not (folder / UNSAVED).exists():
            raise SnapshotError(f"{last} is missing, so the run cannot go on: put it back, or choose another folder")
        return None
    if not last.is_file():
        raise SnapshotError(f"{last} is not a file, so the run cannot go on: put it back, or choose another folder")
    snapshot = load_snapshot(last)
    if type(snapshot.state.get("step")) is not int or "best" not in snapshot.state:
        raise SnapshotError(f"{last} is not a snapshot of a run: it has no step or no best score")
    if os.path.lexists(best):
        load_snapshot(best)
    return snapshot

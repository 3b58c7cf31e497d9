"""The folder of a run: what it contains, and whether the run can be resumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..nn import Layer
from ..optim.optimizer import Optimizer
from ..shell.text import one_line, shown
from .metrics import METRICS, read_metrics
from .snapshot import (
    BEST,
    LAST,
    Snapshot,
    SnapshotError,
    expect_model,
    kept_snapshots,
    load_snapshot,
    restore,
)

SETTINGS = "settings.json"
WORDS, SUBWORDS = "vocabulary.txt", "vocabulary.json"
TOKENIZER = "tokenizer"  # the folder of what a published model brought beside its weights
UNSAVED = "no-snapshot-yet"  # a file that exists from the start of training until last.safetensors is first saved


def holds_run(folder: Path) -> bool:
    """Whether training has begun in `folder`. If a program failed before that, the folder can be used again."""
    metrics = folder / METRICS
    logged = os.path.lexists(metrics) and not (metrics.is_file() and metrics.stat().st_size == 0)
    saved = any(os.path.lexists(folder / name) for name in (LAST, BEST, UNSAVED))
    return logged or saved or bool(kept_snapshots(folder))


def read_run(folder: Path) -> Snapshot | None:
    """The snapshot from which the run in `folder` resumes; None if none was saved yet, so the run starts at step 0.

    Changes nothing. Raises SnapshotError if last.safetensors was saved but is missing, if it was not made by a run, or
    if it, the best model or a snapshot that was kept is damaged; ValueError if metrics.jsonl is damaged.
    """
    last, best, metrics = folder / LAST, folder / BEST, folder / METRICS
    if os.path.lexists(metrics):
        read_metrics(metrics)  # raises an error if it is damaged
    if not os.path.lexists(last):
        if holds_run(folder) and not (folder / UNSAVED).exists():
            raise SnapshotError(f"{last} is missing, so the run cannot go on: put it back, or choose another folder")
        return None
    snapshot = load_snapshot(last)
    if not {"step", "best"} <= snapshot.state.keys():
        raise SnapshotError(f"{last} is not a snapshot of a run: it has no step or no best score")
    for path in ([best] if os.path.lexists(best) else []) + kept_snapshots(folder):
        load_snapshot(path)
    return snapshot


def expect_same(snapshot: Snapshot, expected: Mapping[str, Any]) -> None:
    """Raise SnapshotError, naming what differs, unless the snapshot's state has these values."""
    for name, here in expected.items():
        if (saved := snapshot.state.get(name)) != here:
            saved, now = (shorten(repr(value), 200, placeholder="...") for value in (saved, here))
            raise SnapshotError(f"{snapshot.path} has {name} {saved}, this run has {now}")


def load_run(
    out: Path,
    model: Layer,
    optimizer: Optimizer,
    batches: Any,
    state: dict[str, Any],
    fixed: Iterable[str],
    metric: str,
) -> int | None:
    """Load the last snapshot of the run in `out` into the model, the optimizer, the batches if they have a state, and
    `state`.

    Returns its step, or None if none was saved yet. Raises SnapshotError if the snapshot has another value for one of
    the entries `fixed` of `state`, if its best score is not by `metric`, or if it, the best one or one that was kept is
    of another run or model.
    """

    snapshot = read_run(out)
    if snapshot is None:
        if (out / UNSAVED).exists():
            note = f"{out}: no snapshot was saved yet, so training starts from the beginning"
            print(one_line(note), file=sys.stderr)
        return None
    of_run = {name: state[name] for name in fixed}
    expect_same(snapshot, of_run)
    expect_model(snapshot, model)
    expect_same(snapshot, {name: value for name, value in state.items() if name.startswith("optimizer_")})
    for path in (out / BEST, *kept_snapshots(out)):
        if path.exists():
            other = load_snapshot(path)
            expect_same(other, of_run)
            expect_model(other, model)
    step, best = snapshot.state["step"], snapshot.state["best"]
    if best is not None and best.get(metric) is None:
        raise SnapshotError(f"{snapshot.path} has the best score {shown(best)}, this run selects by {metric}")
    restore(snapshot, model, optimizer, batches)
    state |= {"step": step, "best": best}
    if isinstance(libraries := snapshot.state.get("libraries"), str):
        state["libraries"] = libraries
    if "loss_scale" in snapshot.state:
        state["loss_scale"] = snapshot.state["loss_scale"]
    if best is not None and not (out / BEST).exists():
        note = f"{out / BEST} is missing: the best model is selected afresh from here on"
        print(one_line(note), file=sys.stderr)
        state["best"] = None
    return step

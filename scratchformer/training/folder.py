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
from .metrics import MAX_STEP, METRICS, read_metrics
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
    if not last.is_file():
        raise SnapshotError(f"{last} is not a file, so the run cannot go on: put it back, or choose another folder")
    snapshot = load_snapshot(last)
    _check_state(last, snapshot.state)
    for path in ([best] if os.path.lexists(best) else []) + kept_snapshots(folder):
        _check_state(path, load_snapshot(path).state)
    return snapshot


def _check_state(path: Path, state: Mapping[str, Any]) -> None:
    """Raise SnapshotError unless the state is one that a run saved."""
    if "step" not in state or "best" not in state:
        raise SnapshotError(f"{path} is not a snapshot of a run: it has no step or no best score")
    step, best = state["step"], state["best"]
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise SnapshotError(f"{path} is not a snapshot of a run: step is {shown(step)}, expected a whole number")
    if best is not None and not (isinstance(best, dict) and best and {*map(type, best.values())} <= {int, float}):
        raise SnapshotError(f"{path} is not a snapshot of a run: best is {shown(best)}, expected scores or null")


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

    def expect_same(snapshot: Snapshot, names: Iterable[str]) -> None:
        for name in names:
            if (saved := snapshot.state.get(name)) != state[name]:
                saved, now = (shorten(repr(value), 200, placeholder="...") for value in (saved, state[name]))
                raise SnapshotError(f"{snapshot.path} has {name} {saved}, this run has {now}")

    snapshot = read_run(out)
    if snapshot is None:
        if (out / UNSAVED).exists():
            note = f"{out}: no snapshot was saved yet, so training starts from the beginning"
            print(one_line(note), file=sys.stderr)
        return None
    expect_same(snapshot, fixed)
    expect_model(snapshot, model)
    expect_same(snapshot, (name for name in state if name.startswith("optimizer_")))
    for path in (out / BEST, *kept_snapshots(out)):
        if path.exists():
            other = load_snapshot(path)
            expect_same(other, fixed)
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

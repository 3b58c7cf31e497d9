"""Snapshots: saved weights, and with them all that a run needs to continue, in one safetensors file.

Tensors are named "model.…", "optimizer.…" and, for batches that keep a memory, "batches.…". The header holds JSON: the
model's class and sizes, and the state of the run (step, seed, best score so far, the vocabulary's fingerprint). Random
numbers and the data position are functions of seed and step, so these two are all that is to be saved of them. Reading
a snapshot runs no code from it.

A file is written beside its place and then renamed over the old one (`replacing`). Whenever the program is killed, or
the disk is full, the last good snapshot is still there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import models
from ..data.files import replacing
from ..nn import Layer, add_lora
from ..optim.optimizer import Optimizer
from ..rng import Zeros

FORMAT = "scratchformer snapshot 1"
MODELS = {name: getattr(models, name) for name in models.__all__ if hasattr(getattr(models, name), "loss")}
MODELS["Bert"] = models.Bert


class SnapshotError(ValueError):
    """A snapshot that cannot be written or read, or that belongs to something else."""


class Snapshot(NamedTuple):
    model_class: str
    config: dict[str, Any]
    state: dict[str, Any]
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    batches: dict[str, np.ndarray]


def save_snapshot(
    path: Path | str, model: Layer, optimizer: Optimizer | None = None, batches: Any = None, **state: Any
) -> None:
    """Write a snapshot of the model, of the optimizer and the batches' memory if given, and of `state` (JSON values),
    all or nothing.

    Raises SnapshotError if it cannot be written; then a snapshot that was at `path` before is untouched.
    """
    path = Path(path)
    tensors = {f"model.{name}": array for name, array in model.state_dict().items()}
    for part, owner in ("optimizer", optimizer), ("batches", batches):
        if owner is not None:
            tensors |= {f"{part}.{name}": array for name, array in owner.state_dict().items()}
    try:
        described = json.dumps({"class": type(model).__name__, "config": model.config})
    except TypeError as error:  # such as a layer of one's own as `positions`
        raise SnapshotError(f"cannot save {path}: a {type(model).__name__} made with this: {error}") from error
    header = {"format": FORMAT, "model": described, "state": json.dumps(state)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, header)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"cannot save {path}: {error}; the last good snapshot is kept") from error


def holds_run(folder: Path) -> bool:
    """Whether training has begun in `folder`; one that failed before, for want of its data, may be used again."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "last.safetensors", "best.safetensors"))


def best_snapshot(path: Path | str) -> Path:
    """The best snapshot of a run's folder, else its last; or the file that is named."""
    best = Path(path) / "best.safetensors"
    return best if best.is_file() else Path(path)


def kept_snapshots(run: Path | str) -> list[Path]:
    """The snapshots that `train` kept in a run's folder (its `keep`), oldest first."""
    return sorted(Path(run).glob("step-*.safetensors"))


def average_snapshots(paths: Sequence[Path | str], model: Layer) -> None:
    """Give `model` the mean of the weights of several snapshots, all of this very model.

    Near the end of training the weights wander about a minimum; their mean is nearer to it than most of them. Vaswani
    et al., 2017, section 6.1, average the last 5. Raises SnapshotError, and leaves the model as it is, if there are
    none, or one does not fit.
    """
    if not paths:
        raise SnapshotError("average_snapshots: expected at least one snapshot, got none")
    before, total = model.state_dict(), None
    try:
        for path in paths:
            restore(load_snapshot(path), model)
            weights = {name: array.astype(np.float64) for name, array in model.state_dict().items()}
            total = weights if total is None else {name: total[name] + weights[name] for name in total}
    except SnapshotError:
        model.load_state_dict(before)
        raise
    model.load_state_dict({name: array / len(paths) for name, array in total.items()})


def load_snapshot(path: Path | str) -> Snapshot:
    """Read a snapshot; a run's folder means its last one. Raises SnapshotError if there is none, or it is damaged."""
    path = Path(path)
    if path.is_dir():
        path = path / "last.safetensors"
    if not path.is_file():
        raise SnapshotError(f"no snapshot at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise SnapshotError(f"{path} is a safetensors file, but not a {FORMAT}")
            described, state = json.loads(header["model"]), dict(json.loads(header["state"]))
            model_class, config = described["class"], dict(described["config"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SnapshotError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} is damaged or no snapshot: {error}") from error
    own = {
        part: {name.partition(".")[2]: a for name, a in tensors.items() if name.startswith(part + ".")}
        for part in ("model", "optimizer", "batches")
    }
    return Snapshot(model_class, config, state, **own)


def load_model(path: Path | str) -> tuple[Layer, dict[str, Any]]:
    """The model of a snapshot, built anew with its weights, and the state of its run.

    Raises SnapshotError if the snapshot is damaged, or of a model that this version does not know.
    """
    snapshot = load_snapshot(path)
    if snapshot.model_class not in MODELS:
        raise SnapshotError(f"{path}: unknown model {snapshot.model_class!r}")
    try:
        config = dict(snapshot.config)
        lora = config.pop("lora", None)
        model = MODELS[snapshot.model_class](**config, key=Zeros())
        if lora is not None:
            add_lora(model, **lora)
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"{path}: this version makes no such {snapshot.model_class}: {error}") from error
    restore(snapshot, model)
    return model, snapshot.state


def expect_model(snapshot: Snapshot, model: Layer) -> None:
    """Raise SnapshotError, naming what differs, unless the snapshot is of a model of this class and these sizes."""
    if snapshot.model_class != type(model).__name__ or snapshot.config != model.config:
        differing = {
            name: f"{snapshot.config.get(name)} in the snapshot, {model.config.get(name)} here"
            for name in sorted(snapshot.config.keys() | model.config.keys())
            if snapshot.config.get(name) != model.config.get(name)
        }
        raise SnapshotError(f"snapshot of another model ({snapshot.model_class}): {differing}")


def restore(snapshot: Snapshot, model: Layer, optimizer: Optimizer | None = None, batches: Any = None) -> None:
    """Load weights, and the state of the optimizer and of batches with a memory if they are given, from a snapshot of
    just this model.

    Raises SnapshotError, naming what differs, if the snapshot is of a model of other sizes, of another optimizer, or of
    batches of other sizes; the model is not changed then.
    """
    expect_model(snapshot, model)
    before = model.state_dict()
    try:
        model.load_state_dict(snapshot.model)
        if batches is not None:
            batches.load_state_dict(snapshot.batches)
        if optimizer is not None:
            optimizer.load_state_dict(snapshot.optimizer)
    except ValueError as error:
        model.load_state_dict(before)
        raise SnapshotError(f"snapshot does not fit: {error}") from error

"""What a training run keeps: its state, its folder with snapshots and metrics, and its best model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from ..backend import CPU
from ..nn import Layer
from ..optim.optimizer import Optimizer
from ..parallel.diagnose import nonfinite_tensor
from ..parallel.numerics import as_before, changes, is_record, numerics
from ..parallel.precision import LossScale
from ..parallel.ranks import Elsewhere, Ranks
from ..parallel.replicas import Replicas
from ..shell.files import locked, remove_unfinished, replacing
from ..shell.text import one_line, shown
from .folder import UNSAVED, holds_run, read_run
from .metrics import Metrics, Summary
from .snapshot import (
    BEST,
    LAST,
    NotFinite,
    Snapshot,
    SnapshotError,
    describe,
    expect_model,
    kept_snapshots,
    load_snapshot,
    restore,
    save_snapshot,
)

EARLIER = {"precision": "float32"}  # of snapshots of an earlier version, whose state has no such entry


class Diverged(RuntimeError):
    """The loss, a gradient, a parameter or the optimizer's state is no longer finite."""


class RunState:
    """The state of a run of `train`, in all ranks; rank 0 alone reads and writes the folder `out`.

    values: JSON values with "step", "best" and "records", which snapshots store. select: as for `train`. saved: the
    step of the last snapshot, or None. metrics: open in rank 0 after `begin`.
    """

    def __init__(
        self,
        replicas: Replicas,
        optimizer: Optimizer,
        batches: Any,
        out: Path,
        values: dict[str, Any],
        select: tuple[str, str],
        loss_scale: LossScale | None,
        shard: bool,
    ) -> None:
        self.replicas, self.model, self.ranks = replicas, replicas.model, replicas.ranks
        self.optimizer, self.loss_scale, self.shard = optimizer, loss_scale, shard
        self.batches = batches if hasattr(batches, "state_dict") else None
        self.out, self.last, self.best = out, out / LAST, out / BEST
        self.metric, self.sign = select[0], 1 if select[1] == "max" else -1
        self.values: dict[str, Any] = json.loads(describe(self.model, values)["state"])  # as a snapshot stores it
        self.saved: int | None = None
        self.metrics: Any = None

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.values["step"]

    def begin(
        self,
        opened: ExitStack,
        steps: int,
        resume: bool,
        fixed: Iterable[str],
        tensorboard: bool,
        on_start: Callable[[], None],
    ) -> None:
        """Let rank 0 lock, read and write the folder, and send the others everything that it read.

        opened: what keeps the lock and the metrics open. fixed: the entries of `values` that a snapshot must have too.
        """

        def start() -> tuple[Sequence[int] | None, dict[str, Any]]:
            opened.enter_context(locked(self.out))
            return self.read(steps, resume, fixed), self.values

        def write() -> dict[str, Any]:
            self.metrics = opened.enter_context(closing(self.open(records, tensorboard, on_start)))
            return self.values

        records, values = self.ranks.from_first(start)
        self.values.update(values)
        if self.replicas.device is CPU:
            self.compute_as_before()
        self.values.update(self.ranks.from_first(write))
        if self.ranks.size > 1:
            self.send()

    def compute_as_before(self) -> None:
        """Let all ranks use the same libraries for products, those with which the run began if they are here.

        Raises ValueError in rank 0, and ends the others, if the ranks would not compute the same bits.
        """
        before, precision = self.values["numerics"], self.replicas.precision
        record = self.ranks.from_first(lambda: before or numerics(precision))
        self.replicas.as_before.close()
        self.replicas.as_before.enter_context(as_before(record))
        self.values["numerics"] = now = numerics(precision)
        self.ranks.expect_same(now)
        if before is not None and before != now and self.ranks.first:
            what = f"{self.out}: from here on, the bits differ from those of an uninterrupted run"
            print(one_line(f"{what} ({changes(before, now)})"), file=sys.stderr)

    def read(self, steps: int, resume: bool, fixed: Iterable[str]) -> Sequence[int] | None:
        """Check everything that can make a run be refused, and load the last snapshot of one that is resumed."""
        records = None
        if resume:
            self.saved, records = _load_run(
                self.out, self.model, self.optimizer, self.batches, self.values, fixed, self.metric
            )
            if self.loss_scale is not None and self.saved is not None:
                try:
                    self.loss_scale.restore(self.values["loss_scale"])
                except ValueError as error:
                    raise SnapshotError(f"{self.last}: {error}") from error
            if self.step > steps:
                raise ValueError(
                    f"steps: expected at least {self.step}, which the run in {self.out} has already done, got {steps}"
                )
        elif holds_run(self.out):
            raise ValueError(f"{self.out} holds a run: resume it, or choose another folder")
        self.expect_finite()
        return records

    def open(self, records: Sequence[int] | None, tensorboard: bool, on_start: Callable[[], None]) -> Metrics:
        """Write to the folder for the first time."""
        remove_unfinished(self.out)
        metrics = Metrics(self.out, self.step, tensorboard, records)
        self.values["records"] = list(metrics.summary)
        on_start()
        if self.saved is not None:
            (self.out / UNSAVED).unlink(missing_ok=True)  # left by a run that was killed after its first snapshot
        else:
            with replacing(self.out / UNSAVED) as unfinished:
                unfinished.write_text("Training has begun. This file is deleted once the first snapshot is saved.\n")
        return metrics

    def send(self) -> None:
        """Send what rank 0 read to the other ranks."""
        ranks, optimizer = self.ranks, self.optimizer
        ranks.send_first(self.model.flat.data)
        optimizer.steps = ranks.from_first(lambda: optimizer.steps)
        parts = self.parts()
        if self.shard and not ranks.first:
            self.replicas.shard(optimizer)
        if self.step:  # otherwise all ranks have made the same state
            for name in optimizer.buffers:
                ranks.send_parts(getattr(optimizer, name), parts)
        if self.shard and ranks.first:
            self.replicas.shard(optimizer)
        if self.batches is not None:
            restored = ranks.from_first(self.batches.state_dict)
            if not ranks.first:
                self.batches.load_state_dict(restored)
        if self.loss_scale is not None and not ranks.first:
            self.loss_scale.restore(self.values["loss_scale"])

    def parts(self) -> list[slice]:
        """Which part of the optimizer's buffers each rank has."""
        if self.shard:
            return [self.optimizer.state_of(part) for part in self.optimizer.slices(self.ranks.size)]
        return [slice(None)] * self.ranks.size

    def diverged(self, what: str, step: int | None = None) -> Diverged | Elsewhere:
        """The error to raise; every rank finds the same, and rank 0 reports it."""
        self.ranks.ending = True
        if not self.ranks.first:
            return Elsewhere(1)
        good = f"The last good snapshot is {self.last}, from step {self.saved}"
        good = "No snapshot was saved yet" if self.saved is None else good
        return Diverged(f"step {self.step if step is None else step}: {what}. {good}")

    def expect_finite(self) -> None:
        """Raise Diverged if a parameter is not finite."""
        if bad := nonfinite_tensor({name: p.data for name, p in self.model.named_parameters().items()}):
            raise self.diverged(f"{bad} is not finite")

    def evaluate(self, evaluate: Callable[[], dict[str, float]], note: Callable[[str], None]) -> None:
        """Score the model, note the scores, and save the model if it is the best so far."""
        self.replicas.join_whole()
        self.expect_finite()
        found = evaluate()
        if self.metric not in found:
            known = ", ".join(found)
            raise ValueError(f"select: expected one of {known}, which evaluate() returns, got {self.metric!r}")
        found = {name: float(value) for name, value in found.items()}
        if self.ranks.first:
            self.metrics.write(self.step, **{f"validation_{name}": value for name, value in found.items()})
        note(f"step {self.step}: validation " + ", ".join(f"{n} {v:.4f}" for n, v in found.items()))
        best, score = self.values["best"], found[self.metric]
        if math.isfinite(score) and (best is None or self.sign * score > self.sign * best[self.metric]):
            self.values["best"] = {"step": self.step, **found}
            self.save(self.best, whole=False)

    def save(self, path: Path | None = None, whole: bool = True) -> None:
        """Save a snapshot, by default the last one: the weights, and if it is `whole` everything else that the run
        needs to go on.
        """
        self.replicas.join_whole()
        gather = self.replicas.sharded and whole
        own = Gathered(self.optimizer, self.ranks, self.parts()) if gather else self.optimizer
        self.ranks.from_first(lambda: self.write(path or self.last, *((own, self.batches) if whole else ())))

    def write(self, path: Path, *parts: Any) -> None:
        self.metrics.flush()  # first, so that no power cut leaves a snapshot without the records before it
        self.values["records"] = list(self.metrics.summary)
        if self.loss_scale is not None:
            self.values["loss_scale"] = self.loss_scale.state()
        try:
            save_snapshot(path, self.model, *parts, **self.values)
        except NotFinite as error:
            raise self.diverged(str(error)) from error
        if path == self.last:
            self.saved = self.step
            (self.out / UNSAVED).unlink(missing_ok=True)

    def keep(self, most: int) -> None:
        """Save the model alone at this step, and delete the oldest of more than `most` such snapshots."""
        self.save(self.out / f"step-{self.step:08d}.safetensors", whole=False)
        for old in kept_snapshots(self.out)[:-most] if self.ranks.first else []:
            old.unlink()


class Gathered:
    """The state of a sharded optimizer, from all ranks. parts: those of the buffers, by rank."""

    def __init__(self, optimizer: Optimizer, ranks: Ranks, parts: list[slice]) -> None:
        own = optimizer.state_dict()
        buffers = {name: ranks.collect_parts(own[name], parts) for name in optimizer.buffers}
        self.state = own | buffers

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.state


def _load_run(
    out: Path,
    model: Layer,
    optimizer: Optimizer,
    batches: Any,
    state: dict[str, Any],
    fixed: Iterable[str],
    metric: str,
) -> tuple[int | None, Sequence[int] | None]:
    """Load the last snapshot of the run in `out` into the model, the optimizer, the batches if they have a state, and
    `state`.

    Returns its step, or None if none was saved yet, and the `Summary` of the metrics before it, or None if it has none.
    Raises SnapshotError if the snapshot has another value for one of the entries `fixed` of `state`, if its best score
    is not by `metric`, or if it, the best one or one that was kept is of another run or model.
    """

    def expect_same(snapshot: Snapshot, names: Iterable[str]) -> None:
        for name in names:
            if (found := snapshot.state.get(name, EARLIER.get(name))) != state[name]:
                found, own = (shorten(repr(value), 200, placeholder="...") for value in (found, state[name]))
                raise SnapshotError(f"{snapshot.path} has {name} {found}, this run has {own}")

    snapshot = read_run(out)
    if snapshot is None:
        if (out / UNSAVED).exists():
            note = f"{out}: no snapshot was saved yet, so training starts from the beginning"
            print(one_line(note), file=sys.stderr)
        return None, Summary()
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
    if is_record(found := snapshot.state.get("numerics")):
        state["numerics"] = found
    if "loss_scale" in snapshot.state:
        state["loss_scale"] = snapshot.state["loss_scale"]
    if best is not None and not (out / BEST).exists():
        note = f"{out / BEST} is missing: the best model is selected afresh from here on"
        print(one_line(note), file=sys.stderr)
        state["best"] = None
    return step, snapshot.state.get("records")

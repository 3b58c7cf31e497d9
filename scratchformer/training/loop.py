"""The training loop."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, array_module, to_cpu
from ..ops.checks import expect_at_least, expect_instance, expect_number, expect_positive
from ..optim.clip import global_norm, share_for
from ..optim.optimizer import Optimizer
from ..parallel.diagnose import first_nonfinite
from ..parallel.precision import LossScale
from ..parallel.ranks import Elsewhere
from ..parallel.replicas import Replicas
from ..rng import Key
from ..shell.process import Stopped, requests_taken, signals_caught, stop
from ..shell.progress import progress_bar
from ..shell.text import shown
from .metrics import Summary
from .state import Diverged, RunState

NOTED = 3  # skipped batches that are noted one by one


def train(
    replicas: Replicas,
    optimizer: Optimizer,
    schedule: Callable[[int], float],
    batches: Any,
    steps: int,
    out: Path | str,
    evaluate: Callable[[], dict[str, float]] | None = None,
    evaluate_every: int = 0,
    select: tuple[str, str] = ("loss", "min"),
    snapshot_every: int = 100,
    keep: int = 0,
    log_every: int = 10,
    clip: float | None = 1.0,
    seed: int = 0,
    identity: dict[str, Any] | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    loss_scale: LossScale | None = None,
    shard: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train `replicas.model` for `steps` steps; the folder `out` gets a log, snapshots and the best model.

    A step computes the gradients of `batches.batch(step)` in micro-batches on the replicas, clips their global norm to
    `clip` (None: no clipping), sets the learning rate to `schedule(step)`, and steps the optimizer. `evaluate()` is
    called every `evaluate_every` steps and at the end, and returns metrics on held-out data. `select` names the metric
    that decides which model is best, and whether it is the one with the "min" or the "max".

    In `out`: metrics.jsonl; last.safetensors, every `snapshot_every` steps and at the end; best.safetensors; and with
    `keep`, for `average_snapshots`, the model alone as step-N.safetensors, at the last `keep` multiples of
    `snapshot_every`.
    Until last.safetensors is first saved, the file no-snapshot-yet says so. The folder is locked until the end.
    The schedule is a function of the step. Its parameters are noted in the snapshot, but a run may be resumed with
    others. If `batches` has `state_dict` and `load_state_dict`, its state is saved and restored with the run. If it
    carries memory from step to step, it also has `remember(step, memories)`, which is called after each step with what
    `Replicas.gradients` remembered.
    identity: JSON values by name, such as fingerprints of the data; a snapshot made with others is refused. A name must
    not be one of the run's own, such as "step" or "best".
    resume: continue from last.safetensors. On a CPU the run then ends with exactly the parameters that it would have
    had without the interruption. A run that was stopped before its first snapshot starts again at step 0. If a run is
    refused, because its snapshot is missing, damaged or from another run, the folder is not changed.
    loss_scale: for replicas in float16; by default a new `LossScale`. A batch whose gradient overflows is skipped:
    weights and optimizer stay as they are, and the step takes the next batch. So after s skipped batches, step n uses
    batch n + s. Standard error reports the first skipped batches one by one, and how many there were at the end.
    shard: with several ranks, each keeps the optimizer's state for its slice of the parameters only.
    on_start: called just before training begins, when the folder belongs to this run and a program may write to it.
    Returns the state at the end: "step", "best" (the metrics of the best model), and "records" (the number of records
    in metrics.jsonl, and their checksum).

    Raises Diverged if the loss, a gradient or a parameter is not finite, naming the first layer or tensor (in float16 a
    gradient that is not finite even with the smallest loss scale);
    SnapshotError if a snapshot cannot be saved or is from another run, or if the model's `config` is not JSON;
    ValueError if an argument is out of range, if `out` holds a run and resume is False, or if the run has done more
    than `steps` steps; InUse if another process trains in `out`. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 saves a snapshot
    after the current step and raises KeyboardInterrupt.
    """
    expect_instance("replicas", replicas, Replicas)
    expect_instance("schedule", schedule, Callable)
    expect_instance("loss_scale", loss_scale, LossScale, none=True)
    expect_positive(steps=steps, snapshot_every=snapshot_every, log_every=log_every)
    expect_at_least(0, evaluate_every=evaluate_every, keep=keep)
    _check(replicas, optimizer, batches, out, select, clip)
    root = Key(seed)
    if replicas.precision != "float16":
        loss_scale = None
    elif loss_scale is None:
        loss_scale = LossScale()
    state: dict[str, Any] = {
        "step": 0,
        "seed": seed,
        "schedule": repr(schedule),
        "best": None,
        "records": Summary(),
        "numerics": None,
        "precision": replicas.precision,
        "loss_scale": None if loss_scale is None else loss_scale.state(),
        **{f"optimizer_{name}": value for name, value in optimizer.settings().items()},
    }
    identity = identity or {}
    if taken := ", ".join(name for name in identity if name in state):
        raise ValueError(f"identity: expected names that the state of a run does not have, got {taken}")
    state |= identity
    run = RunState(replicas, optimizer, batches, Path(out), state, select, loss_scale, shard)

    with ExitStack() as opened:
        run.begin(opened, steps, resume, ("seed", "precision", *identity), tensorboard, on_start)
        received = opened.enter_context(_interrupts())
        bar = opened.enter_context(
            progress_bar(total=steps, initial=run.step, unit="step", delay=0, leave=True, disable=not run.ranks.first)
        )
        loop = Loop(
            run=run,
            batches=batches,
            schedule=schedule,
            steps=steps,
            evaluate=evaluate,
            evaluate_every=evaluate_every if evaluate is not None else 0,
            snapshot_every=snapshot_every,
            keep=keep,
            log_every=log_every,
            clip=clip,
            root=root,
            received=received,
            bar=bar,
        )
        while run.step < steps:
            loop.step()
    if loss_scale is not None and loss_scale.skipped and run.ranks.first:
        print(f"batches skipped because their gradients overflowed: {loss_scale.skipped}", file=sys.stderr)
    return run.values


def _check(replicas: Replicas, optimizer: Optimizer, batches: Any, out: Any, select: Any, clip: Any) -> None:
    """Raise TypeError or ValueError if one of these arguments of `train` is wrong."""
    if not isinstance(out, str | Path):
        raise TypeError(f"out: expected a path, got {shown(out)}")
    if not hasattr(batches, "batch"):
        raise TypeError(f"batches: expected an object with batch(step), got {shown(batches)}")
    if not isinstance(select, tuple | list) or len(select) != 2 or not isinstance(select[0], str):
        raise TypeError(f"select: expected the name of a metric and 'min' or 'max', got {shown(select)}")
    if select[1] not in ("min", "max"):
        raise ValueError(f"select: expected 'min' or 'max', got {select[1]!r}")
    own = {id(p) for p in replicas.model.parameters()}
    if not all(id(p) in own for p in optimizer.stepped):
        raise ValueError("optimizer: expected one for the model of the replicas, got one for another model")
    if clip is not None:
        expect_number("clip", clip, zero=False, infinite=True)


@dataclass
class Loop:
    """The steps of a run, with the arguments of `train` of the same names."""

    run: RunState
    batches: Any
    schedule: Callable[[int], float]
    steps: int
    evaluate: Callable[[], dict[str, float]] | None
    evaluate_every: int
    snapshot_every: int
    keep: int
    log_every: int
    clip: float | None
    root: Key  # of the run
    received: list[int]  # the signals that have come so far
    bar: Any  # of the progress
    unread: list[Measured] = field(default_factory=list)  # of steps whose loss and norm are still on a GPU

    def __post_init__(self) -> None:
        self.replicas, self.optimizer, self.ranks = self.run.replicas, self.run.optimizer, self.run.ranks
        self.loss_scale, self.remember = self.run.loss_scale, getattr(self.batches, "remember", None)
        self.restart_clock()

    def step(self) -> None:
        """Learn from the next batch, and then log, score, save and stop, as far as these are due."""
        measured = self.learn()
        if measured is None:
            return
        done = self.run.step
        if self.due(self.log_every, done):
            self.log(measured)
        if self.evaluate is not None and self.due(self.evaluate_every, done):
            self.replicas.rounded = False  # evaluation may change the weights
            self.run.evaluate(self.evaluate, self.note)
            self.restart_clock()
        interrupted = self.signals()
        if interrupted and self.unread and (bad := read(self.unread)[0]) is not None:
            raise self.late_divergence(bad, done)
        if self.due(self.snapshot_every, done) or interrupted:
            self.snapshot()
        if interrupted:  # also after the last step: what would follow, a score or another stage, may take long
            raise self.ended(interrupted[0])

    def learn(self) -> Measured | None:
        """Compute the gradients of the next batch, and step the optimizer. None if the batch is skipped."""
        step = self.run.step
        number = step + (0 if self.loss_scale is None else self.loss_scale.skipped)  # of the batch
        key, batch = self.root.fold("train", number), self.batches.batch(number)
        self.unread.append(Measured(step + 1, *self.gradients(batch, number, key)))
        self.tokens += batch.tokens
        bad, last = None, self.unread[-1]
        if self.replicas.device is CPU or self.loss_scale is not None or self.reads(step + 1):
            bad, last = read(self.unread)
        if self.loss_scale is not None and math.isfinite(last.loss) and self.skip(self.loss_scale, last):
            return None
        if bad is not None:
            raise self.divergence(bad, batch, key) if bad.step > step else self.late_divergence(bad, step + 1)
        self.update()
        return last

    def due(self, interval: int, done: int) -> bool:
        """Whether something is due after `done` steps. It is each time after `interval` steps, and after the last step;
        0: only after the last one.
        """
        return done == self.steps or (interval > 0 and done % interval == 0)

    def reads(self, done: int) -> bool:
        """Whether a record, a score or a snapshot is due, so that the loss and the norm are needed."""
        return any(self.due(interval, done) for interval in (self.log_every, self.evaluate_every, self.snapshot_every))

    def gradients(self, batch: Any, number: int, key: Key) -> tuple[Any, Any]:
        """Compute the gradients of a batch, and by what `update` multiplies them. Returns the loss and their norm."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        loss = self.replicas.gradients(batch, key, self.remember and partial(self.remember, number), scale)
        grads = self.optimizer.gradients()
        how = (self.replicas.map, self.ranks.gather) if self.replicas.sharded else (self.replicas.map,)
        norm = global_norm(grads, *how)
        self.share = 1.0 if self.clip is None else share_for(norm, self.clip)
        return loss, norm

    def skip(self, loss_scale: LossScale, last: Measured) -> bool:
        """Adjust the loss scale. Returns whether the batch is skipped, because its gradient overflowed float16; then
        saves and stops if a signal has come.
        """
        scale = loss_scale.scale
        if not loss_scale.skips(last.norm):
            return False
        if loss_scale.skipped <= NOTED:
            reason = f"a gradient overflowed float16 at loss scale {scale:g}; the scale is halved"
            self.note(f"step {last.step}: {reason}, and the step repeated with the next batch")
        if interrupted := self.signals():
            self.run.save()
            raise self.ended(interrupted[0])
        return True

    def update(self) -> None:
        """Step the optimizer with the learning rate of this step, and count the step as done."""
        step = self.run.step
        self.optimizer.lr = self.schedule(step)
        expect_number(f"schedule({step})", self.optimizer.lr)
        self.replicas.step(self.optimizer, self.share)
        self.run.values["step"] = step + 1
        self.bar.update()

    def log(self, measured: Measured) -> None:
        """Write a record, and show its numbers beside the progress bar."""
        speed = self.tokens / (time.perf_counter() - self.started)
        scaling = {} if self.loss_scale is None else self.loss_scale.measured()
        if self.ranks.first:
            values = {"loss": measured.loss, "lr": self.optimizer.lr, "gradient_norm": measured.norm, **scaling}
            self.run.metrics.write(measured.step, **values, tokens_per_second=round(speed))
        line = f"loss {measured.loss:.3f}, lr {self.optimizer.lr:.1e}, {speed:,.0f} tokens/s"
        self.bar.set_postfix_str(", ".join([line, *(f"{n} {v:g}" for n, v in scaling.items())]), refresh=False)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start counting tokens and seconds for the speed again."""
        self.tokens, self.started = 0, time.perf_counter()

    def snapshot(self) -> None:
        """Save a snapshot, and the model alone if `keep` asks for it."""
        self.replicas.join_whole()
        self.ranks.expect_same_bits("parameters", self.run.model.flat.data)
        if self.keep and self.run.step % self.snapshot_every == 0:
            self.run.keep(self.keep)
        self.run.save()  # after the others, so that a resumed run has them all

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.ranks.first:
            self.bar.write(text, file=sys.stderr)

    def signals(self) -> list[int]:
        """The signals that any rank has received, so that all stop after the same step."""
        found = list(chain(*self.ranks.gather(self.received)))
        self.ranks.ending = bool(found)
        return found

    def ended(self, signal_number: int) -> BaseException:
        """The error that ends a run after a signal."""
        told = f"step {self.run.step} is saved in {self.run.last}"
        return Stopped(signal_number, told) if self.ranks.first else Elsewhere(128 + signal_number)

    def divergence(self, bad: Measured, batch: Any, key: Key) -> Diverged | Elsewhere:
        """The error for this step; it names the first tensor that is not finite."""
        if self.replicas.sharded:
            self.ranks.join(self.run.model.flat.grad, self.replicas.slices)
        where = first_nonfinite(self.replicas, batch, key)
        what = f"loss {bad.loss}, gradient norm {bad.norm}; the first that is not finite is {where}"
        return self.run.diverged(what, bad.step)

    def late_divergence(self, bad: Measured, step: int) -> Diverged | Elsewhere:
        """The error for an earlier step. Its first tensor that is not finite can no longer be found, since the weights
        have changed. step: the one in which it was noticed.
        """
        why = f"on a GPU they are read only when they are logged, scored or saved; this was noticed in step {step}"
        return self.run.diverged(f"loss {bad.loss}, gradient norm {bad.norm} ({why})", bad.step)


class Measured(NamedTuple):
    """The loss and the gradient norm of a step: numbers, or arrays () on a GPU."""

    step: int
    loss: Any
    norm: Any


def read(unread: list[Measured]) -> tuple[Measured | None, Measured]:
    """The first that is not finite, if any, and the last, as numbers; one transfer from a GPU. Empties the list."""
    values = [x for m in unread for x in (m.loss, m.norm)]
    xp = array_module(*values)
    if xp is not np:
        values = to_cpu(xp.stack([x.astype(np.float64) for x in values])).tolist()
    found = [Measured(m.step, *values[2 * i : 2 * i + 2]) for i, m in enumerate(unread)]
    unread.clear()
    return next((m for m in found if not (math.isfinite(m.loss) and math.isfinite(m.norm))), None), found[-1]


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list of the signals received so far: Ctrl-C (SIGINT), SIGTERM, SIGHUP and SIGUSR1.

    The loop looks at it between steps. Only a second Ctrl-C raises an error, as soon as that is safe: see `stop`. A
    signal that comes too late for the last step is handled by what follows.
    """
    received = requests_taken()

    def receive(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in received:
            stop(number, frame, at_once=True)
        else:
            received.append(number)

    with signals_caught(receive):
        try:
            yield received
        finally:
            requests_taken()
    for number in received[:1]:
        signal.raise_signal(number)

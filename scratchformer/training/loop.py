"""The training loop."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, array_module, to_cpu
from ..ops.checks import expect_at_least, expect_instance, expect_number, expect_positive, shown
from ..optim import clip_by_global_norm
from ..optim.clip import global_norm
from ..optim.optimizer import Optimizer
from ..process import Stopped, signals_caught
from ..progress import progress_bar
from ..rng import Key
from .diagnose import first_nonfinite
from .metrics import Summary
from .precision import LossScale
from .ranks import Elsewhere
from .replicas import Replicas
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
    if not isinstance(out, str | Path):
        raise TypeError(f"out: expected a path, got {shown(out)}")
    model, ranks, out = replicas.model, replicas.ranks, Path(out)
    remember = getattr(batches, "remember", None)
    expect_instance("schedule", schedule, Callable)
    if not hasattr(batches, "batch"):
        raise TypeError(f"batches: expected an object with batch(step), got {shown(batches)}")
    if not isinstance(select, tuple | list) or len(select) != 2 or not isinstance(select[0], str):
        raise TypeError(f"select: expected the name of a metric and 'min' or 'max', got {shown(select)}")
    metric, direction = select
    if direction not in ("min", "max"):
        raise ValueError(f"select: expected 'min' or 'max', got {direction!r}")
    expect_positive(steps=steps, snapshot_every=snapshot_every, log_every=log_every)
    expect_at_least(0, evaluate_every=evaluate_every, keep=keep)
    root = Key(seed)
    own = {id(p) for p in model.parameters()}
    if not all(id(p) in own for p in optimizer.stepped):
        raise ValueError("optimizer: expected one for the model of the replicas, got one for another model")
    if clip is not None:
        expect_number("clip", clip, zero=False, infinite=True)
    expect_instance("loss_scale", loss_scale, LossScale, none=True)
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
        "precision": replicas.precision,
        "loss_scale": None if loss_scale is None else loss_scale.state(),
        **{f"optimizer_{name}": value for name, value in optimizer.settings().items()},
    }
    identity = identity or {}
    if taken := ", ".join(name for name in identity if name in state):
        raise ValueError(f"identity: expected names that the state of a run does not have, got {taken}")
    state |= identity
    run = RunState(replicas, optimizer, batches, out, state, (metric, direction), loss_scale, shard)

    def note(text: str) -> None:
        if ranks.first:
            bar.write(text, file=sys.stderr)

    def stopped() -> list[int]:
        """The signals that any rank has received, so that all stop after the same step."""
        found = list(chain(*ranks.gather(received)))
        ranks.ending = bool(found)
        return found

    def end(number: int) -> BaseException:
        told = f"step {run.step} is saved in {run.last}"
        return Stopped(number, told) if ranks.first else Elsewhere(128 + number)

    def due(done: int) -> bool:
        """Whether a step is followed by a record, a score or a snapshot, so that its loss and norm are needed."""
        counts = (log_every, snapshot_every, evaluate_every if evaluate is not None else 0)
        return done == steps or any(count and done % count == 0 for count in counts)

    def noticed(bad: Measured, step: int) -> Diverged | Elsewhere:
        late = f"on a GPU they are read only when they are logged, scored or saved; this was noticed in step {step}"
        return run.diverged(f"loss {bad.loss}, gradient norm {bad.norm} ({late})", bad.step)

    unread: list[Measured] = []  # of steps whose loss and norm are still on a GPU

    with ExitStack() as opened:
        run.begin(opened, steps, resume, ("seed", "precision", *identity), tensorboard, on_start)
        received = opened.enter_context(_interrupts())
        bar = opened.enter_context(
            progress_bar(total=steps, initial=run.step, unit="step", delay=0, leave=True, disable=not ranks.first)
        )
        tokens, started = 0, time.perf_counter()
        while run.step < steps:
            step = run.step
            number = step if loss_scale is None else step + loss_scale.skipped  # of the batch: skipped ones count too
            key = root.fold("train", number)
            batch = batches.batch(number)
            scale = 1.0 if loss_scale is None else loss_scale.scale
            loss = replicas.gradients(batch, key, remember and partial(remember, number), scale)
            grads = optimizer.gradients()
            how = (replicas.map, ranks.gather) if replicas.sharded else (replicas.map,)
            norm = global_norm(grads, *how) if clip is None else clip_by_global_norm(grads, clip, *how)
            unread.append(Measured(step + 1, loss, norm))
            bad: Measured | None = None
            if replicas.device is CPU or loss_scale is not None or due(step + 1):
                bad, (_, loss, norm) = read(unread)
            tokens += batch.tokens
            if loss_scale is not None and math.isfinite(loss) and loss_scale.skips(norm):
                if loss_scale.skipped <= NOTED:
                    reason = f"a gradient overflowed float16 at loss scale {scale:g}; the scale is halved"
                    note(f"step {step + 1}: {reason}, and the step repeated with the next batch")
                if interrupted := stopped():
                    run.save()
                    raise end(interrupted[0])
                continue
            if bad is not None:
                if replicas.sharded:
                    ranks.join(model.flat.grad, replicas.slices)
                if bad.step < step + 1:  # the weights have changed since
                    raise noticed(bad, step + 1)
                where = first_nonfinite(replicas, batch, key)
                what = f"loss {bad.loss}, gradient norm {bad.norm}; the first that is not finite is {where}"
                raise run.diverged(what, bad.step)
            optimizer.lr = schedule(step)
            expect_number(f"schedule({step})", optimizer.lr)
            optimizer.step(replicas.map)
            replicas.join()

            done = run.values["step"] = step + 1
            bar.update()
            if done % log_every == 0 or done == steps:
                seconds = time.perf_counter() - started
                speed = tokens / seconds
                scaling = {} if loss_scale is None else loss_scale.measured()
                measured = {"loss": loss, "lr": optimizer.lr, "gradient_norm": norm, **scaling}
                if ranks.first:
                    run.metrics.write(done, **measured, tokens_per_second=round(speed))
                line = f"loss {loss:.3f}, lr {optimizer.lr:.1e}, {speed:,.0f} tokens/s"
                bar.set_postfix_str(", ".join([line, *(f"{n} {v:g}" for n, v in scaling.items())]), refresh=False)
                tokens, started = 0, time.perf_counter()
            if evaluate is not None and (done == steps or (evaluate_every and done % evaluate_every == 0)):
                run.evaluate(evaluate, note)
                tokens, started = 0, time.perf_counter()
            interrupted = stopped()
            if interrupted and unread and (bad := read(unread)[0]) is not None:
                raise noticed(bad, done)
            if done % snapshot_every == 0 or done == steps or interrupted:
                replicas.join_whole()
                ranks.expect_same_bits("parameters", model.flat.data)
                if keep and done % snapshot_every == 0:
                    run.keep(keep)
                run.save()  # after the others, so that a resumed run has them all
            if interrupted:  # also after the last step: what would follow, a score or another stage, may take long
                raise end(interrupted[0])
    if loss_scale is not None and loss_scale.skipped and ranks.first:
        print(f"batches skipped because their gradients overflowed: {loss_scale.skipped}", file=sys.stderr)
    return run.values


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

    A second Ctrl-C stops immediately.
    """
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and number in received:
            raise Stopped(number)
        received.append(number)

    with signals_caught(receive):
        yield received

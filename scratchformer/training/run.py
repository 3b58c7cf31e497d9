"""A training run: its settings and folder, resuming, signals, the log, snapshots, and the best model."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..backend import CPU, Device, array_module, to_cpu
from ..checks import expect_at_least, expect_instance, expect_positive
from ..data import VALIDATION_BYTES
from ..dispatch import fast
from ..nn import recompute_blocks
from ..optim.optimizer import Optimizer
from ..parallel.diagnose import Diverged, nonfinite_tensor
from ..parallel.libraries import libraries
from ..parallel.memory import resident_bytes
from ..parallel.ranks import Elsewhere, Ranks
from ..parallel.replicas import Replicas
from ..portable import CUT, DEFINITION, PortableKey, make_portable
from ..rng import Key
from ..shell.files import expect_no_link, locked, make_folder, remove_unfinished, replacing
from ..shell.process import Stopped, signals_caught, stop
from ..shell.progress import progress_bar
from ..shell.text import one_line, shown
from .estimate import estimate, gpu_need
from .folder import UNSAVED, expect_same, holds_run, load_run
from .metrics import Metrics
from .readers import MEAN, load_vocabulary, vocabulary_file
from .settings import BITS, defaults, save_settings
from .snapshot import (
    BEST,
    LAST,
    NotFinite,
    average_snapshots,
    best_snapshot,
    describe,
    kept_snapshots,
    load_snapshot,
    restore,
    save_snapshot,
)

SHADOWED = ("steps", "replicas", "stage")  # settings that are read as `settings[name]`, since a method has the name


class Estimated(SystemExit):
    """The program ends, because it was only asked for an estimate, which is printed."""


class Run:
    """A training run of a model, in a folder.

    As a program, `start(main)` makes one from the command line. In a loop of one's own:

        run = Run("runs/mine", steps=1000)
        with run.replicas(model, batches) as replicas:
            adam = Adam(model.parameters(), 1e-3)
            for step in run.steps(replicas, adam, batches):
                loss = replicas.gradients(batches.batch(step), run.key("train", step))
                norm = replicas.clip(adam, 1.0)
                replicas.step(adam)
                run.log(loss=loss, norm=norm)

    out: the folder. steps: how many there are, the attribute `total`. seed: of all random numbers (`key`). resume:
    continue the run in the folder. On a CPU it then ends with exactly the parameters that it would have had without the
    interruption. identity: JSON values by name, such as fingerprints of the data; a snapshot made with others is
    refused. settings: further ones, which become attributes. These have a meaning here: replicas, micro_batch,
    micro_batches, precision, bits, recompute, shard, tensorboard. With the bits "portable" the parameters are the same
    on every processor, see `portable`; their SHA-256 is printed after the last step.

    In the folder: metrics.jsonl; last.safetensors, written every 100 steps and at the end; best.safetensors;
    step-N.safetensors, the model alone, if `steps` is told to keep some. Until last.safetensors is first saved, the
    file no-snapshot-yet says so. The folder is locked while there are steps to do.
    """

    name = ""  # of the program
    stage_name = ""  # the subfolder of one stage of several
    resumed = False
    estimating = False  # whether only the memory is to be estimated
    scoring = False  # whether a finished run is scored
    given: frozenset[str] = frozenset()  # the names of the settings that were given on the command line
    preset_steps = 0  # the preset's number of steps; 0 if the run is only scored
    state: Mapping[str, Any] = {}  # of the snapshot from which the run is resumed
    first_vocabulary: Any = None  # that of rank 0, in the other ranks
    before = 0  # the memory of the process before the model is made, in bytes; known if it is to be estimated
    vocabulary_to_save: Any = None
    best: dict[str, Any] | None = None  # the scores of the best model, and its "step"
    parent: Run | None = None  # of a stage

    def __init__(
        self,
        out: Path | str,
        steps: int,
        seed: int = 0,
        resume: bool = False,
        device: Device = CPU,
        ranks: Ranks | None = None,
        identity: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(out, str | Path):
            raise TypeError(f"out: expected a path, got {shown(out)}")
        expect_positive(steps=steps)
        if taken := [name for name in settings if hasattr(type(self), name) and name not in SHADOWED]:
            raise ValueError(f"settings: expected other names than {', '.join(taken)}, which every run has already")
        self.settings: dict[str, Any] = {"preset": "", **defaults(), "steps": steps, "seed": seed, **settings}
        self.out, self.resumed, self.device, self.ranks = Path(out), resume, device, ranks or Ranks()
        self.identity = dict(identity or {})
        if (bits := self.settings["bits"]) not in BITS:
            raise ValueError(f"bits: expected {' or '.join(BITS)}, got {shown(bits)}")
        self.portable = bits == "portable"
        self.root = (PortableKey if self.portable else Key)(seed)
        if self.portable and (device is not CPU or self.precision != "float32"):
            where = f"--precision {self.precision} on {device}"
            raise ValueError(f"bits: portable bits are those of float32 on a CPU (--device cpu), got {where}")
        self._opened = ExitStack()  # what is open while there are steps to do: the lock, the log, handlers of signals
        self._unread: list[tuple[int, dict[str, Any]]] = []  # steps whose loss and norm are still on a GPU
        self._saved: int | None = None  # the step of the last snapshot
        self._values: dict[str, Any] = {"step": 0}  # what a snapshot says of the run

    def __getattr__(self, name: str) -> Any:
        settings = vars(self).get("settings", {})
        if name not in settings:
            raise AttributeError(f"the run has no setting {name}, only {', '.join(settings)}")
        return settings[name]

    # What a program asks for

    @property
    def total(self) -> int:
        """The number of steps, the setting `steps`."""
        return self.settings["steps"]

    @total.setter
    def total(self, steps: int) -> None:
        self.settings["steps"] = steps

    @property
    def step(self) -> int:
        """The step in progress, counted from 1; afterwards, how many steps are done."""
        return self._values["step"]

    def key(self, *parts: int | str) -> Key:
        """The key of this name: of "weights", "batches", or "train" and a step."""
        return self.root.fold(*parts) if parts else self.root

    def sizes(self, *names: str) -> dict[str, Any]:
        """These settings, as arguments of a model. Those that are None are left out, so the model's defaults apply."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def load(self, data: Callable[[Run], Any]) -> Any:
        """What `data(run)` returns: rank 0 calls it first, then the others.

        Its `fingerprint`, and that of its `vocabulary` if it has one, identify the data in snapshots.
        """
        loaded: list[Any] = []

        def load() -> Any:
            loaded.append(data(self))
            return getattr(loaded[0], "vocabulary", None)

        vocabulary = self.ranks.from_first(load)
        if not self.ranks.first:
            self.first_vocabulary = vocabulary
            load()
        if not isinstance(getattr(loaded[0], "fingerprint", None), str):
            raise TypeError(f"data: expected an object with a fingerprint, a text, got {shown(loaded[0])}")
        if vocabulary is not None:  # first, since the fingerprint of encoded texts depends on it
            kind = vocabulary_file(self.out, type(vocabulary)).suffix
            self.identity["vocabulary" if kind == ".txt" else "subwords"] = vocabulary.fingerprint
            self.vocabulary_to_save = vocabulary
        self.identity["data"] = loaded[0].fingerprint
        if self.estimating:
            with fast():  # it loads libraries
                self.before = resident_bytes()
        return loaded[0]

    def saved_vocabulary(self, kind: type) -> Any:
        """The saved vocabulary, of class `kind`, when a run is resumed or scored; None for a new run. For `data`.

        Of several ranks, all but rank 0 get its vocabulary: another one might be learned from the same data.
        kind: `Vocabulary`, `Subwords`, or a class with the same `load`, `save` and `fingerprint`.
        """
        if self.first_vocabulary is not None:
            return self.first_vocabulary
        return load_vocabulary(self.out, self.state, kind) if self.resumed else None

    def stage(self, name: str, *key: int | str, **settings: Any) -> Run:
        """The run of one stage of several, in the subfolder `name`. key: what its keys are folded with. settings:
        instead of those of this run. While a stage is trained, the whole folder is locked.
        """
        stage = object.__new__(type(self))
        vars(stage).update(vars(self))
        stage.out, stage.stage_name, stage.parent = self.out / name, name, self
        stage.settings, stage.identity, stage.root = {**self.settings, **settings}, dict(self.identity), self.key(*key)
        stage._opened, stage._unread, stage._saved = ExitStack(), [], None
        if not self.scoring:
            self.ranks.from_first(lambda: expect_no_link(stage.out) and None)
        return stage

    def expect_final(self, stage: str, later: Sequence[str]) -> None:
        """Raise ValueError if a stage would go on although one of the `later` stages has started from its model."""
        started = [str(self.out / name) for name in later if (self.out / name / LAST).exists()]
        done = load_snapshot(self.out / stage / LAST).state["step"] if started else self.total
        if done < self.total:
            raise ValueError(
                f"--steps: {stage} would go on to step {self.total}, but the models in {' and '.join(started)} have "
                f"started from its step {done}: remove them, add --steps {done}, or begin a new run"
            )

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot to go on from."""
        return (self.out / LAST).exists()

    def scored(self, part: str, items: Any, trained: int | None = None, min: int | None = None) -> Any:
        """The tokens (n,), or texts, of a part on which the run is scored.

        These are all, except of the test part for a run with fewer steps than its preset. Then there are as many as the
        run is trained on, `trained`, but at least `min`. The validation part is always scored as a whole, since a run
        that is resumed with more steps compares its scores with earlier ones; but of a text, only the first 100,000
        tokens. `scratchformer evaluate` scores all of the test part.
        items: an array of tokens, or texts, of which `evenly(count)` are taken. trained: by default steps × batch_size,
        for tokens × context. min: by default 20,000 tokens, or 1,000 texts.
        """
        texts = hasattr(items, "evenly")
        size = len(items.labels) if texts else len(items)
        if part == "validation" and not texts:
            return items[:VALIDATION_BYTES]
        steps = (self.parent or self).total  # a stage may have fewer steps than a whole run's preset
        if part != "test" or steps >= self.preset_steps:
            return items
        if trained is None:
            trained = self.total * self.batch_size * (1 if texts else self.context)
        count = sorted((size, max(trained, (1_000 if texts else 20_000) if min is None else min)))[0]
        return items.evenly(count) if texts else items[:count]

    def share(self, count: int, size: int, what: str) -> str:
        """How much was scored, for a line of results: "25,000 reviews", or "1,000 of 25,000 reviews" and the reason."""
        if count == size:
            return f"{size:,} {what}"
        return f"{count:,} of {size:,} {what} (the run has only {self.total:,} steps)"

    # The loop

    @contextmanager
    def replicas(self, model: Any, batches: Any, largest: Any = None) -> Iterator[Replicas]:
        """`Replicas` of the model with the run's settings: the model is moved to the run's device, and its blocks are
        recomputed if the run says so. With --estimate the estimate for the batch `largest`, by default the first one,
        is printed, and the program ends. If a GPU has too little memory, the error says how much a step needs.
        """
        model.to(self.device)
        if self.portable:
            make_portable(model)
        if self.recompute:
            recompute_blocks(model)
        without = resident_bytes()
        first = batches.batch(0)
        before = self.before + max(0, resident_bytes() - without)  # what the batches hold
        with Replicas(model, **self.how_many()) as replicas:
            print(f"{model.flat.data.size:,} parameters\n{replicas.describe(first)}", flush=True)
            if self.estimating:
                print(estimate(replicas, first if largest is None else largest, before, self.shard))
                raise Estimated
            self.ranks.from_first(lambda: replicas.expect_work(first))
            self.ranks.expect_same(self.identity)
            try:
                yield replicas
                return
            except MemoryError as error:
                if self.device.index is None:
                    raise
                failed = str(error)
                traceback.clear_frames(error.__traceback__)  # frees the arrays of the failed step
            # Outside of `except`, so that the error holds no arrays; the optimizer's are still there.
            raise MemoryError(f"{failed} {gpu_need(replicas, first if largest is None else largest)}")

    def how_many(self) -> dict[str, Any]:
        """The arguments of `Replicas`."""
        count = self.settings["replicas"]
        if self.device.index is not None:
            count = 1
        elif count is None or (self.ranks.size > 1 and "replicas" not in self.given):
            count = self.ranks.cores()
        names = ("micro_batch", "micro_batches", "precision", "ranks")
        cut = CUT if self.portable else {}
        return {"count": count, **{name: getattr(self, name) for name in names}, **cut}

    def steps(
        self,
        replicas: Replicas,
        optimizer: Optimizer,
        batches: Any,
        select: tuple[str, str] = ("loss", "min"),
        keep: int = 0,
        snapshot_every: int = 100,
        log_every: int = 10,
    ) -> Iterator[int]:
        """The numbers of the steps that are still to do, from 0.

        Before the first one the folder is locked and read, and a run that is resumed is loaded. If it is refused,
        because its snapshot is missing, damaged or from another run, the folder is not changed. If `batches` has
        `state_dict` and `load_state_dict`, its state is saved and restored with the run.
        select: the score that decides which model is best, and whether it is the one with the "min" or the "max".
        keep: how many of the last snapshots are kept for their mean, which `load_best` then loads.

        Raises SnapshotError if a snapshot cannot be saved or is from another run, or if the model's `config` is not
        JSON; ValueError if the folder holds a run and is not to be resumed, or if the run has done more steps; InUse if
        another process trains in the folder. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 saves a snapshot after the step in
        progress and raises KeyboardInterrupt.
        """
        expect_instance("replicas", replicas, Replicas)
        expect_positive(snapshot_every=snapshot_every, log_every=log_every)
        expect_at_least(0, keep=keep)
        expect_parts(replicas, optimizer, batches, select)
        self._replicas, self._optimizer, self._model = replicas, optimizer, replicas.model
        self._batches = batches if hasattr(batches, "state_dict") else None
        self._metric, self._sign = select[0], 1 if select[1] == "max" else -1
        self._kept, self._log_every = keep, log_every
        try:
            self.begin()
            always, every = replicas.fixed_order or replicas.loss_scale is not None, (log_every, snapshot_every)
            while self.step < self.total:
                self._values["step"] += 1
                replicas.reading = always or any(self.step % n == 0 for n in every) or self.step == self.total
                yield self.step - 1
                self._bar.update()
                done = self.step
                asked = self._received
                if self.ranks.size > 1:  # all of them stop after the same step
                    asked = list(chain(*self.ranks.gather(self._received)))
                    self.ranks.ending = bool(asked)
                if asked or done % snapshot_every == 0 or done == self.total:
                    self.read()
                    self.snapshot(alone=keep > 0 and done % snapshot_every == 0)
                if asked:  # also after the last step: what would follow, a score or another stage, may take long
                    number, told = asked[0], f"step {done} is saved in {self.out / LAST}"
                    self._received.clear()
                    raise Stopped(number, told) if self.ranks.first else Elsewhere(128 + number)
            if (scale := replicas.loss_scale) is not None and scale.skipped and self.ranks.first:
                print(f"batches skipped because their gradients overflowed: {scale.skipped}", file=sys.stderr)
            if self.portable and self.ranks.first:
                digest = hashlib.sha256(to_cpu(replicas.flat.data).astype("<f4").tobytes()).hexdigest()
                print(f"SHA-256 of the parameters after step {self.step}: {digest}", flush=True)
        finally:
            self._opened.__exit__(*sys.exc_info())

    def due(self, every: int) -> bool:
        """Whether this step is the last one, or a multiple of `every` (0: only the last one). If so, all ranks have the
        whole model, to score it. Raises Diverged if a parameter is not finite.
        """
        if every < 0:
            expect_at_least(0, every=every)
        due = self.step == self.total or (every > 0 and self.step % every == 0)
        if due:
            self.read()
            self._replicas.join_whole()
            self.expect_finite()
        return due

    def log(self, **numbers: Any) -> None:
        """Write a record of this step every 10 steps and after the last one, with the learning rate and the speed, and
        show it beside the progress bar. The numbers of all steps must be finite. On a GPU they are read only when one
        of them is needed.
        """
        step, replicas = self.step, self._replicas
        self._unread.append((step, numbers))
        due = step == self.total or step % self._log_every == 0
        if due or replicas.fixed_order:
            numbers = self.read()
        if not due:
            return
        speed, rate = replicas.tokens / (time.perf_counter() - self._started), self._optimizer.lr
        scaling = {} if replicas.loss_scale is None else replicas.loss_scale.measured()
        if self.ranks.first:
            self._metrics.write(step, **numbers, lr=rate, **scaling, tokens_per_second=round(speed))
        first = [f"{name} {value:.3f}" for name, value in list(numbers.items())[:1]]
        line = [*first, f"lr {rate:.1e}", f"{speed:,.0f} tokens/s", *(f"{n} {v:g}" for n, v in scaling.items())]
        self._bar.set_postfix_str(", ".join(line), refresh=False)
        self.restart_clock()

    def keep_best(self, scores: Mapping[str, float]) -> None:
        """Log and note the scores of the model, and save it if it is the best so far."""
        if self._metric not in scores:
            raise ValueError(f"select: expected one of {', '.join(scores)}, which are scored, got {self._metric!r}")
        self._replicas.rounded = False  # scoring may have changed the weights
        scores, step = {name: float(value) for name, value in scores.items()}, self.step
        if self.ranks.first:
            self._metrics.write(step, **{f"validation_{name}": value for name, value in scores.items()})
        self.note(f"validation {as_text(scores)}")
        score = scores[self._metric]
        if math.isfinite(score) and (self.best is None or self._sign * score > self._sign * self.best[self._metric]):
            self.best = self._values["best"] = {"step": step, **scores}
            self.save(self.out / BEST, whole=False)
        self.restart_clock()

    def load_best(self) -> dict[str, Any] | None:
        """Load the weights to be scored into the model of `steps`, in all ranks: the mean of the snapshots that were
        kept, which is saved, or the best one if none were. Returns the scores of the best model.
        """

        def load() -> None:
            if snapshots := kept_snapshots(self.out):
                average_snapshots(snapshots, self._model)
                print(f"scoring the mean of the last {len(snapshots)} snapshots")
            else:
                self.load_weights(self._model, best_snapshot(self.out))
            if snapshots or self._kept:
                save_snapshot(self.out / MEAN, self._model, **self.identity)

        self.ranks.from_first(load)
        self.ranks.send_first(self._model.flat.data)
        return self.best

    def load_weights(self, model: Any, path: Path) -> None:
        """Load the weights of a snapshot into the model. Raises SnapshotError if it was made with other data."""
        snapshot = load_snapshot(path)
        expect_same(snapshot, json.loads(json.dumps(self.identity)))
        restore(snapshot, model)

    # Steps of the loop, snapshots and scores, behind the methods above

    def begin(self) -> None:
        """Let rank 0 lock, read and write the folder, and send the others everything that it read."""
        self._replicas.at_end.push(self.end)  # when the block of the replicas ends, whatever happens until then
        state: dict[str, Any] = {
            "step": 0,
            "seed": self.seed,
            "best": None,
            "libraries": None,
            "precision": self._replicas.precision,
            "loss_scale": None if self._replicas.loss_scale is None else self._replicas.loss_scale.state(),
            **{f"optimizer_{name}": value for name, value in self._optimizer.settings().items()},
        }
        if taken := ", ".join(name for name in self.identity if name in state):
            raise ValueError(f"identity: expected names that the state of a run does not have, got {taken}")
        self._values = json.loads(describe(self._model, state | self.identity)["state"])
        ranks = self.ranks

        def start() -> dict[str, Any]:
            if self.parent is not None:
                self._opened.enter_context(locked(self.parent.out))
            self._opened.enter_context(locked(self.out))
            self.load_last()
            return self._values

        def write() -> None:
            self._metrics = self._opened.enter_context(closing(self.open()))

        self._values.update(ranks.from_first(start))
        if self._replicas.device is CPU:
            self.compare_libraries()
        ranks.from_first(write)
        self.best = self._values["best"]
        if ranks.size > 1:
            self.send()
        self._received = self._opened.enter_context(interrupts())
        options: dict[str, Any] = dict(initial=self.step, delay=0, leave=True, disable=not ranks.first)
        self._bar = self._opened.enter_context(progress_bar(total=self.total, unit="step", **options))
        self._replicas.note = self.note
        self.restart_clock()

    def load_last(self) -> None:
        """Check everything that can make a run be refused, and load the last snapshot of one that is resumed."""
        if self.resumed:
            fixed = ("seed", "precision", *self.identity)
            self._saved = load_run(
                self.out, self._model, self._optimizer, self._batches, self._values, fixed, self._metric
            )
            if self._replicas.loss_scale is not None and self._saved is not None:
                self._replicas.loss_scale.restore(self._values["loss_scale"])
            if self.step > self.total:
                done = f"which the run in {self.out} has already done, got {self.total}"
                raise ValueError(f"steps: expected at least {self._values['step']}, {done}")
        elif holds_run(self.out):
            raise ValueError(f"{self.out} holds a run: resume it, or choose another folder")
        self.expect_finite()

    def open(self) -> Metrics:
        """Write to the folder for the first time: the log, the settings, and the vocabulary of a new run."""
        remove_unfinished(self.out)
        metrics = Metrics(self.out, self.step, self.tensorboard)
        top = self.parent or self
        if self.vocabulary_to_save is not None and not self.resumed:
            make_folder(top.out)
            self.vocabulary_to_save.save(vocabulary_file(top.out, type(self.vocabulary_to_save)))
        if self.name:
            save_settings(top.out, top.settings)
        (self.out / MEAN).unlink(missing_ok=True)  # it would soon be an old one
        if self._saved is not None:
            (self.out / UNSAVED).unlink(missing_ok=True)  # left by a run that was killed after its first snapshot
        else:
            with replacing(self.out / UNSAVED) as unfinished:
                text = "Training has begun. This file is deleted once the first snapshot is saved.\n"
                unfinished.write_text(text, encoding="utf-8", newline="\n")
        return metrics

    def compare_libraries(self) -> None:
        """Note the libraries that are used from here on, and say so if they are not those of the run so far.

        Raises ValueError in rank 0, and ends the others, if the ranks would not compute the same bits.
        """
        before = self._values["libraries"]
        now = f"portable bits, definition {DEFINITION}" if self.portable else libraries()
        self._values["libraries"] = now
        self.ranks.expect_same({f"library {n}": part for n, part in enumerate(now.split("; "), 1)})
        if before not in (None, now) and self.ranks.first:
            what = f"{self.out}: from here on, bits may differ from those of an uninterrupted run"
            print(one_line(f"{what} (before: {before}; now: {now})"), file=sys.stderr)

    def send(self) -> None:
        """Send what rank 0 read to the other ranks."""
        ranks, optimizer = self.ranks, self._optimizer
        ranks.send_first(self._model.flat.data)
        optimizer.steps = ranks.from_first(lambda: optimizer.steps)
        parts = self.parts()
        if self.shard and not ranks.first:
            self._replicas.shard(optimizer)
        if self.step:  # otherwise all ranks have made the same state
            for name in optimizer.buffers:
                ranks.send_parts(getattr(optimizer, name), parts)
        if self.shard and ranks.first:
            self._replicas.shard(optimizer)
        if self._batches is not None:
            restored = ranks.from_first(self._batches.state_dict)
            if not ranks.first:
                self._batches.load_state_dict(restored)
        if self._replicas.loss_scale is not None and not ranks.first:
            self._replicas.loss_scale.restore(self._values["loss_scale"])

    def parts(self) -> list[slice]:
        """Which part of the optimizer's buffers each rank has."""
        if self.shard:
            return [self._optimizer.state_of(part) for part in self._optimizer.slices(self.ranks.size)]
        return [slice(None)] * self.ranks.size

    def read(self) -> dict[str, Any]:
        """The last logged numbers, read from a GPU in one transfer. Raises Diverged if a step's are not finite."""
        unread, self._unread = self._unread, []
        values = [x for _, numbers in unread for x in numbers.values()]
        if self.device is not CPU and values:
            xp = array_module(*values)
            values = to_cpu(xp.stack([xp.asarray(x, np.float64) for x in values])).tolist()
        numbers: dict[str, Any] = {}
        skips = self._replicas.loss_scale is not None  # a norm that is not finite has been dealt with
        for step, names in unread:
            numbers = {name: values.pop(0) for name in names}
            if not all(map(math.isfinite, numbers.values())) and not skips:
                what = ", ".join(f"{name} {value}" for name, value in numbers.items())
                if step < self.step or not self._replicas.fixed_order:
                    why = "on a GPU they are read only when they are logged, scored or saved"
                    what += f" ({why}; this was noticed in step {self.step})"
                raise Diverged(what, step)
        return numbers

    def restart_clock(self) -> None:
        """Start counting tokens and seconds for the speed again."""
        self._replicas.tokens, self._started = 0, time.perf_counter()

    def note(self, text: str) -> None:
        """Print a line about this step above the progress bar."""
        if self.ranks.first:
            self._bar.write(f"step {self.step}: {text}", file=sys.stderr)

    def end(self, *exception: Any) -> None:
        """Give back the lock, the log and the signals. Instead of an error of divergence, raise one with the step and
        the last good snapshot. Every rank finds the same, and rank 0 reports it.
        """
        self._opened.__exit__(*exception)
        _, error, _ = exception
        if not isinstance(error, Diverged | NotFinite):
            return
        self.ranks.ending = True
        if not self.ranks.first:
            raise Elsewhere(1)
        try:
            self.read()
        except Diverged as earlier:
            error = earlier
        good = f"The last good snapshot is {self.out / LAST}, from step {self._saved}"
        good = "No snapshot was saved yet" if self._saved is None else good
        step = getattr(error, "step", None) or self.step
        raise Diverged(f"step {step}: {error}. {good}") from error

    def expect_finite(self) -> None:
        """Raise Diverged if a parameter is not finite."""
        if bad := nonfinite_tensor({name: p.data for name, p in self._model.named_parameters().items()}):
            raise Diverged(f"{bad} is not finite")

    def snapshot(self, alone: bool) -> None:
        """Save the last snapshot. alone: also the model alone, and delete the oldest of more than `kept` of those."""
        self._replicas.join_whole()
        self.ranks.expect_same_bits("parameters", self._model.flat.data)
        if alone:
            self.save(self.out / f"step-{self._values['step']:08d}.safetensors", whole=False)
            for old in kept_snapshots(self.out)[: -self._kept] if self.ranks.first else []:
                old.unlink()
        self.save(self.out / LAST)  # after the others, so that a resumed run has them all

    def save(self, path: Path, whole: bool = True) -> None:
        """Save a snapshot: the weights, and if it is `whole` everything else that the run needs to go on."""
        self._replicas.join_whole()
        optimizer: Any = self._optimizer
        if self._replicas.sharded and whole:
            state, parts = optimizer.state_dict(), self.parts()
            state |= {name: self.ranks.collect_parts(state[name], parts) for name in optimizer.buffers}
            optimizer = SimpleNamespace(state_dict=lambda: state)

        def write() -> None:
            self._metrics.flush()  # first, so that no power cut leaves a snapshot without the records before it
            if self._replicas.loss_scale is not None:
                self._values["loss_scale"] = self._replicas.loss_scale.state()
            save_snapshot(path, self._model, *((optimizer, self._batches) if whole else ()), **self._values)
            if path.name == LAST:
                self._saved = self.step
                (self.out / UNSAVED).unlink(missing_ok=True)

        self.ranks.from_first(write)


def as_text(scores: Mapping[str, float] | None) -> str:
    """Scores as a line of results has them: "step 200, loss 0.1234", or "none"."""
    values = (scores or {}).items()
    texts = [f"{name} {value}" if type(value) is int else f"{name} {value:.4f}" for name, value in values]
    return ", ".join(texts) or "none"


def expect_parts(replicas: Replicas, optimizer: Any, batches: Any, select: Any) -> None:
    """Raise TypeError or ValueError if one of these arguments of `Run.steps` is wrong."""
    if not hasattr(batches, "batch"):
        raise TypeError(f"batches: expected an object with batch(step), got {shown(batches)}")
    if not isinstance(select, tuple | list) or len(select) != 2 or not isinstance(select[0], str):
        raise TypeError(f"select: expected the name of a score and 'min' or 'max', got {shown(select)}")
    if select[1] not in ("min", "max"):
        raise ValueError(f"select: expected 'min' or 'max', got {select[1]!r}")
    parameters = {id(p) for p in replicas.model.parameters()}
    if not all(id(p) in parameters for p in optimizer.stepped):
        raise ValueError("optimizer: expected one for the model of the replicas, got one for another model")


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list of the signals received so far: Ctrl-C (SIGINT), SIGTERM, SIGHUP and SIGUSR1.

    The run looks at it between steps. Only a second Ctrl-C raises an error, at once. A signal that comes too late for
    the last step is handled by what follows.
    """
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in received:
            stop(number, frame)
        received.append(number)

    with signals_caught(receive):
        yield received
    for number in received[:1]:
        signal.raise_signal(number)

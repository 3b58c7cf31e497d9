"""One training stage: a model, its batches and its scores; everything that the programs share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..dispatch import fast
from ..nn import Layer, recompute_blocks
from ..optim import Adam, AdamW, Constant, Cosine, Muon
from ..optim.optimizer import Optimizer
from ..parallel.memory import resident_bytes
from ..parallel.replicas import Replicas
from ..rng import Key, room_for
from .estimate import estimate, gpu_need
from .loop import train
from .readers import MEAN, mean_snapshot
from .settings import Run
from .snapshot import (
    LAST,
    Snapshot,
    SnapshotError,
    average_snapshots,
    best_snapshot,
    count_weights,
    kept_snapshots,
    load_snapshot,
    restore,
    save_snapshot,
)

MUON_OPTIONS = {  # for a program whose presets may have them too
    "optimizer": dict(
        choices=("adam", "muon"), default="adam", help="muon: for the matrices of blocks (default: the preset's)"
    ),
    "muon-lr": dict(
        type=float,
        default=0.02,
        metavar="X",
        least=1e-9,
        most=1000,
        help="learning rate of Muon (default: the preset's, or 0.02)",
    ),
}
VALIDATION_OPTION = {
    "validation": dict(type=int, metavar="N", default=2_500, least=2, help="reviews held out (default: 2500)"),
}
LEAST = 1_000  # a short run is scored on at least as many texts, if the part has them


class Stage:
    """One training stage of a run. Most programs are a single stage (see `Program`); BERT's has three.

    A subclass must define `make_model`, `make_batches` and `evaluate`. The other methods have defaults. The settings
    are attributes of `self.run`, for example `self.run.d_model`.
    """

    folder = ""  # the subfolder for snapshots and metrics; "": the run's folder itself
    hidden = "*blocks.*.w"  # the matrices that Muon steps, as a pattern for names

    def __init__(self, run: Run) -> None:
        self.run, self.key = run, Key(run.seed)

    def make_model(self, key: Key) -> Any:
        """A new model, with weights drawn from `key`. See `Replicas` for what a model must have."""
        raise TypeError(f"{type(self).__name__} has no make_model, which a program must define")

    def make_batches(self, key: Key) -> Any:
        """Training batches: `batch(step)` returns the batch of a step. See `Replicas` for what a batch must have."""
        raise TypeError(f"{type(self).__name__} has no make_batches, which a program must define")

    def evaluate(self, replicas: Replicas, part: str) -> dict[str, float]:
        """The scores of `replicas.model` on a part of the data, "validation" or "test"."""
        raise TypeError(f"{type(self).__name__} has no evaluate, which a program must define")

    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data. A run cannot be resumed or scored with other data."""
        return {}

    def training(self) -> dict[str, Any]:
        """Further arguments of `train`: when to evaluate, which score chooses the best model, what to keep."""
        return {}

    def optimizer(self, model: Layer) -> Optimizer:
        """AdamW if the run has a `weight_decay`, else Adam; Muon if its `optimizer` is "muon", with `muon_lr` for the
        matrices of blocks and `lr` for all else. Muon's products are in the run's precision, but not in float16.
        """
        decay = getattr(self.run, "weight_decay", None)
        if self.with_muon:
            precision = "bfloat16" if self.run.precision == "bfloat16" else "float32"
            options: dict[str, Any] = dict(hidden=self.hidden, weight_decay=decay or 0.0, precision=precision)
            return Muon(model.parameters(), self.lr, self.run.lr, **options)
        if decay is None:
            return Adam(model.parameters(), self.lr)
        return AdamW(model.parameters(), self.lr, weight_decay=decay)

    def schedule(self, floor: float = 0.0) -> Any:
        """A warm-up of at most a fifth of the steps, then a cosine down to `floor`, or a constant rate if the run's
        `schedule` is "constant".
        """
        warmup = min(self.warmup, self.steps // 5)
        if getattr(self.run, "schedule", "cosine") == "constant":
            return Constant(self.lr, warmup)
        return Cosine(self.lr, warmup, self.steps, floor)

    def describe(self) -> None:
        """Print a line about the model and its data, before training."""
        print(f"{self.parameters} parameters")

    def prepare(self, replicas: Replicas) -> None:
        """Called just before training; it may change settings of the run, such as the number of steps."""

    def scored(self, part: str, size: int, trained: int, least: int = LEAST) -> int:
        """On how many of the `size` texts (or tokens) of a part the run is scored.

        On all, except on the test part by a run with fewer steps than its preset. Then it is the number on which the
        run is trained, `trained`, but at least `least`. The validation part is always scored as a whole, since a run
        that is resumed with more steps compares its scores with earlier ones. `scratchformer evaluate` scores all.
        """
        short = part == "test" and self.run.steps < self.run.preset_steps
        return min(size, max(least, trained)) if short else size

    def share(self, count: int, size: int, what: str) -> str:
        """How much was scored, for a line of results: "25,000 reviews", or "1,000 of 25,000 reviews" and the reason."""
        if count == size:
            return f"{size:,} {what}"
        return f"{count:,} of {size:,} {what} (the run has only {self.steps:,} steps)"

    def test(self, replicas: Replicas) -> dict[str, float]:
        """The scores of the best model, for `report`."""
        return self.evaluate(replicas, "test")

    def report(self, state: Mapping[str, Any], test: Mapping[str, float]) -> None:
        """Print the results. state: what `train` returned. test: what `test` returned."""
        print(f"best on validation: {state['best']}")
        print(f"test: {as_text(test)}")

    def summary(self, replicas: Replicas, part: str) -> str:
        """The line that `scratchformer evaluate` prints for the model."""
        return as_text(self.evaluate(replicas, part))

    @property
    def heading(self) -> str:
        """What that line starts with."""
        return f"{self.folder}: " if self.folder else ""

    def largest_batch(self) -> Any:
        """The batch for which --estimate computes the memory."""
        return self.batches.batch(0)

    @property
    def steps(self) -> int:
        return self.run.steps

    @property
    def lr(self) -> float:
        """The peak learning rate, with Muon that of the matrices of blocks."""
        return self.run.muon_lr if self.with_muon else self.run.lr

    @property
    def with_muon(self) -> bool:
        return getattr(self.run, "optimizer", "adam") == "muon"

    @property
    def warmup(self) -> int:
        """The number of warm-up steps, at most."""
        return self.run.warmup

    # Subclasses need not override what follows.

    @property
    def out(self) -> Path:
        return self.run.out / self.folder

    @cached_property
    def model(self) -> Any:
        weights = count_weights(self.out / LAST) if self.run.resume else None
        with nullcontext() if weights is None else room_for(weights):
            model = self.make_model(self.key.fold("weights")).to(self.run.device)
        if self.run.recompute:
            recompute_blocks(model)
        return model

    @cached_property
    def batches(self) -> Any:
        return self.make_batches(self.key.fold("batches"))

    @property
    def parameters(self) -> str:
        """The number of parameters, formatted."""
        return f"{self.model.flat.data.size:,}"

    def sizes(self, *names: str) -> dict[str, Any]:
        """These settings, as arguments of a model. Those that are None are left out, so the model's defaults apply."""
        return {name: value for name in names if (value := getattr(self.run, name)) is not None}

    def fit(self) -> None:
        """Train the model and print its results; with --estimate, print only how much memory training takes."""
        run = self.run
        made = self.model.flat.data.nbytes if "model" in vars(self) else 0  # otherwise `describe` makes it
        with fast():  # it loads libraries
            before = resident_bytes() - made
        self.describe()
        without = resident_bytes()
        first = self.batches.batch(0)
        before += max(0, resident_bytes() - without)  # what the batches hold, such as the rows of a model with recall
        with Replicas(self.model, **run.replicas_on_device()) as replicas:
            print(replicas.describe(first))
            if run.estimate:
                return print(estimate(replicas, self.largest_batch(), before, run.shard))
            replicas.expect_work(first)
            run.ranks.expect_same(self.identity())
            self.prepare(replicas)
            state = self.train(replicas)
            run.ranks.from_first(self.choose)
            run.ranks.send_first(self.model.flat.data)
            test = self.test(replicas)
        if run.ranks.first:
            self.report(state, test)

    def train(self, replicas: Replicas) -> dict[str, Any]:
        """Train the model. Raises MemoryError, which says what a step needs, if a GPU does not have enough memory."""
        run, failed, optimizer = self.run, "", None
        try:
            optimizer = self.optimizer(self.model)
            return train(
                replicas,
                optimizer,
                self.schedule(),
                self.batches,
                self.steps,
                self.out,
                evaluate=lambda: self.evaluate(replicas, "validation"),
                seed=run.seed,
                identity=self.identity(),
                resume=run.resume,
                tensorboard=run.tensorboard,
                shard=run.shard,
                on_start=self.save,
                **self.training(),
            )
        except MemoryError as error:
            if replicas.device.index is None:
                raise
            failed = str(error)
        # Outside of `except`, so that the arrays of the failed step are freed; the optimizer's are not.
        raise MemoryError(f"{failed} {gpu_need(replicas, self.largest_batch())}")

    def choose(self) -> None:
        """Load the weights to be scored: the mean of the snapshots that `train` kept, or the best snapshot if it kept
        none. If it is told to keep some, what is scored is saved too, also when the run was too short for a single one.
        """
        if snapshots := kept_snapshots(self.out):
            average_snapshots(snapshots, self.model)
            print(f"scoring the mean of the last {len(snapshots)} snapshots")
        else:
            self.load_weights(best_snapshot(self.out))
        if snapshots or self.training().get("keep"):
            save_snapshot(self.out / MEAN, self.model, **self.identity())

    def save(self) -> None:
        """Write what resuming the run needs, and remove the mean of earlier snapshots, which would soon be an old one.
        `train` calls this once it has locked the folder.
        """
        self.run.save()
        (self.out / MEAN).unlink(missing_ok=True)

    def load_finished(self) -> None:
        """Load the weights with which the stage was scored, when it has ended: rank 0 reads them for all ranks."""
        self.run.ranks.from_first(lambda: self.load_weights(mean_snapshot(self.out)))
        self.run.ranks.send_first(self.model.flat.data)

    def load_weights(self, path: Path) -> None:
        """Load the weights of a snapshot into the model. Raises SnapshotError if it was made with other data."""
        snapshot = load_snapshot(path, earlier=True)
        self.expect_same_data(snapshot)
        restore(snapshot, self.model)

    def expect_same_data(self, snapshot: Snapshot) -> None:
        """Raise SnapshotError if a snapshot was made with other data."""
        for name, own in json.loads(json.dumps(self.identity())).items():
            if (found := snapshot.state.get(name)) != own:
                found, own = (shorten(repr(value), 100, placeholder="...") for value in (found, own))
                raise SnapshotError(f"{snapshot.path} was made with other data: {name} {found} in it, {own} here")


def as_text(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())

"""The training loop: it learns, keeps the best model, stops in every way, and resumes exactly."""

import json
import signal
import time
from functools import partial

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu
from scratchformer.optim import SGD, Adam, AdamW, Cosine
from scratchformer.shell import files, process
from scratchformer.shell.files import InUse
from scratchformer.training import (
    SnapshotError,
    kept_snapshots,
    load_model,
    load_snapshot,
    metrics,
    read_metrics,
    snapshot,
)
from scratchformer.training import run as run_module

KINDS = ["LanguageModel", "Classifier"]
both_models = pytest.mark.parametrize("kind", KINDS)


class Stop(Exception):
    """Ends a run like a crash."""


class Interrupted:
    """Batches that call `do` when the batch of step `at` is requested."""

    def __init__(self, batches, at, do):
        self.batches, self.at, self.do = batches, at, do

    def batch(self, step):
        if step == self.at:
            self.do()
        return self.batches.batch(step)


def crash():
    raise Stop


def crash_at(step, do=crash):
    return lambda batches, model: Interrupted(batches, step, do)


def everything(model, optimizer):
    return {"w": to_cpu(model.flat.data).copy(), **optimizer.state_dict()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


def without_speed(records):
    return [{name: value for name, value in r.items() if name != "tokens_per_second"} for r in records]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@both_models
def test_the_loss_falls(tmp_path, train_tiny, kind):
    state, _, _ = train_tiny(
        kind, tmp_path, 150, total=150, evaluate_every=50, snapshot_every=100, model_options={"dropout": 0.0}
    )
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [r["loss"] for r in records if "loss" in r]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    held_out = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert held_out[-1] < held_out[0]
    assert state["step"] == 150


@both_models
def test_the_metrics_file_has_every_step_in_json_lines(tmp_path, train_tiny, kind):
    train_tiny(kind, tmp_path, 10, log_every=4, evaluate_every=5)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    score = "bits_per_byte" if kind == "LanguageModel" else "accuracy"
    training = ["step", "loss", "norm", "lr", "tokens_per_second"]
    validation = ["step", "validation_loss", f"validation_{score}"]
    assert [(r["step"], list(r)) for r in records] == [
        (4, training),
        (5, validation),
        (8, training),
        (10, training),
        (10, validation),
    ]
    schedule = Cosine(0.01, 4, 20)
    assert [r["lr"] for r in records if "lr" in r] == [schedule(3), schedule(7), schedule(9)]
    assert all(r[name] > 0 for r in records for name in training if "lr" in r)


@pytest.mark.parametrize(
    ("direction", "scores", "best"),
    [
        ("min", [5.0, 3.0, 4.0, 3.0, 6.0], 2),
        ("max", [5.0, 3.0, 8.0, 8.0, 6.0], 3),
        ("min", [1.0, 2.0, 3.0, 4.0, 5.0], 1),
        ("max", [1.0, 2.0, 3.0, 4.0, 5.0], 5),
    ],
)
def test_the_best_snapshot_is_the_first_with_the_best_score(tmp_path, train_tiny, direction, scores, best):
    seen, models = [], []

    def evaluate():
        seen.append(models[0].state_dict())
        return {"score": scores[len(seen) - 1], "loss": 1.0}

    state, _, _ = train_tiny(
        "LanguageModel",
        tmp_path,
        5,
        evaluate=evaluate,
        evaluate_every=1,
        select=("score", direction),
        prepare=lambda model, optimizer: models.append(model),
    )
    assert state["best"] == {"step": best, "score": scores[best - 1], "loss": 1.0}
    model, saved = load_model(tmp_path / "best.safetensors")
    assert_same(model.state_dict(), seen[best - 1])
    assert saved["step"] == best
    assert saved["best"] == state["best"]


@both_models
@pytest.mark.parametrize("crash_step", [3, 5, 8, 13])
def test_a_resumed_run_ends_as_the_uninterrupted_one_bit_for_bit(tmp_path, train_tiny, kind, crash_step):
    state, *straight = train_tiny(kind, tmp_path / "straight", 14)
    with pytest.raises(Stop):
        train_tiny(kind, tmp_path / "run", 14, batches=crash_at(crash_step))
    assert load_snapshot(tmp_path / "run").state["step"] == crash_step // 3 * 3
    again, *resumed = train_tiny(kind, tmp_path / "run", 14, model_seed=9, resume=True)
    assert_same(everything(*resumed), everything(*straight))
    assert resumed[1].steps == 14
    assert again == state
    records, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert without_speed(records) == without_speed(expected)
    for name in "last", "best":
        first, second = (load_snapshot(tmp_path / run / f"{name}.safetensors") for run in ("run", "straight"))
        assert first.state == second.state
        assert_same(first.model, second.model)
        assert_same(first.optimizer, second.optimizer)


@both_models
def test_resuming_on_a_device_ends_the_same(device, tmp_path, train_tiny, kind):
    if device.name not in ("cpu", "strict"):
        pytest.skip("a GPU adds in an order of its own")
    _, *straight = train_tiny(kind, tmp_path / "straight", 8, device)
    with pytest.raises(Stop):
        train_tiny(kind, tmp_path / "run", 8, device, batches=crash_at(5))
    _, *resumed = train_tiny(kind, tmp_path / "run", 8, device, model_seed=9, resume=True)
    assert_same(everything(*resumed), everything(*straight))


def test_a_finished_run_can_be_taken_further(tmp_path, train_tiny):
    _, *straight = train_tiny("LanguageModel", tmp_path / "straight", 14)
    train_tiny("LanguageModel", tmp_path / "run", 7)
    _, *resumed = train_tiny("LanguageModel", tmp_path / "run", 14, resume=True)
    assert_same(everything(*resumed), everything(*straight))


def test_resuming_a_finished_run_does_nothing(tmp_path, train_tiny):
    state, *_ = train_tiny("LanguageModel", tmp_path, 6)
    before = content(tmp_path)
    again, *_ = train_tiny("LanguageModel", tmp_path, 6, resume=True)
    assert again == state
    assert content(tmp_path) == before


def test_resuming_without_a_snapshot_starts_from_the_beginning(tmp_path, train_tiny):
    _, *straight = train_tiny("LanguageModel", tmp_path / "straight", 6)
    with pytest.raises(Stop):
        train_tiny("LanguageModel", tmp_path / "run", 6, batches=crash_at(2))
    _, *resumed = train_tiny("LanguageModel", tmp_path / "run", 6, resume=True)
    assert_same(everything(*resumed), everything(*straight))
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 4, 5, 6, 6]


def test_the_learning_rate_continues_where_it_was(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 6, total=12)
    train_tiny("LanguageModel", tmp_path, 12, total=12, resume=True)
    found = [r["lr"] for r in read_metrics(tmp_path / "metrics.jsonl") if "lr" in r]
    assert found == [Cosine(0.01, 4, 12)(step) for step in range(12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 3}, "has seed 0, this run has 3"),
        ({"identity": {"corpus": "other"}}, "has corpus 'tiny', this run has 'other'"),
        ({"identity": {"vocabulary": "abc"}}, "has vocabulary None, this run has 'abc'"),
        ({"model_options": {"d_model": 24}}, "d_model.*12 in the snapshot, 24 here"),
        ({"model_options": {"depth": 1}}, "depth.*2 in the snapshot, 1 here"),
        ({"model_options": {"norm": "post"}}, "norm.*pre in the snapshot, post here"),
        ({"model_options": {"dropout": 0.5}}, "dropout.*0.2 in the snapshot, 0.5 here"),
        ({"make_optimizer": SGD}, "has optimizer_class 'Adam', this run has 'SGD'"),
        ({"make_optimizer": AdamW}, "has optimizer_class 'Adam', this run has 'AdamW'"),
    ],
)
def test_the_snapshot_of_another_run_is_refused_by_what_differs(tmp_path, train_tiny, options, message):
    train_tiny("LanguageModel", tmp_path, 4)
    files, begun = content(tmp_path), {}

    def remember(model, optimizer):
        begun.update(model=model, optimizer=optimizer, before=everything(model, optimizer))

    with pytest.raises(SnapshotError, match=message):
        train_tiny("LanguageModel", tmp_path, 8, resume=True, prepare=remember, **options)
    assert content(tmp_path) == files
    assert_same(everything(begun["model"], begun["optimizer"]), begun["before"])


def test_a_model_of_another_class_is_refused(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 4)
    with pytest.raises(SnapshotError, match="another model"):
        train_tiny("Classifier", tmp_path, 8, resume=True, make_optimizer=Adam)


def test_metrics_after_the_snapshot_are_dropped_and_a_half_written_line_is_tolerated(tmp_path, train_tiny):
    with pytest.raises(Stop):
        train_tiny("LanguageModel", tmp_path, 9, batches=crash_at(5))
    metrics = tmp_path / "metrics.jsonl"
    assert [r["step"] for r in read_metrics(metrics)] == [1, 2, 3, 4, 4, 5]
    with metrics.open("a") as file:
        file.write('{"step": 6, "loss": 3.')
    assert [r["step"] for r in read_metrics(metrics)] == [1, 2, 3, 4, 4, 5]
    train_tiny("LanguageModel", tmp_path, 9, resume=True)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        7,
        8,
        8,
        9,
        9,
    ]


@both_models
@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_saves_after_the_step_in_progress_and_the_run_continues_exactly(tmp_path, train_tiny, kind):
    before = signal.getsignal(signal.SIGINT)
    _, *straight = train_tiny(kind, tmp_path / "straight", 9)
    with pytest.raises(KeyboardInterrupt):
        press = crash_at(4, lambda: signal.raise_signal(signal.SIGINT))
        train_tiny(kind, tmp_path / "run", 9, batches=press)
    assert signal.getsignal(signal.SIGINT) is before
    assert load_snapshot(tmp_path / "run").state["step"] == 5  # not at a multiple of snapshot_every
    _, *resumed = train_tiny(kind, tmp_path / "run", 9, resume=True)
    assert_same(everything(*resumed), everything(*straight))


def test_gradients_are_clipped_before_the_step_and_logged_as_they_were(device, tmp_path, train_tiny):
    before = []
    options = {"prepare": lambda model, optimizer: before.append(to_cpu(model.flat.data).copy())}
    _, model, _ = train_tiny("LanguageModel", tmp_path, 1, device, make_optimizer=SGD, clip=0.01, **options)
    moved = np.linalg.norm((to_cpu(model.flat.data) - before[0]).astype(np.float64))
    assert moved == pytest.approx(0.01 * Cosine(0.01, 4, 20)(0), rel=0.01)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["norm"] > 0.1


def test_a_run_on_a_device_ends_near_that_on_the_cpu(device, tmp_path, train_tiny):
    _, here, _ = train_tiny("LanguageModel", tmp_path / "cpu", 5, CPU, count=1)
    _, there, _ = train_tiny("LanguageModel", tmp_path / "device", 5, device, count=1)
    np.testing.assert_allclose(to_cpu(there.flat.data), here.flat.data, rtol=1e-3, atol=1e-4)


def test_a_run_is_not_overwritten(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 4)
    for name in "best.safetensors", "last.safetensors", "metrics.jsonl":
        before = content(tmp_path)
        with pytest.raises(ValueError, match="holds a run: resume it, or choose another folder"):
            train_tiny("LanguageModel", tmp_path, 4)
        assert content(tmp_path) == before
        (tmp_path / name).unlink()
    train_tiny("LanguageModel", tmp_path, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed: "),
        ({"snapshot_every": 0}, "snapshot_every: expected a number >= 1, got 0"),
        ({"keep": -1}, "keep: expected a number >= 0, got -1"),
        ({"log_every": 0}, "log_every: expected a number >= 1, got 0"),
        ({"select": ["loss", "least"]}, "select: expected 'min' or 'max', got 'least'"),
        ({"select": ("loss", "least")}, "select: expected 'min' or 'max', got 'least'"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_done(tmp_path, train_tiny, options, message):
    with pytest.raises(ValueError, match=message):
        train_tiny("LanguageModel", tmp_path / "run", 4, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_every": -1}, "every: expected a number >= 0, got -1"),
        ({"clip": 0}, "max_norm: expected a number > 0, got 0"),
        ({"clip": float("nan")}, "max_norm: expected a number > 0, got nan"),
    ],
)
def test_arguments_out_of_range_in_the_first_step_are_refused(tmp_path, train_tiny, options, message):
    with pytest.raises(ValueError, match=message):
        train_tiny("LanguageModel", tmp_path / "run", 4, **options)


def test_a_missing_score_is_named(tmp_path, train_tiny):
    with pytest.raises(
        ValueError, match="select: expected one of loss, bits_per_byte, which are scored, got 'accuracy'"
    ):
        train_tiny("LanguageModel", tmp_path, 4, select=("accuracy", "max"))


def test_without_clipping_the_norm_is_logged_and_nothing_is_scaled(device, tmp_path, train_tiny):
    before = []
    options = {"prepare": lambda model, optimizer: before.append(to_cpu(model.flat.data).copy())}
    _, model, _ = train_tiny("LanguageModel", tmp_path, 1, device, make_optimizer=SGD, clip=None, **options)
    moved = np.linalg.norm((to_cpu(model.flat.data) - before[0]).astype(np.float64))
    norm = read_metrics(tmp_path / "metrics.jsonl")[0]["norm"]
    assert moved == pytest.approx(norm * Cosine(0.01, 4, 20)(0), rel=1e-3)


@pytest.mark.parametrize("direction", ["min", "max"])
def test_a_score_that_is_not_finite_is_never_the_best(tmp_path, train_tiny, direction):
    scores = iter([np.nan, -np.inf, np.inf, np.float32(2.0), np.nan, np.float32(2.0)])
    options = {"evaluate": lambda: {"score": next(scores)}, "evaluate_every": 1, "select": ("score", direction)}
    state, *_ = train_tiny("LanguageModel", tmp_path, 6, **options)
    assert state["best"] == {"step": 4, "score": 2.0}
    found = [r["validation_score"] for r in read_metrics(tmp_path / "metrics.jsonl") if "validation_score" in r]
    assert found == [None, None, None, 2.0, None, 2.0]


def test_the_last_snapshots_are_kept(tmp_path, train_tiny):
    """Every third step is saved and the last two models are kept; a run that is extended continues to count."""
    train_tiny("LanguageModel", tmp_path, 8, keep=2)
    assert [path.stem for path in kept_snapshots(tmp_path)] == ["step-00000003", "step-00000006"]
    _, model, _ = train_tiny("LanguageModel", tmp_path, 12, keep=2, resume=True)
    assert [path.stem for path in kept_snapshots(tmp_path)] == ["step-00000009", "step-00000012"]
    last = load_snapshot(kept_snapshots(tmp_path)[-1])
    assert last.state["step"] == 12 and not last.optimizer
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(last.model[name], array)


@pytest.mark.parametrize(
    ("config", "identity", "message"),
    [
        (
            None,
            {},
            "cannot save a LanguageModel: it has no `config`, a dict of the arguments to create it again",
        ),
        ([1], {}, "it has no `config`"),
        (
            {"width": np.float32(3)},
            {},
            "cannot save a LanguageModel with these arguments: an argument is a float32: expected JSON values",
        ),
        ({"width": 3}, {"data": b"x"}, "cannot save this state of a run: Object of type bytes is not JSON"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_done(tmp_path, train_tiny, config, identity, message):
    def spoil(model, optimizer):
        model.config = config

    with pytest.raises(SnapshotError, match=message):
        train_tiny("LanguageModel", tmp_path / "run", 4, prepare=spoil, identity=identity)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_run_without_its_last_snapshot_is_not_restarted(tmp_path, train_tiny, step):
    """Whatever other files are left of it."""
    train_tiny("LanguageModel", tmp_path, step, keep=1)
    (tmp_path / "last.safetensors").unlink()
    for name in "metrics.jsonl", "best.safetensors", "step-00000003.safetensors":
        before = content(tmp_path)
        with pytest.raises(SnapshotError, match=r"last\.safetensors is missing, so the run cannot go on: put it back"):
            train_tiny("LanguageModel", tmp_path, 8, resume=True)
        assert content(tmp_path) == before
        (tmp_path / name).unlink()
    train_tiny("LanguageModel", tmp_path, 1, resume=True)


def test_a_run_is_restarted_only_until_its_first_snapshot(tmp_path, train_tiny, capsys):
    """At step 4 the best model is saved, at step 6 the first snapshot."""
    for step in 2, 5, 5:
        with pytest.raises(Stop):
            train_tiny("LanguageModel", tmp_path, 9, batches=crash_at(step), snapshot_every=6, resume=True)
        assert (tmp_path / "no-snapshot-yet").is_file()
    assert (tmp_path / "best.safetensors").is_file()
    assert (
        capsys.readouterr().err.count(f"{tmp_path}: no snapshot was saved yet, so training starts from the beginning")
        == 2
    )
    with pytest.raises(Stop):
        train_tiny("LanguageModel", tmp_path, 9, batches=crash_at(7), snapshot_every=6, resume=True)
    assert not (tmp_path / "no-snapshot-yet").exists()
    (tmp_path / "no-snapshot-yet").touch()  # as if the run had been killed right after its first snapshot
    with pytest.raises(Stop):
        train_tiny("LanguageModel", tmp_path, 9, batches=crash_at(7), snapshot_every=6, resume=True)
    (tmp_path / "last.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="is missing, so the run cannot go on"):
        train_tiny("LanguageModel", tmp_path, 9, snapshot_every=6, resume=True)


def test_if_the_best_model_is_missing_it_is_selected_afresh(tmp_path, train_tiny, capsys):
    train_tiny("LanguageModel", tmp_path, 4)
    (tmp_path / "best.safetensors").unlink()
    state, *_ = train_tiny("LanguageModel", tmp_path, 8, resume=True)
    assert f"{tmp_path / 'best.safetensors'} is missing" in capsys.readouterr().err
    assert state["best"]["step"] == load_snapshot(tmp_path / "best.safetensors").state["step"] == 8


def test_two_trainings_in_one_folder(tmp_path, train_tiny):
    """The second begins during the third step of the first; it is refused, and the first continues."""
    refused = []

    def begin_another():
        before = content(tmp_path / "run")
        for resume in False, True:
            with pytest.raises(InUse) as raised:
                train_tiny("LanguageModel", tmp_path / "run", 6, resume=resume)
            refused.append(str(raised.value))
        assert content(tmp_path / "run") == before
        train_tiny("LanguageModel", tmp_path / "other", 1)

    _, *straight = train_tiny("LanguageModel", tmp_path / "straight", 6)
    _, *run = train_tiny("LanguageModel", tmp_path / "run", 6, batches=crash_at(2, begin_another))
    assert_same(everything(*run), everything(*straight))
    assert len(refused) == 2
    for line in refused:
        assert line == f"{tmp_path / 'run'} is in use by another process: wait until it ends, or choose another folder"
    assert sorted(content(tmp_path / "run")) == sorted(content(tmp_path / "straight"))


class FullDisk:
    """The disk is full the n-th time that a file is written."""

    def __init__(self, monkeypatch, n):
        self.n, self.writes = n, 0
        for name in "replacing", "append":
            whole = getattr(files, name)
            for module in run_module, metrics, snapshot:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, partial(self.write, whole))

    def write(self, whole, path, *args):
        self.writes += 1
        if self.writes == self.n:
            raise OSError(28, "No space left on device", str(path))
        return whole(path, *args)


def test_a_run_can_be_resumed_after_a_full_disk_at_any_write(tmp_path, train_tiny, monkeypatch):
    state, *straight = train_tiny("LanguageModel", tmp_path / "straight", 7, keep=1)
    failures = 0
    for n in range(1, 100):
        run = tmp_path / str(n)
        with monkeypatch.context() as patch:
            disk = FullDisk(patch, n)
            try:
                train_tiny("LanguageModel", run, 7, keep=1)
            except (OSError, SnapshotError) as error:
                assert "No space left on device" in str(error) and str(run) in str(error)
                failures += 1
        if disk.writes < n:
            break
        again, *resumed = train_tiny("LanguageModel", run, 7, keep=1, resume=True)
        assert again == state
        assert_same(everything(*resumed), everything(*straight))
        assert sorted(content(run)) == sorted(content(tmp_path / "straight"))
    assert failures == n - 1 == 18  # metrics and 9 records, no-snapshot-yet, 2 best, 2 kept, 3 last


@pytest.mark.parametrize("name", ["step", "best", "precision", "seed"])
def test_the_identity_does_not_replace_what_the_run_keeps(tmp_path, train_tiny, name):
    with pytest.raises(ValueError, match=f"^identity: expected names .* does not have, got {name}$"):
        train_tiny("LanguageModel", tmp_path, 2, identity={"corpus": "tiny", name: 5})
    assert not list(tmp_path.iterdir())


def test_a_run_without_steps_is_refused(tmp_path, train_tiny):
    with pytest.raises(ValueError, match="steps: expected a number >= 1, got 0"):
        train_tiny("LanguageModel", tmp_path, 0)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_all_steps_is_not_lost(number):
    """Just after the loop has looked for the last time."""

    def program():
        with run_module.interrupts():
            signal.raise_signal(number)
        time.sleep(600)

    with pytest.raises(SystemExit) as ended:
        process.run_program(program)
    assert ended.value.code == 128 + number


@pytest.mark.usefixtures("default_signals")
def test_a_second_ctrl_c_ends_a_step_at_once(tmp_path, train_tiny):
    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        train_tiny("LanguageModel", tmp_path, 9, batches=crash_at(4, press_twice))
    assert load_snapshot(tmp_path).state["step"] == 3


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]], ids=str
)
def test_a_request_to_end_in_the_last_step_ends_the_program_too(tmp_path, train_tiny, numbers):
    request = crash_at(5, lambda: [signal.raise_signal(number) for number in numbers])
    with pytest.raises(KeyboardInterrupt, match="step 6 is saved in ") as stopped:
        train_tiny("LanguageModel", tmp_path, 6, batches=request)
    assert stopped.value.number == numbers[0]
    assert load_snapshot(tmp_path).state["step"] == 6


@pytest.mark.parametrize(("rate", "error"), [(-0.1, ValueError), (float("nan"), ValueError), (None, TypeError)])
def test_what_is_no_learning_rate_is_not_blamed_on_the_weights(tmp_path, train_tiny, monkeypatch, rate, error):
    monkeypatch.setattr(Cosine, "__call__", lambda self, step: rate if step else 0.1)
    with pytest.raises(error, match=r"^lr: expected a (finite )?number"):
        train_tiny("LanguageModel", tmp_path, 2)

"""A run: its settings, its keys, its stages, and how much of a part it is scored on."""

import numpy as np
import pytest

from scratchformer import Key
from scratchformer.data import VALIDATION_BYTES, Labelled, TextBatches
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam
from scratchformer.shell.files import InUse, locked
from scratchformer.training import Replicas, Run, SnapshotError, load_snapshot
from scratchformer.training.run import SHADOWED

TEXTS = Labelled([np.array([i]) for i in range(25_000)], np.repeat([0, 1], 12_500))
TEXT = (np.arange(500) % 29).astype(np.uint8)


def scored(steps, preset_steps, part, items, **options):
    run = Run("run", steps, batch_size=32, context=128)
    run.preset_steps = preset_steps
    found = run.scored(part, items, **options)
    return len(found.labels) if items is TEXTS else len(found)


def test_a_short_run_is_scored_on_no_more_than_it_trained_on_but_at_least_1000_texts_or_20000_tokens():
    assert [scored(3, 100, "test", TEXTS, trained=n) for n in (96, 5_000, 30_000)] == [1_000, 5_000, 25_000]
    assert scored(3, 100, "test", TEXTS) == 1_000 and scored(3, 100, "test", TEXTS, min=2_000) == 2_000
    tokens = np.zeros(200_000, np.uint8)
    assert [scored(steps, 100, "test", tokens) for steps in (3, 10)] == [20_000, 40_960]
    assert scored(3, 100, "validation", TEXTS) == 25_000  # comparable after resuming with more steps
    assert scored(3, 100, "validation", tokens) == VALIDATION_BYTES
    run = Run("run", 3)
    told = "1,000 of 25,000 reviews (the run has only 3 steps)"
    assert run.share(1_000, 25_000, "reviews") == told and run.share(800, 800, "reviews") == "800 reviews"


def test_a_run_of_all_steps_and_one_that_is_only_scored_are_scored_on_everything():
    for steps, preset_steps in ((100, 100), (200, 100), (3, 0)):
        assert scored(steps, preset_steps, "test", TEXTS) == 25_000


def test_a_stage_with_fewer_steps_is_part_of_a_whole_run():
    run = Run("run", 100, batch_size=2)
    run.preset_steps = 100
    assert run.stage("finetune", steps=3).scored("test", TEXTS) is TEXTS
    run.total = 99
    assert len(run.stage("finetune", steps=3).scored("test", TEXTS).labels) == 1_000


def test_texts_at_equal_distances_keep_the_shares_of_sorted_classes():
    texts = Labelled([np.array([i]) for i in range(30)], np.repeat([0, 1, 2], 10))
    few = texts.evenly(6)
    assert few.labels.tolist() == [0, 0, 1, 1, 2, 2] and [int(i) for (i,) in few.ids] == [0, 5, 10, 15, 20, 25]
    for whole in (texts.evenly(30), texts):
        assert np.array_equal(np.concatenate(whole.ids), np.arange(30)) and len(whole.labels) == 30


def test_settings_are_attributes_and_an_unknown_one_is_named():
    run = Run("run", 7, seed=3, lr=0.1, width=None)
    assert (run.lr, run.total, run.seed, run.precision) == (0.1, 7, 3, "float32")
    assert run.sizes("lr", "width") == {"lr": 0.1} and getattr(run, "dropout", 0.5) == 0.5
    run.total = 9
    assert run.settings["steps"] == 9
    with pytest.raises(AttributeError, match=r"the run has no setting depth, only preset, .*lr, width"):
        _ = run.depth
    for name in "key", "log", "best", "given":
        with pytest.raises(ValueError, match=f"^settings: expected other names than {name}, which every run has"):
            Run("run", 7, **{name: 1})
    for name in SHADOWED[1:]:
        assert Run("run", 7, **{name: 1}).settings[name] == 1
    with pytest.raises(TypeError, match=r"^out: expected a path, got 3"):
        Run(3, 7)


def train(run, text=TEXT, steps=None):
    model = LanguageModel(29, 8, 2, 1, 8, key=run.key("weights"))
    batches = TextBatches(text, 4, 8, run.key("batches"))
    with run.replicas(model, batches) as replicas:
        adam = Adam(model.parameters(), 1e-2)
        for step in run.steps(replicas, adam, batches):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))
            replicas.step(adam)
            run.log(loss=loss)
            if run.due(2):
                run.keep_best({"loss": loss})
            if step + 1 == steps:
                break
        run.load_best()
    return model


def test_a_loop_of_ones_own_is_resumed(tmp_path, capsys):
    whole = train(Run(tmp_path / "whole", 6, replicas=1))
    assert "parameters\n1 replica(s) on cpu, micro-batches of 1 rows" in capsys.readouterr().out
    train(Run(tmp_path / "run", 4, replicas=1))
    resumed = Run(tmp_path / "run", 6, resume=True, replicas=2)
    assert np.array_equal(train(resumed).flat.data, whole.flat.data) and resumed.best["step"] in (2, 4, 6)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"metrics.jsonl", "last.safetensors", "best.safetensors", "run.lock"}


def test_a_loop_that_is_left_gives_the_folder_back(tmp_path):
    run = Run(tmp_path, 6, replicas=1)
    with pytest.raises(ZeroDivisionError):
        model = LanguageModel(29, 8, 2, 1, 8)
        batches = TextBatches(TEXT, 4, 8, Key(0))
        with Replicas(model, 1) as replicas:
            for _ in run.steps(replicas, Adam(model.parameters(), 1e-2), batches):
                with pytest.raises(InUse), locked(tmp_path):
                    pass
                1 / 0  # noqa: B018
    with locked(tmp_path):
        pass


def test_the_data_identify_a_run(tmp_path):
    class Data:
        vocabulary, fingerprint = None, "abc"

    run = Run(tmp_path, 2, replicas=1)
    assert isinstance(run.load(lambda given: Data()), Data) and run.identity == {"data": "abc"}
    train(run)
    assert load_snapshot(tmp_path).state["data"] == "abc"
    other = Run(tmp_path, 4, resume=True, replicas=1)
    Data.fingerprint = "xyz"
    other.load(lambda given: Data())
    with pytest.raises(SnapshotError, match="has data 'abc', this run has 'xyz'"):
        train(other)
    with pytest.raises(TypeError, match=r"^data: expected an object with a fingerprint"):
        other.load(lambda given: [1])


def test_stages_have_subfolders_keys_and_settings_of_their_own(tmp_path):
    run = Run(tmp_path, 4, lr=0.1, replicas=1)
    first, second = run.stage("first"), run.stage("second", "second", steps=2, lr=0.2)
    assert (first.total, first.lr, second.total, second.lr, run.lr) == (4, 0.1, 2, 0.2, 0.1)
    assert first.key("weights") == run.key("weights") == Key(0).fold("weights")
    assert second.key("weights") == Key(0).fold("second").fold("weights") and second.stage_name == "second"
    train(first)
    assert first.has_snapshot and not second.has_snapshot
    train(second)
    assert [load_snapshot(tmp_path / name).state["step"] for name in ("first", "second")] == [4, 2]
    run.expect_final("first", ["second"])
    run.total = 5
    with pytest.raises(
        ValueError, match=r"--steps: first would go on to step 5, but the models in .*second have started"
    ):
        run.expect_final("first", ["second"])
    (tmp_path / "link").symlink_to(tmp_path / "first")
    with pytest.raises(ValueError, match="link: expected no link"):
        run.stage("link")

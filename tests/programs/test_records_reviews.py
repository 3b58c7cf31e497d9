"""examples/records/reviews.py end to end on small data: its three stages, alone and together."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scratchformer.parallel.ranks import Ranks
from scratchformer.parallel.replicas import Replicas
from scratchformer.records import (
    BidirectionalClassifier,
    PseudoLabelled,
    fit_evidence,
    scores_of_classes,
    stack_weights,
    stacked,
)
from scratchformer.rng import Key
from scratchformer.training import load_model, load_snapshot, read_metrics, save_snapshot
from scratchformer.training.snapshot import load_file
from scratchformer.training.start import open_run

from .conftest import EXAMPLES, PATIENCE, TINY

pytest.importorskip("tokenizers")
pytest.importorskip("scipy")
STAGES = ("pretrain", "finetune", "selftrain")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
SMALL = """
import sys
sys.path.insert(0, r"{folder}")
import reviews as module
module.PRESETS["small"] |= {sizes}
module.start(module.main)
"""


@pytest.fixture(scope="module")
def with_unlabelled(reviews_folder, tmp_path_factory):
    """reviews_folder, with 40 unlabelled reviews and a copy of a training review."""
    folder = shutil.copytree(reviews_folder, tmp_path_factory.mktemp("unlabelled") / "aclImdb")
    unlabelled = folder / "train" / "unsup"
    unlabelled.mkdir()
    draw = Key(1).fold("reviews").generator()
    for number in range(40):
        words = draw.choice(["film", "story", "plot", "very", "wonderful", "awful"], draw.integers(3, 30))
        (unlabelled / f"{number}_0.txt").write_text(" ".join(words))
    shutil.copy(next((folder / "train" / "pos").iterdir()), unlabelled / "40_0.txt")
    return folder


@pytest.fixture(scope="module")
def finished(call, with_unlabelled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reviews"
    result = call("records/reviews", "--data", with_unlabelled, "--out", folder, "--steps", 2, "--device", "cpu")
    return folder, result.stdout


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def weights(run, stage, snapshot="last.safetensors"):
    return load_snapshot(run / stage / snapshot).model


def same_weights(run, other, stage):
    found, expected = weights(run, stage), weights(other, stage)
    return all((found[name] == expected[name]).all() for name in expected)


def test_it_reports_the_accuracy(finished):
    """Only the last classifier is scored on the test part."""
    folder, output = finished
    assert output.count("starts from the language models of step 2 of 2") == 2
    assert re.findall(r"^(\w+): best on validation: ", output, re.M) == [*STAGES]
    assert len(re.findall(r"^test accuracy on 80 reviews: [0-9.]+%$", output, re.M)) == 1
    kinds = [load_snapshot(folder / stage).model_class.rpartition(":")[2] for stage in STAGES]
    assert kinds == ["BidirectionalLanguageModel", "BidirectionalClassifier", "BidirectionalClassifier"]
    for stage in STAGES[1:]:
        assert load_snapshot(folder / stage).config["num_classes"] == 2


def opened(folder):
    """The module of the program, the run and its data."""
    module = load_file(EXAMPLES / "records" / "reviews.py")
    run = open_run(folder, vars(module), "cpu", None, Ranks())
    return module, run, run.load(module.data)


def labels_of(run):
    """The labels that the last stage learns from."""
    return load_snapshot(run / "selftrain" / "last.safetensors").batches["labels"]


def together(data, model, texts):
    """What a model and the linear model predict together for texts, which are read one at a time."""
    linear = fit_evidence(data.train.ids, data.train.labels)

    def predicted(texts):
        found = []
        for ids in texts:
            kept = np.arange(len(ids)) if len(ids) <= 16 else np.r_[:4, len(ids) - 12 : len(ids)]
            found.append(np.exp(model(ids[None, kept])[0]))
        logits = [linear.of(ids).sum(dtype=np.float64) + linear.bias for ids in texts]  # of the words that are cut too
        return np.array(found), np.array(logits)

    return stacked(*predicted(texts), stack_weights(*predicted(data.validation.ids), data.validation.labels))


def expected_labels(run, teacher):
    """The true labels, and then what `teacher` and the linear model predict for the unlabelled reviews."""
    *_, reviews = opened(run)
    found = together(reviews, teacher, reviews.unlabelled)
    return np.concatenate([[[1 - label, label] for label in reviews.train.labels], found])


def test_the_last_stage_learns_from_labels_and_from_probabilities(finished):
    """Its texts are the training reviews, and then the unlabelled ones that are no copies of training reviews."""
    folder, output = finished
    module, run, reviews = opened(folder)
    texts = [ids.tobytes() for ids in reviews.unlabelled]
    known = {ids.tobytes() for ids in reviews.train.ids}
    assert 30 < len(texts) <= 40 and not known & {*texts}
    assert {*texts} < {ids.tobytes() for ids in reviews.data.unlabelled}
    assert f"classifier of finetune predicts the labels of {len(texts)} unlabelled reviews" in output
    learned = module.pseudo_labelled(run, reviews).ids
    assert [ids.tobytes() for ids in learned] == [ids.tobytes() for ids in reviews.train.ids] + texts
    teacher, _ = load_model(folder / "finetune", BidirectionalClassifier)
    found = labels_of(folder)
    assert found.dtype == np.float32 and len(found) == len(learned) and np.abs(found[-len(texts) :] - 0.5).max() > 0.1
    np.testing.assert_allclose(found, expected_labels(folder, teacher), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_classifier_is_scored_with_the_linear_model(finished, stage, part):
    """Their weights are fitted to the validation part, whichever part is scored."""
    folder, _ = finished
    module, run, reviews = opened(folder)
    texts = getattr(reviews, part)
    model, _ = load_model(folder / stage, BidirectionalClassifier)
    expected = scores_of_classes(together(reviews, model, texts.ids), texts.labels)
    with Replicas(model, 1) as replicas:
        found = module.score(run.stage(stage), replicas, reviews, part)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.011)


def test_the_best_classifier_is_asked(call, copy):
    """The pseudo-labels come from the best classifier, not from the last one."""
    shutil.rmtree(copy / "selftrain")
    best, last = (load_model(copy / "finetune" / name)[0] for name in ("best.safetensors", "last.safetensors"))
    best.load_state_dict({name: -a if "output" in name else a for name, a in last.state_dict().items()})
    state = load_snapshot(copy / "finetune" / "best.safetensors").state
    save_snapshot(copy / "finetune" / "best.safetensors", best, **state)
    call("records/reviews", "--resume", copy, "--stage", "selftrain", "--device", "cpu")
    np.testing.assert_allclose(labels_of(copy), expected_labels(copy, best), rtol=2e-3, atol=1e-5)
    assert np.abs(labels_of(copy) - expected_labels(copy, last)).max() > 0.1


def test_it_resumes_and_is_scored(call, fail, copy):
    """Pre-training does not continue while there are classifiers that have started from its models."""
    line = fail("records/reviews", "--resume", copy, "--steps", 3, "--device", "cpu")
    started = f"{copy / 'finetune'} and {copy / 'selftrain'} have started from its step 2"
    assert f"pretrain would go on to step 3, but the models in {started}" in line
    for stage in STAGES[1:]:
        shutil.rmtree(copy / stage)
    call("records/reviews", "--resume", copy, "--steps", 3, "--device", "cpu")
    assert [int(load_snapshot(copy / stage).optimizer["steps"]) for stage in STAGES] == [3, 3, 3]
    assert [r["step"] for r in read_metrics(copy / "pretrain" / "metrics.jsonl") if "lr" in r] == [2, 3]
    shutil.rmtree(copy / "pretrain")
    files = sorted(copy.rglob("*"))
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    for stage in STAGES[1:]:
        assert re.search(rf"^{stage}: test: loss [0-9.]+, accuracy [0-9.]+$", found, re.M)
    assert sorted(copy.rglob("*")) == files


def test_resumed_batches_have_the_same_labels(finished):
    folder, _ = finished
    module, run, reviews = opened(folder)
    batches = PseudoLabelled(module.pseudo_labelled(run, reviews), 32, 16, Key(0), "both")
    with pytest.raises(ValueError, match="pseudo-labels: expected a state with labels, got memory"):
        batches.load_state_dict({"memory": np.zeros(3)})
    with pytest.raises(ValueError, match="pseudo-labels: expected"):
        batches.load_state_dict({"labels": labels_of(folder)[1:]})
    batches.load_state_dict({"labels": labels_of(folder)})
    labels = {ids.tobytes(): row for ids, row in zip(batches.dataset.ids, labels_of(folder), strict=True)}
    batch = batches.batch(5)
    for ids, n, row in zip(batch.ids, batch.lengths, batch.labels, strict=True):
        if n < 16:  # not cut
            np.testing.assert_array_equal(row, labels[ids[:n].tobytes()])


def test_stages_run_one_at_a_time(call, fail, finished, copy, with_unlabelled, tmp_path):
    shutil.rmtree(copy / "selftrain")
    shutil.rmtree(copy / "finetune")
    assert "holds no classifier yet" in fail("scratchformer", "evaluate", copy, "--device", "cpu")
    line = fail("records/reviews", "--resume", copy, "--stage", "selftrain", "--device", "cpu")
    assert line.endswith("holds no model: run --stage finetune first")
    alone = call("records/reviews", "--resume", copy, "--stage", "finetune", "--device", "cpu").stdout
    assert "best on validation" in alone and "test accuracy" not in alone
    assert same_weights(copy, finished[0], "finetune")
    call("records/reviews", "--resume", copy, "--stage", "selftrain", "--device", "cpu")
    assert same_weights(copy, finished[0], "selftrain")
    options = ("--data", with_unlabelled, "--out", tmp_path / "language model", "--steps", 2, "--device", "cpu")
    call("records/reviews", *options, "--stage", "pretrain")
    assert sorted(p.name for p in (tmp_path / "language model").iterdir() if p.is_dir()) == ["pretrain"]
    options = ("--data", with_unlabelled, "--out", tmp_path / "new", "--device", "cpu")
    line = fail("records/reviews", "--stage", "finetune", *options)
    assert line.endswith("holds no model: run --stage pretrain first")
    for stage in STAGES[1:]:
        line = fail("records/reviews", "--stage", stage, "--estimate", "--resume", copy)
        assert "--estimate: only pre-training is estimated" in line


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="mpi4py or mpiexec is not installed"
)
def test_two_processes_give_the_bits_of_one(finished, with_unlabelled, environment, tmp_path):
    """The second process runs in an empty folder of its own, as on another machine. All multiply with the same library,
    which the cache of `environment` names.
    """
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(folder=EXAMPLES / "records", sizes=TINY["records/reviews"]))
    options = ["--data", with_unlabelled, "--out", "run", "--steps", 2, "--device", "cpu"]
    command = [MPIEXEC, "--allow-run-as-root", "--oversubscribe"]
    for rank in ("first", "second"):
        (tmp_path / rank).mkdir()
        command += ["-n", 1, "-wdir", tmp_path / rank, sys.executable, script, *options, ":"]
    told = subprocess.run([*map(str, command[:-1])], text=True, capture_output=True, timeout=PATIENCE, env=environment)
    assert told.returncode == 0, told.stdout + told.stderr
    assert all(same_weights(tmp_path / "first" / "run", finished[0], stage) for stage in STAGES)
    np.testing.assert_array_equal(labels_of(tmp_path / "first" / "run"), labels_of(finished[0]))
    assert not [*(tmp_path / "second").iterdir()]


def test_without_unlabelled_reviews_there_are_two_stages(call, fail, reviews_folder, tmp_path):
    """The classifier of the second is then scored."""
    folder = tmp_path / "run"
    output = call("records/reviews", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu").stdout
    assert re.search(r"^test accuracy on 80 reviews: [0-9.]+%$", output, re.M)
    assert re.findall(r"^(\w+): best on validation: ", output, re.M) == [*STAGES[:2]]
    line = fail("records/reviews", "--resume", folder, "--stage", "selftrain", "--device", "cpu")
    assert line.endswith("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")

"""examples/reviews.py end to end on small data: its three stages, alone and together."""

import re
import shutil

import numpy as np
import pytest

from scratchformer.data import Subwords, fit_evidence, load_imdb_subwords
from scratchformer.models import BidirectionalClassifier
from scratchformer.rng import Key
from scratchformer.training import load_model, load_snapshot, read_metrics

pytest.importorskip("tokenizers")
pytest.importorskip("scipy")
STAGES = ("pretrain", "finetune", "selftrain")


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
    result = call("reviews", "--data", with_unlabelled, "--out", folder, "--steps", 2, "--device", "cpu")
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
    """Of the last stage alone, on the test part."""
    folder, output = finished
    assert output.count("starts from the language models of step 2 of 2") == 2
    assert len(re.findall(r"^best on validation: ", output, re.M)) == 2
    assert len(re.findall(r"^test accuracy on 80 reviews: [0-9.]+%$", output, re.M)) == 1
    assert re.findall(r"^(\w+): [0-9.]+ minutes$", output, re.M) == [*STAGES]
    kinds = [load_snapshot(folder / stage).model_class for stage in STAGES]
    assert kinds == ["BidirectionalLanguageModel", "BidirectionalClassifier", "BidirectionalClassifier"]
    assert load_snapshot(folder / "finetune").config["evidence"] == 3


def test_the_second_classifier_learns_from_what_the_first_one_says(finished, with_unlabelled):
    """The saved probabilities are those of the classifier and of the linear model, one text at a time, for each
    unlabelled review that is no copy of a training review."""
    folder, _ = finished
    vocabulary = Subwords.load(folder / "vocabulary.json")
    data = load_imdb_subwords(with_unlabelled, vocabulary=vocabulary)
    known = {ids.tobytes() for ids in data.train.ids}
    texts = [ids for ids in data.unlabelled if ids.tobytes() not in known]
    assert 30 < len(texts) <= 40
    model, _ = load_model(folder / "finetune", BidirectionalClassifier)
    linear = fit_evidence(data.train.ids, data.train.labels)
    found = np.load(folder / "selftrain" / "predictions.npy")
    assert found.shape == (len(texts), 2) and np.abs(found[:, 1] - 0.5).max() > 0.1
    for ids, probabilities in zip(texts, found, strict=True):
        evidence = linear.of(ids)
        kept = np.arange(len(ids)) if len(ids) <= 16 else np.r_[:4, len(ids) - 12 : len(ids)]
        expected = np.exp(model(ids[None, kept], evidence[None, kept]))
        np.testing.assert_allclose(probabilities, expected[0], rtol=2e-3, atol=1e-5)


def test_it_resumes_and_is_scored(call, copy):
    """All stages continue, with more steps and the same predictions."""
    before = (copy / "selftrain" / "predictions.npy").read_bytes()
    call("reviews", "--resume", copy, "--steps", 3, "--device", "cpu")
    assert [int(load_snapshot(copy / stage).optimizer["steps"]) for stage in STAGES] == [3, 3, 3]
    assert [r["step"] for r in read_metrics(copy / "pretrain" / "metrics.jsonl") if "lr" in r] == [2, 3]
    assert (copy / "selftrain" / "predictions.npy").read_bytes() == before
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert re.search(r"^selftrain: test: loss [0-9.]+, accuracy [0-9.]+$", found, re.M)


def test_other_predictions_are_refused(fail, copy):
    file = copy / "selftrain" / "predictions.npy"
    changed = np.load(file)
    np.save(file, changed[:, ::-1])
    options = ("--resume", copy, "--stage", "selftrain", "--steps", 3, "--device", "cpu")
    assert "predictions" in fail("reviews", *options)
    np.save(file, changed[1:])
    assert re.search(
        r"predictions\.npy: expected float32 \(\d+, 2\), got float32 \(\d+, 2\)$", fail("reviews", *options)
    )
    file.write_bytes(b"nothing")
    assert "predictions.npy: not a file of predictions" in fail("reviews", *options)


def test_stages_run_one_at_a_time(call, fail, finished, copy, with_unlabelled, tmp_path):
    shutil.rmtree(copy / "selftrain")
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert re.search(r"^finetune: test: loss [0-9.]+, accuracy [0-9.]+$", found, re.M)
    shutil.rmtree(copy / "finetune")
    assert "holds no classifier yet" in fail("scratchformer", "evaluate", copy, "--device", "cpu")
    line = fail("reviews", "--resume", copy, "--stage", "selftrain", "--device", "cpu")
    assert line.endswith("holds no classifier: run --stage finetune first")
    alone = call("reviews", "--resume", copy, "--stage", "finetune", "--device", "cpu").stdout
    assert re.search(r"^test accuracy on 80 reviews: [0-9.]+%$", alone, re.M)
    assert same_weights(copy, finished[0], "finetune")
    call("reviews", "--resume", copy, "--stage", "selftrain", "--device", "cpu")
    assert same_weights(copy, finished[0], "selftrain")
    options = ("--data", with_unlabelled, "--out", tmp_path / "language model", "--steps", 2, "--device", "cpu")
    call("reviews", *options, "--stage", "pretrain")
    assert sorted(p.name for p in (tmp_path / "language model").iterdir() if p.is_dir()) == ["pretrain"]
    options = ("--data", with_unlabelled, "--out", tmp_path / "new", "--device", "cpu")
    line = fail("reviews", "--stage", "finetune", *options)
    assert line.endswith("holds no language model: run --stage pretrain first")
    line = fail("reviews", "--stage", "finetune", "--estimate", "--resume", copy)
    assert "--estimate: only pre-training is estimated" in line


def test_without_unlabelled_reviews_there_are_two_stages(call, fail, reviews_folder, tmp_path):
    """The classifier of the second is then scored."""
    folder = tmp_path / "run"
    output = call("reviews", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu").stdout
    assert "the data has no unlabelled reviews (train/unsup)" in output
    assert re.search(r"^test accuracy on 80 reviews: [0-9.]+%$", output, re.M)
    assert re.findall(r"^(\w+): [0-9.]+ minutes$", output, re.M) == [*STAGES[:2]]
    line = fail("reviews", "--resume", folder, "--stage", "selftrain", "--device", "cpu")
    assert line.endswith("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")

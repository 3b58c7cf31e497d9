"""examples/reviews.py end to end on small data: its two stages, alone and together."""

import re
import shutil

import pytest

from scratchformer.training import load_snapshot, read_metrics

pytest.importorskip("tokenizers")
pytest.importorskip("scipy")
STAGES = ("pretrain", "finetune")


@pytest.fixture(scope="module")
def finished(call, reviews_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reviews"
    result = call("reviews", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu")
    return folder, result.stdout


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def test_it_reports_the_accuracy(finished):
    folder, output = finished
    assert "the data has no unlabelled reviews (train/unsup)" in output
    assert "starts from the language models of step 2 of 2" in output
    assert re.search(r"^test accuracy on 80 reviews: [0-9.]+%$", output, re.M)
    assert re.findall(r"^(\w+): [0-9.]+ minutes$", output, re.M) == [*STAGES]
    kinds = [load_snapshot(folder / stage).model_class for stage in STAGES]
    assert kinds == ["BidirectionalLanguageModel", "BidirectionalClassifier"]
    assert load_snapshot(folder / "finetune").config["evidence"] == 3


def test_it_resumes_and_is_scored(call, copy):
    """Both stages continue, with more steps."""
    call("reviews", "--resume", copy, "--steps", 3, "--device", "cpu")
    assert [int(load_snapshot(copy / stage).optimizer["steps"]) for stage in STAGES] == [3, 3]
    assert [r["step"] for r in read_metrics(copy / "pretrain" / "metrics.jsonl") if "lr" in r] == [2, 3]
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert re.search(r"^finetune: test: loss [0-9.]+, accuracy [0-9.]+$", found, re.M)


def test_stages_run_one_at_a_time(call, fail, finished, copy, reviews_folder, tmp_path):
    shutil.rmtree(copy / "finetune")
    assert "holds no classifier yet" in fail("scratchformer", "evaluate", copy, "--device", "cpu")
    call("reviews", "--resume", copy, "--stage", "finetune", "--device", "cpu")
    found, expected = (load_snapshot(run / "finetune" / "last.safetensors").model for run in (copy, finished[0]))
    assert all((found[name] == expected[name]).all() for name in expected)
    options = ("--data", reviews_folder, "--out", tmp_path / "language model", "--steps", 2, "--device", "cpu")
    call("reviews", *options, "--stage", "pretrain")
    assert sorted(p.name for p in (tmp_path / "language model").iterdir() if p.is_dir()) == ["pretrain"]
    options = ("--data", reviews_folder, "--out", tmp_path / "new", "--device", "cpu")
    line = fail("reviews", "--stage", "finetune", *options)
    assert line.endswith("holds no language model: run --stage pretrain first")
    line = fail("reviews", "--stage", "finetune", "--estimate", "--resume", copy)
    assert "--estimate: only pre-training is estimated" in line

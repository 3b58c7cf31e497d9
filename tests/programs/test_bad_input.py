"""Every mistake of a user ends a program with one line, `error: ...`, and exit status 1, and loses nothing."""

import importlib.util
import re
import shutil

import pytest

from scratchformer.training import load_snapshot

without_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")


@pytest.fixture
def enwik8_copy(enwik8_run, tmp_path):
    return shutil.copytree(enwik8_run.folder, tmp_path / "enwik8 run")


# Options


@pytest.mark.parametrize("program", ["enwik8", "imdb"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 0], "--steps: expected at least 1, got 0"),
        (["--steps", -3], "--steps: expected at least 1, got -3"),
        (["--seed", -1], "--seed: expected at least 0, got -1"),
        (["--replicas", 0], "--replicas: expected at least 1, got 0"),
        (["--replicas", 1000000], "--replicas: expected at most 512, got 1000000"),
        (["--data", ""], "--data: expected at least one character"),
        (["--micro-batch", 0], "--micro-batch: expected at least 1, got 0"),
        (["--micro-batches", 0], "--micro-batches: expected at least 1, got 0"),
        (
            ["--micro-batches", 2, "--micro-batch", 3],
            "--micro-batches: give either this or --micro-batch, not both",
        ),
        (["--device", "tpu"], "device: expected auto, cpu, gpu or gpu:N, got 'tpu'"),
        (["--device", "gpu:x"], "device: expected auto, cpu, gpu or gpu:N, got 'gpu:x'"),
        (["--resume", "nothing"], "nothing holds no run (settings.json is missing)"),
    ],
    ids=str,
)
def test_options_out_of_range(fail, tmp_path, program, options, message):
    assert fail(program, *options, cwd=tmp_path) == f"error: {message}"
    assert not list(tmp_path.iterdir())


@without_cupy
@pytest.mark.parametrize("command", [("enwik8",), ("scratchformer", "check")], ids=str)
def test_a_gpu_without_cupy_says_what_to_install(fail, command):
    assert "CuPy is not installed; for a GPU install it with: pip install" in fail(*command, "--device", "gpu")


def test_an_unknown_option_or_preset_shows_the_usage(call):
    assert "invalid choice: 'huge'" in call("enwik8", "--preset", "huge", status=2).stderr
    assert "invalid choice: 'xxl'" in call("enwik8", "--model", "xxl", status=2).stderr
    assert "unrecognized arguments: --stepps" in call("imdb", "--stepps", 3, status=2).stderr
    for program in "digits", "units":  # their data comes with a library
        assert "unrecognized arguments: --data x" in call(program, "--data", "x", status=2).stderr
    assert "usage" in call("scratchformer", status=2).stderr


# Data


def test_a_corpus_shorter_than_the_context(fail, tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 17)
    line = fail("enwik8", "--data", tmp_path / "short", "--out", tmp_path / "run")
    assert line == ("error: corpus: 15 tokens are fewer than context + 1 = 17; use a longer text or a smaller context")


def test_a_path_that_does_not_exist(fail, tmp_path):
    for program, reason in ("enwik8", "No such file or directory"), ("imdb", "no such file or folder"):
        line = fail(program, "--data", tmp_path / "nowhere", "--out", tmp_path / program)
        assert line == f"error: {tmp_path / 'nowhere'}: {reason}"


def test_a_folder_can_be_used_again_after_missing_data(fail, call, text_file, tmp_path):
    options = ("--out", tmp_path / "run", "--steps", 1, "--device", "cpu")
    fail("enwik8", "--data", tmp_path / "nowhere", *options)
    call("enwik8", "--data", text_file, *options)


def test_imdb_without_data_and_network(fail, tmp_path):
    line = fail("imdb", "--out", tmp_path / "run")
    assert line.startswith("error: download of ")
    assert "no connection to ai.stanford.edu" in line
    assert line.endswith("to use a local copy: --data PATH")


# Runs


def test_out_that_is_a_file(fail, tmp_path):
    (tmp_path / "file").write_text("precious")
    assert fail("enwik8", "--out", tmp_path / "file") == f"error: --out: {tmp_path / 'file'} is not a folder"
    assert (tmp_path / "file").read_text() == "precious"


# Commands


def test_commands_on_a_folder_without_a_run(fail, tmp_path):
    (tmp_path / "file").write_text("")
    for command in "evaluate", "plot":
        for name in "nothing", "file":
            line = fail("scratchformer", command, tmp_path / name)
            assert line == f"error: {tmp_path / name} holds no run (settings.json is missing)"
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text("{}")
    assert "holds a published model, not a run: gpt2.py or" in fail("scratchformer", "evaluate", tmp_path / "published")
    assert "no snapshot at " in fail("scratchformer", "generate", tmp_path / "nothing")
    assert "no snapshot at " in fail("scratchformer", "generate", tmp_path)
    assert "is damaged or not a snapshot" in fail("scratchformer", "generate", tmp_path / "file")


def test_plot_of_a_run_without_metrics(fail, enwik8_copy):
    pytest.importorskip("matplotlib")
    (enwik8_copy / "metrics.jsonl").write_text("")
    assert fail("scratchformer", "plot", enwik8_copy).endswith("nothing to plot yet: metrics.jsonl has no loss")
    (enwik8_copy / "metrics.jsonl").unlink()
    assert fail("scratchformer", "plot", enwik8_copy).endswith("nothing to plot yet: metrics.jsonl has no loss")
    assert not (enwik8_copy / "plots").exists()


def test_plot_before_the_first_snapshot(call, fail, enwik8_copy):
    pytest.importorskip("matplotlib")
    for name in "best", "last":
        (enwik8_copy / f"{name}.safetensors").unlink()
    result = call("scratchformer", "plot", enwik8_copy)
    assert result.stdout.splitlines() == [str(enwik8_copy / "plots" / "curves.png")]
    assert "holds no snapshot yet, so only curves are plotted" in result.stderr


def test_generate_from_a_classifier(fail, imdb_run):
    assert fail("scratchformer", "generate", imdb_run.folder).endswith("Classifier, which cannot generate text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--tokens", -1], "--tokens: expected at least 0, got -1"),
        (["--seed", -1], "--seed: expected at least 0, got -1"),
        (["--device", "tpu"], "device: expected auto, cpu, gpu or gpu:N, got 'tpu'"),
        (["--temperature", -1], "--temperature: expected at least 0, got -1.0"),
        (["--temperature", "nan"], "--temperature: expected at least 0, got nan"),
        (["--top-k", 0], "--top-k: expected at least 1, got 0"),
        (["--top-p", 2], "--top-p: expected at most 1, got 2.0"),
        (["--top-p", 0], "--top-p: expected more than 0, got 0.0"),
    ],
    ids=str,
)
def test_generate_with_options_out_of_range(call, enwik8_run, options, message):
    result = call("scratchformer", "generate", enwik8_run.folder, *options, status=1)
    assert result.stderr.startswith(f"error: {message}")
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["other.txt", "text.txt"])
def test_evaluate_on_another_text(fail, enwik8_run, tmp_path, name):
    (tmp_path / name).write_bytes(b"another text " * 100)
    line = fail("scratchformer", "evaluate", enwik8_run.folder, "--data", tmp_path / name)
    best = enwik8_run.folder / "best.safetensors"
    assert line.startswith(f"error: {best} has data '")


def test_the_same_text_under_another_name(call, enwik8_copy, text_file, tmp_path):
    moved = shutil.copy(text_file, tmp_path / "moved.txt")
    before = call("scratchformer", "evaluate", enwik8_copy, "--data", text_file).stdout
    assert call("scratchformer", "evaluate", enwik8_copy, "--data", moved).stdout == before
    call("enwik8", "--resume", enwik8_copy, "--data", moved, "--steps", 4, "--device", "cpu")
    assert load_snapshot(enwik8_copy).state["step"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--derivations", "--only", "twin"], "--only: does not apply to --derivations"),
        (["--derivations", "--dtype", "float16"], "--dtype: does not apply to --derivations"),
        (["--derivations", "--device", "gpu"], "--device: derivations are checked on the CPU"),
        (["--mistakes"], "--mistakes: applies only to --derivations"),
    ],
    ids=str,
)
def test_check_with_options_that_do_not_go_together(fail, options, message):
    assert fail("scratchformer", "check", "relu", *options).startswith(f"error: {message}")


def test_check_of_derivations_ends_with_a_verdict(call):
    *_, empty, verdict = call("scratchformer", "check", "relu", "--derivations").stdout.splitlines()
    assert empty == "" and re.fullmatch(r"all \d+ right in \d+ s", verdict)


def test_check_of_an_unknown_name(fail):
    line = fail("scratchformer", "check", "linear", "convolution")
    assert line.startswith("error: unknown: convolution; known are ")
    assert "LayerNorm" in line

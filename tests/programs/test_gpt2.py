"""examples/gpt2.py and the commands on its runs, end to end on small data."""

import re
import shutil

import pytest

from scratchformer.commands.plots import attention_maps, encode
from scratchformer.data import Subwords
from scratchformer.models import GPT2
from scratchformer.training import load_model, load_snapshot, read_metrics
from scratchformer.training.settings import read_settings

NUMBER = r"([0-9.]+)"
RUN_FILES = {"best.safetensors", "last.safetensors", "metrics.jsonl", "settings.json", "run.lock", "vocabulary.json"}


def number(pattern, text):
    match = re.search(pattern, text)
    assert match, text
    return float(match[1])


@pytest.fixture
def copy(gpt2_run, tmp_path):
    return shutil.copytree(gpt2_run.folder, tmp_path / "gpt2 run")


def test_it_prints_its_corpus_its_score_and_a_sample(gpt2_run, text_file):
    assert {path.name for path in gpt2_run.folder.iterdir()} == RUN_FILES
    vocabulary = Subwords.load(gpt2_run.folder / "vocabulary.json")
    text = text_file.read_bytes()
    assert f"text.txt: 27,000 training bytes, {len(vocabulary.encode(text[:27_000].decode())):,} tokens of" in (
        gpt2_run.output
    )
    bits = number(rf"text\.txt: {NUMBER} bits per byte", gpt2_run.output)
    nats = number(rf"\({NUMBER} nats per token\) on the last 5%, the best of 2 steps", gpt2_run.output)
    test = vocabulary.encode(text[28_500:].decode("utf-8", "ignore"))
    assert bits == pytest.approx(nats * (len(test) - 1) / sum(vocabulary.sizes[test[1:]]) / 0.693147, rel=1e-3)
    assert f"\n{vocabulary.decode(test[:8])}|" in gpt2_run.output
    assert load_snapshot(gpt2_run.folder).state["subwords"] == vocabulary.fingerprint


def test_it_resumes_and_the_commands_work_on_its_run(call, copy, gpt2_run):
    told = number(rf"{NUMBER} bits per byte", gpt2_run.output)
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert number(rf"^test: loss [0-9.]+, bits_per_byte {NUMBER}$", found) == pytest.approx(told, abs=1.01e-4)
    found = call("scratchformer", "evaluate", copy, "--device", "cpu", "--part", "validation").stdout
    best = load_snapshot(copy).state["best"]["bits_per_byte"]
    assert number(rf"bits_per_byte {NUMBER}$", found) == pytest.approx(best, abs=1.01e-4)
    assert "the best of 3 steps" in call("gpt2", "--resume", copy, "--steps", 3, "--device", "cpu").stdout
    assert [r["step"] for r in read_metrics(copy / "metrics.jsonl")] == [2, 2, 3, 3]
    written = call("scratchformer", "generate", copy, "--prompt", "the café é", "--tokens", 9, "--device", "cpu").stdout
    assert written.startswith("the café é") and len(written) > len("the café é") + 9


def test_attention_maps_are_labelled_with_subwords(gpt2_run):
    model, state = load_model(gpt2_run.folder)
    text = "the film film\né"
    labels, columns, ids = encode(model, text, gpt2_run.folder, state)
    assert columns == labels
    assert "".join(labels).startswith("the␣film␣film\n") and len(labels) == ids.shape[1] < len(text)
    assert attention_maps(model, ids).shape == (1, 2, len(labels), len(labels))


def test_a_published_model_generates_and_is_fine_tuned(call, gpt2_folder, text_file, tmp_path):
    options = ("--prompt", "the film", "--tokens", 12, "--device", "cpu")
    written = call("scratchformer", "generate", gpt2_folder, *options).stdout
    assert written.startswith("the film") and written == call("scratchformer", "generate", gpt2_folder, *options).stdout
    published = shutil.copytree(gpt2_folder, tmp_path / "published")
    run = tmp_path / "run"
    output = call("gpt2", "--pretrained", published, "--data", text_file, "--out", run, "--steps", 1).stdout
    assert "preset pretrained, 1 steps" in output and "the best of 1 steps" in output
    assert read_settings(run)["pretrained"] == str(published)
    tuned, before = load_model(run)[0], GPT2.from_pretrained(published)
    assert tuned.config == before.config
    change = abs(tuned.flat.data - before.flat.data).max()
    assert 0 < change < 1e-3  # one step away from what was loaded
    shutil.rmtree(published)  # the run has all it needs
    assert "the best of 2 steps" in call("gpt2", "--resume", run, "--steps", 2).stdout
    assert call("scratchformer", "generate", run, *options).stdout.startswith("the film")


def test_mistakes(fail, gpt2_folder, text_file, tmp_path):
    """Each gives one line, which says what to do, or what is wrong with which file."""
    assert fail("gpt2", "--preset", "pretrained", "--data", text_file, "--out", tmp_path / "a") == (
        "error: --preset pretrained: needs --pretrained FOLDER"
    )
    assert fail("gpt2", "--pretrained", gpt2_folder, "--preset", "small", "--data", text_file, cwd=tmp_path) == (
        "error: --pretrained: the model has its own sizes, so leave out --preset small"
    )
    line = fail("gpt2", "--pretrained", tmp_path / "no", "--data", text_file, "--out", tmp_path / "b")
    assert line == f"error: {tmp_path / 'no'}: no such folder"
    (tmp_path / "bytes").write_bytes(b"a text " * 40 + b"\xff" + b"a text " * 40)
    assert fail("gpt2", "--data", tmp_path / "bytes", "--out", tmp_path / "c") == (
        "error: bytes: not UTF-8 at byte 280"
    )

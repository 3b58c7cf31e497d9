"""examples/enwik8.py, examples/imdb.py and the commands on their runs, end to end on small data."""

import hashlib
import json
import re
import shutil
from functools import partialmethod

import numpy as np
import pytest

import scratchformer.training
from scratchformer.data import load_enwik8
from scratchformer.dispatch import fast
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Run, load_model, load_snapshot, read_metrics
from scratchformer.training.settings import read_settings
from scratchformer.training.start import run_main

NUMBER = r"([0-9.]+)"
RUN_FILES = {"best.safetensors", "last.safetensors", "metrics.jsonl", "settings.json", "run.lock"}


def number(pattern, text):
    match = re.search(pattern, text)
    assert match, text
    return float(match[1])


@pytest.fixture
def enwik8_copy(enwik8_run, tmp_path):
    return shutil.copytree(enwik8_run.folder, tmp_path / "enwik8 run")


@pytest.fixture
def imdb_copy(imdb_run, tmp_path):
    return shutil.copytree(imdb_run.folder, tmp_path / "imdb run")


def test_enwik8_prints_its_corpus_its_score_and_a_sample(enwik8_run, text_file):
    assert {path.name for path in enwik8_run.folder.iterdir()} == RUN_FILES
    assert "text.txt: 27,000 training bytes" in enwik8_run.output
    score = number(rf"text\.txt: {NUMBER} bits per byte on the last 5%, the best of 2 steps", enwik8_run.output)
    assert 4 < score < 12
    prompt = text_file.read_bytes()[28_500 : 28_500 + 8].decode(errors="ignore")
    written = enwik8_run.output.partition(f"{prompt}|")[2].partition("\n---\nfor more: scratchformer generate")[0]
    assert len(written) > 100  # of 400 bytes
    snapshot = load_snapshot(enwik8_run.folder)
    assert snapshot.state["data"] == hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert snapshot.optimizer["steps"] == 2


def test_a_short_run_says_on_how_much_it_was_scored(tiny_main, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Run, "scored", partialmethod(Run.scored, min=1_000))
    tiny_main("enwik8")(["--data", str(text_file), "--out", str(tmp_path), "--steps", "2"])
    told = "bits per byte on the first 1,000 of 1,500 bytes of the last 5% (the run has only 2 steps), the best of 2"
    assert told in capsys.readouterr().out


def test_enwik8_resumes(call, enwik8_copy):
    """All other settings come from settings.json."""
    result = call("enwik8", "--resume", enwik8_copy, "--steps", 3, "--device", "cpu")
    assert "the best of 3 steps" in result.stdout
    assert [r["step"] for r in read_metrics(enwik8_copy / "metrics.jsonl")] == [2, 2, 3, 3]
    assert load_snapshot(enwik8_copy).optimizer["steps"] == 3
    assert read_settings(enwik8_copy)["steps"] == 3


def test_the_same_command_continues_a_run(call, fail, text_file, enwik8_copy, tmp_path):
    """As a queue starts a job again: the settings that are given must be those of the run."""
    options = ["--data", text_file, "--steps", 3, "--device", "cpu", "--continue"]
    assert "the best of 3 steps" in call("enwik8", "--out", enwik8_copy, "--seed", 0, *options).stdout
    assert [r["step"] for r in read_metrics(enwik8_copy / "metrics.jsonl")] == [2, 2, 3, 3]
    line = fail("enwik8", "--out", enwik8_copy, "--seed", 1, *options)
    assert line == f"error: --seed: the run in {enwik8_copy} has 0, not 1"
    assert "the best of 3 steps" in call("enwik8", "--out", tmp_path / "new", *options).stdout
    assert fail("enwik8", *options) == "error: --continue: name the run's folder with --out, and leave out --resume"


def test_xl_remembers(xl_run, text_file):
    assert {path.name for path in xl_run.folder.iterdir()} == RUN_FILES
    assert read_settings(xl_run.folder)["model"] == "xl"
    assert 4 < number(rf"text\.txt: {NUMBER} bits per byte on the last 5%, the best of 2 steps", xl_run.output) < 12
    assert len(xl_run.output.partition("|")[2].partition("\n---\nfor more: scratchformer generate")[0]) > 100
    snapshot = load_snapshot(xl_run.folder)
    assert snapshot.model_class == "TransformerXL"
    assert snapshot.batches["step"] == 2 and snapshot.batches["memory"].shape == (4, 1, 16, 8)


def test_xl_resumes_with_its_memory(call, xl_run, tmp_path):
    """In mid-pass the memory must be that of the previous step, or the program ends with an error."""
    folder = shutil.copytree(xl_run.folder, tmp_path / "run")
    assert "the best of 4 steps" in call("enwik8", "--resume", folder, "--steps", 4, "--device", "cpu").stdout
    before, after = load_snapshot(xl_run.folder), load_snapshot(folder)
    assert after.optimizer["steps"] == after.batches["step"] == 4
    assert np.abs(after.batches["memory"] - before.batches["memory"]).max() > 0.01


def test_a_run_without_a_saved_model_option_resumes(call, enwik8_copy):
    path = enwik8_copy / "settings.json"
    settings = json.loads(path.read_text())
    assert settings.pop("model") == "plain"
    path.write_text(json.dumps(settings))
    assert "the best of 3 steps" in call("enwik8", "--resume", enwik8_copy, "--steps", 3, "--device", "cpu").stdout
    assert read_settings(enwik8_copy)["model"] == "plain"


def test_the_estimate_counts_the_process_without_the_model(example, text_file, tmp_path, capsys):
    """Python and the libraries alone take more than 25 MB, and the model is not subtracted from them."""
    options = ("--preset", "tutorial", "--data", text_file, "--out", tmp_path / "run", "--device", "cpu", "--estimate")
    with fast():  # which imports the libraries of the extra `fast`
        before = resident_bytes() / 1e6
    run_main(example("enwik8").main, [str(option) for option in options])
    told = float(re.search(r"Python, libraries and data +([\d.]+) MB", capsys.readouterr().out)[1])
    assert abs(told - before) < 15


@pytest.mark.parametrize("kind", ["enwik8", "xl"])
def test_evaluate_reproduces_the_score_of_the_program(request, call, kind):
    run = request.getfixturevalue(f"{kind}_run")
    told = number(rf"{NUMBER} bits per byte on the last 5%", run.output)
    found = call("scratchformer", "evaluate", run.folder, "--device", "cpu").stdout
    assert number(rf"^test: loss [0-9.]+, bits_per_byte {NUMBER}$", found) == pytest.approx(told, abs=1.01e-4)
    found = call("scratchformer", "evaluate", run.folder, "--device", "cpu", "--part", "validation").stdout
    best = load_snapshot(run.folder).state["best"]["bits_per_byte"]
    assert number(rf"^validation: loss [0-9.]+, bits_per_byte {NUMBER}$", found) == pytest.approx(best, abs=1.01e-4)


def test_evaluate_computes_in_the_micro_batches_of_the_run(call, text_file, tmp_path):
    """On which the number of streams, and so the score, of a Transformer-XL depends."""
    options = ("--data", text_file, "--device", "cpu", "--model", "xl", "--micro-batch", 1, "--steps", 3)
    told = call("enwik8", *options, "--out", tmp_path / "run").stdout
    score = re.search(r"text.txt: ([0-9.]+) bits per byte", told)[1]
    found = call("scratchformer", "evaluate", tmp_path / "run", "--device", "cpu").stdout
    assert re.search(r"bits_per_byte ([0-9.]+)", found)[1] == score


@pytest.mark.parametrize("kind", ["enwik8", "xl"])
def test_generate_continues_the_prompt_and_repeats_with_its_seed(request, call, kind):
    folder = request.getfixturevalue(f"{kind}_run").folder

    def generate(*options):
        options = ("--prompt", "the é", "--tokens", 40, "--device", "cpu", *options)
        return call("scratchformer", "generate", folder, *options).stdout

    first = generate("--seed", 1)
    assert first.startswith("the é")
    assert len(first) > len("the é") + 10
    assert generate("--seed", 1) == first
    assert generate("--seed", 2) != first
    assert generate("--temperature", 0) == generate("--top-k", 1, "--seed", 5)
    assert generate("--tokens", 0) == "the é\n"
    pytest.importorskip("ml_dtypes")
    assert len(generate("--precision", "bfloat16")) > len("the é") + 10


def test_several_prompts_are_continued_one_after_another(call, enwik8_run, tmp_path):
    """Each as it is alone, up to a stop text, which is not printed; from options, a file and standard input."""

    def generate(*options):
        options = ("--tokens", 40, "--temperature", 0, "--device", "cpu", *options)
        return call("scratchformer", "generate", enwik8_run.folder, *options).stdout

    alone = [generate("--prompt", text) for text in ("a", "the film é")]
    (tmp_path / "lines").write_text("the film é\r\n\na\n")
    assert generate("--prompt", "a", "--prompts", tmp_path / "lines") == "---\n".join([alone[0], *alone[::-1]])
    drawn = ("--prompt", "a", "--temperature", 2)
    text = generate(*drawn).removeprefix("a").removesuffix("\n")
    stop = next(letter for letter in text if letter.isascii() and letter.isprintable())
    assert generate(*drawn, "--stop", "zzz", "--stop", stop) == f"a{text.partition(stop)[0]}\n"
    assert generate("--prompt", "a", "--repetition-penalty", 5) != alone[0]


def test_a_prompt_that_is_not_utf_8_is_read_as_bytes(call, enwik8_run):
    written = call("scratchformer", "generate", enwik8_run.folder, "--prompt", b"a\xff\xc3", "--tokens", 5).stdout
    assert written.startswith("a\ufffd\ufffd")


def test_control_characters_are_not_printed(call, enwik8_run):
    """After two steps, at a high temperature, the model writes any byte."""
    options = ("--prompt", "\x1b[2J", "--tokens", 300, "--temperature", 5)
    written = call("scratchformer", "generate", enwik8_run.folder, *options).stdout
    assert written.startswith("\ufffd[2J")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", written + enwik8_run.output)


def test_a_short_run_has_a_short_warm_up(enwik8_copy, call):
    call("enwik8", "--resume", enwik8_copy, "--steps", 10, "--device", "cpu")
    lr = [r["lr"] for r in read_metrics(enwik8_copy / "metrics.jsonl") if "lr" in r]
    assert lr[-1] < 0.5 * read_settings(enwik8_copy)["lr"]


def test_evaluate_uses_the_same_validation_bytes_as_training(enwik8_copy, monkeypatch):
    """With a lower limit, which training reads too, the command scores less."""
    from scratchformer.commands import cli

    def evaluate(replicas, part):
        seen.append(part)
        return {"loss": 1.0}

    corpus, seen = load_enwik8(read_settings(enwik8_copy)["data"]), []
    monkeypatch.setattr("scratchformer.training.run.VALIDATION_BYTES", 1000)
    monkeypatch.setattr(scratchformer.training, "evaluate_language_model", evaluate)
    cli.main(["evaluate", str(enwik8_copy), "--part", "validation", "--device", "cpu"])
    np.testing.assert_array_equal(seen[0], corpus.validation[:1000])


def test_generate_takes_a_snapshot_file_too(call, enwik8_run):
    path = enwik8_run.folder / "last.safetensors"
    assert call("scratchformer", "generate", path, "--prompt", "a", "--tokens", 3).stdout.startswith("a")


def test_enwik8_without_data_or_network_trains_on_the_standard_library(
    tiny_main, environment, monkeypatch, capsys, tmp_path
):
    """The limit on the library's size is lowered to keep evaluation short."""
    monkeypatch.setattr("scratchformer.data.enwik8._STANDARD_LIBRARY_LIMIT", 60_000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tiny_main("enwik8")(["--out", str(tmp_path / "run"), "--steps", "1"])
    result = capsys.readouterr()
    name = r"python-3\.[0-9.]+-stdlib \([0-9,]+ bytes\)"
    lines = [line for line in result.out.splitlines() if re.fullmatch(f".*training on {name} instead", line)]
    assert len(lines) == 1, result.out
    assert re.search(f"^{name}: [0-9.]+ bits per byte", result.out, re.MULTILINE)
    assert lines[0].startswith("no connection to download enwik8: training on ")
    assert "download" not in result.err.lower()
    settings = json.loads((tmp_path / "run" / "settings.json").read_text(encoding="utf-8"))
    assert settings["data"] == "stdlib"  # so that it is resumed on the same corpus, with a network or without


def test_imdb_prints_its_test_accuracy(imdb_run):
    assert {path.name for path in imdb_run.folder.iterdir()} == {*RUN_FILES, "vocabulary.txt"}
    assert "100 reviews, " in imdb_run.output  # 200 less 100 for validation
    assert re.search(
        r"^best on validation: step \d, loss \d\.\d{4}, accuracy \d\.\d{4}$", imdb_run.output, re.MULTILINE
    )
    assert 0 <= number(rf"test accuracy on 80 reviews: {NUMBER}%", imdb_run.output) <= 100


def test_imdb_resumes_and_learns(call, imdb_copy):
    result = call("imdb", "--resume", imdb_copy, "--steps", 60, "--device", "cpu")
    assert load_snapshot(imdb_copy).optimizer["steps"] == 60
    assert number(rf"test accuracy on 80 reviews: {NUMBER}%", result.stdout) > 90
    found = call("scratchformer", "evaluate", imdb_copy, "--device", "cpu").stdout
    told = number(rf"test accuracy on 80 reviews: {NUMBER}%", result.stdout)
    assert number(rf"^test: loss [0-9.]+, accuracy {NUMBER}$", found) == pytest.approx(told / 100, abs=1.01e-4)


def test_a_run_is_reproducible(call, reviews_folder, imdb_run, tmp_path):
    """Same seed, same data: the same weights, bit for bit. (The number of threads is that of the first run.)"""
    call("imdb", "--data", reviews_folder, "--out", tmp_path / "again", "--steps", 2, "--device", "cpu")
    first, second = (load_model(folder)[0].state_dict() for folder in (imdb_run.folder, tmp_path / "again"))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_recomputing_blocks_changes_no_bit(call, reviews_folder, imdb_copy, tmp_path):
    """Whether a run starts with it or changes it when it is resumed; the model has dropout."""
    again, start = tmp_path / "again", ("--steps", 2, "--device", "cpu", "--recompute")
    call("imdb", "--data", reviews_folder, "--out", again, *start)
    for folder, change, recompute in (imdb_copy, "--recompute", True), (again, "--no-recompute", False):
        call("imdb", "--resume", folder, "--steps", 3, "--device", "cpu", change)
        assert read_settings(folder)["recompute"] is recompute
    first, second = (load_model(folder)[0].state_dict() for folder in (imdb_copy, again))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_runs_without_a_folder_are_numbered(call, reviews_folder, tmp_path):
    for name in "imdb", "imdb-2":
        options = ("--data", reviews_folder, "--steps", 1, "--device", "cpu")
        assert f"run in runs/{name}\n" in call("imdb", *options, cwd=tmp_path).stdout
        assert (tmp_path / "runs" / name / "last.safetensors").is_file()


@pytest.mark.parametrize("kind", ["enwik8", "xl", "imdb"])
def test_plot_draws_what_the_run_has(request, call, tmp_path, kind):
    pytest.importorskip("matplotlib")
    run = shutil.copytree(request.getfixturevalue(f"{kind}_run").folder, tmp_path / "run")
    result = call("scratchformer", "plot", run)
    paths = [run / "plots" / f"{name}.png" for name in ("curves", "attention", "positions")]
    assert result.stdout.split() == [str(path) for path in paths]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)


def test_plot_compares_runs(call, enwik8_run, xl_run, bert_run, tmp_path):
    pytest.importorskip("matplotlib")
    run = shutil.copytree(enwik8_run.folder, tmp_path / "run")
    result = call("scratchformer", "plot", run, xl_run.folder)
    path = run / "plots" / "comparison.png"
    assert result.stdout.split() == [str(path)]
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    again = shutil.copytree(bert_run.folder, tmp_path / "again")
    staged = call("scratchformer", "plot", again, bert_run.folder).stdout
    assert "comparison_pretrain.png" in staged and "comparison_finetune.png" in staged
    for more, message in (
        ((bert_run.folder,), "they have no stage in common, whose curves could be compared"),
        ((tmp_path,), "settings.json"),
        ((xl_run.folder, xl_run.folder.parent / "." / xl_run.folder.name), "expected different runs"),
        ((xl_run.folder, "--program", "a.py"), "--program: only curves are drawn of several runs, so leave it out"),
    ):
        refused = call("scratchformer", "plot", enwik8_run.folder, *more, status=1)
        assert message in refused.stderr and not refused.stdout


@pytest.mark.parametrize(
    "options",
    [{"recompute": True}, {"positions": "sinusoidal"}, {"positions": "relative"}, {"positions": "none"}],
    ids=str,
)
def test_plot_draws_every_kind_of_body(tmp_path, options):
    pytest.importorskip("matplotlib")
    from scratchformer.commands.plots import attention_maps, encode, plot_attention, plot_positions
    from scratchformer.models import LanguageModel

    model = LanguageModel(256, 8, 2, 2, 16, **options)
    labels, _, ids = encode(model, "ab é", tmp_path)
    maps = attention_maps(model, ids)
    assert maps.shape == (2, 2, 5, 5)
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(maps, 1).any()
    assert plot_attention(maps, labels, tmp_path / "attention.png").is_file()
    assert plot_positions(model, tmp_path / "positions.png").is_file()


def test_plot_draws_the_pattern_of_a_sparse_transformer(tmp_path):
    pytest.importorskip("matplotlib")
    from scratchformer.commands.plots import attention_maps, encode, plot_positions
    from scratchformer.models import SparseTransformer

    model = SparseTransformer(256, 8, 2, 2, 16, 4, kind="fixed")
    maps = attention_maps(model, encode(model, "0123456789", tmp_path)[2])
    place = np.arange(10)
    assert ((maps[:, 0] > 0) == (place[:, None] // 4 == place // 4) & np.tri(10, dtype=bool)).all()
    assert ((maps[:, 1] > 0) == (place % 4 == 3) & np.tri(10, dtype=bool)).all()
    assert plot_positions(model, tmp_path / "positions.png").is_file()


def test_doctor_reports(call):
    lines = call("scratchformer", "doctor").stdout.splitlines()
    subjects = {line.split("  ")[0] for line in lines}
    assert {"scratchformer", "Python", "NumPy", "CPU", "free memory", "data cache", "scipy"} <= subjects


def test_check_checks_the_named_cases(call):
    *lines, empty, verdict = call("scratchformer", "check", "linear", "SelfAttention").stdout.splitlines()
    assert not empty and re.fullmatch(rf"all {len(lines) - 1} right in \d+ s", verdict)
    names = [line.split("  ")[0] for line in lines[1:]]
    assert "linear" in names
    assert "SelfAttention" in names
    assert {name.partition(",")[0] for name in names} == {"linear", "SelfAttention"}
    assert lines[0].split()[-2:] == ["reference", "twin"]
    errors = [error for line in lines[1:] for error in line.split()[-2:]]
    assert all(float(error) < 1e-5 for error in errors if error != "-")
    assert errors[0] != "-" and errors[1] == "-"  # linear has no twin

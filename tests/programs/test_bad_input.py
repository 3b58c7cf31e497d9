"""Every mistake of a user ends a program with one line, `error: ...`, and exit status 1, and loses nothing."""

import gzip
import http.server
import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import tarfile
import threading
import zipfile

import pytest

from scratchformer.shell.text import shown
from scratchformer.training import load_snapshot

without_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def enwik8_copy(enwik8_run, tmp_path):
    return shutil.copytree(enwik8_run.folder, tmp_path / "enwik8 run")


@pytest.fixture
def imdb_copy(imdb_run, tmp_path):
    return shutil.copytree(imdb_run.folder, tmp_path / "imdb run")


def edit_settings(run, **changes):
    path = run / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


def test_a_corpus_too_short_for_its_streams(fail, tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 60)
    line = fail("enwik8", "--model", "xl", "--data", tmp_path / "short", "--out", tmp_path / "run")
    assert line == (
        "error: corpus: 54 tokens make 4 streams of 13, fewer than context + 1 = 17; "
        "use a longer text, a smaller batch or a smaller context"
    )


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


@pytest.mark.parametrize("answer", ["404 Not Found", "200 OK"])
def test_a_wrong_answer_from_the_server_is_an_error(call, environment, tmp_path, answer):
    """Instead of training on other data, as without a network. A proxy gives the answers: 404, or the wrong file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(int(answer[:3]), answer[4:])
            self.end_headers()
            self.wfile.write(b"not enwik8")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = {"http_proxy": f"http://127.0.0.1:{server.server_port}"}
        proxy["HTTP_PROXY"] = proxy["http_proxy"]
        cache = {"SCRATCHFORMER_DATA": str(tmp_path / "cache")}
        result = call("enwik8", "--out", tmp_path / "run", env=environment | proxy | cache, status=1)
        server.shutdown()
    line = result.stderr.splitlines()[-1]  # after a progress bar
    assert line.startswith("error: download of ")
    assert ("answered 404 Not Found" if answer[0] == "4" else "does not have the checksum") in line
    assert "instead" not in result.stdout
    assert not (tmp_path / "run").exists()


def test_truncated_archives(fail, tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", bytes(range(256)) * 1000)
    review = b"a good film " * 200
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for number in range(50):
            info = tarfile.TarInfo(f"aclImdb/train/pos/{number}_9.txt")
            info.size = len(review)
            archive.addfile(info, io.BytesIO(review))
    for program, name, whole in [
        ("enwik8", "enwik8.zip", packed.getvalue()),
        ("enwik8", "text.gz", gzip.compress(bytes(range(256)) * 1000)),
        ("imdb", "aclImdb_v1.tar.gz", gzip.compress(tar.getvalue())),
    ]:
        path = tmp_path / name
        path.write_bytes(whole[: 2 * len(whole) // 3])
        line = fail(program, "--data", path, "--out", tmp_path / f"run of {name}")
        assert name in line
        assert "truncated" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "an empty review"), (b" <br />... ", "an empty review"), (b"caf\xe9", "not UTF-8 at byte 3")],
)
def test_a_bad_review_is_named(fail, tmp_path, text, message):
    folder = tmp_path / "aclImdb" / "train" / "neg"
    folder.mkdir(parents=True)
    (folder / "0_1.txt").write_text("a film")
    (folder / "7_2.txt").write_bytes(text)
    line = fail("imdb", "--data", tmp_path, "--out", tmp_path / "run")
    assert str(folder / "7_2.txt") in line
    assert message in line


def test_too_few_reviews_for_validation(fail, tmp_path):
    for split in "train", "test":
        for kind, rating in ("pos", 9), ("neg", 1):
            folder = tmp_path / "aclImdb" / split / kind
            folder.mkdir(parents=True)
            (folder / f"0_{rating}.txt").write_text("a film")
    assert "100 validation reviews need" in fail("imdb", "--data", tmp_path, "--out", tmp_path / "run")


# Runs


def test_out_that_holds_a_run(fail, text_file, enwik8_copy):
    before = content(enwik8_copy)
    line = fail("enwik8", "--data", text_file, "--out", enwik8_copy, "--steps", 1)
    assert line == f"error: {enwik8_copy} holds a run: continue it with --resume {enwik8_copy}, or choose another --out"
    (enwik8_copy / "settings.json").unlink()
    assert "holds a run" in fail("enwik8", "--data", text_file, "--out", enwik8_copy, "--steps", 1)
    del before[next(path for path in before if path.name == "settings.json")]
    assert content(enwik8_copy) == before


def test_resuming_the_run_of_another_program(fail, imdb_copy):
    before = content(imdb_copy)
    assert fail("enwik8", "--resume", imdb_copy).endswith("is a run of imdb, not of enwik8")
    assert content(imdb_copy) == before


@pytest.mark.parametrize("name", ["other.txt", "text.txt"])
def test_resuming_with_another_text(fail, enwik8_copy, tmp_path, name):
    """A refused run is unchanged, settings included, even if the other text has the same name."""
    (tmp_path / name).write_bytes(b"another text " * 1000)
    before = content(enwik8_copy)
    line = fail("enwik8", "--resume", enwik8_copy, "--data", tmp_path / name, "--steps", 7)
    assert "last.safetensors has data '" in line
    assert content(enwik8_copy) == before


def test_resuming_with_other_reviews_or_without_the_vocabulary(fail, imdb_copy, reviews_folder, tmp_path):
    other = shutil.copytree(reviews_folder, tmp_path / "aclImdb")
    (other / "train" / "pos" / "0_9.txt").write_text("a dull film")
    before = content(imdb_copy)
    line = fail("imdb", "--resume", imdb_copy, "--data", other, "--steps", 7)
    assert "last.safetensors has data '" in line
    line = fail("scratchformer", "evaluate", imdb_copy, "--data", other, "--device", "cpu")
    assert line.startswith(f"error: {imdb_copy / 'best.safetensors'} was made with other data: data '")
    assert content(imdb_copy) == before
    (imdb_copy / "vocabulary.txt").unlink()
    before = content(imdb_copy)
    line = fail("imdb", "--resume", imdb_copy, "--steps", 7)
    assert line == f"error: {imdb_copy / 'vocabulary.txt'}: No such file or directory"
    assert content(imdb_copy) == before


def test_a_damaged_metrics_file_is_unchanged(fail, enwik8_copy):
    metrics = enwik8_copy / "metrics.jsonl"
    metrics.write_text("damaged\n" + metrics.read_text())
    before = content(enwik8_copy)
    assert fail("enwik8", "--resume", enwik8_copy, "--steps", 7) == (
        f"error: {metrics} line 1 is damaged: not JSON at line 1, column 1: Expecting value"
    )
    assert content(enwik8_copy) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", 0],
        ["--preset", "small"],
        ["--micro-batch", 3],
        ["--micro-batches", 3],
        ["--out", "x"],
        ["--tensorboard"],
        ["--model", "plain"],
    ],
    ids=str,
)
def test_options_that_a_resumed_run_refuses(fail, enwik8_run, options):
    line = fail("enwik8", "--resume", enwik8_run.folder, *options)
    assert line == f"error: --resume: the run keeps its settings, so leave out {options[0]}"


@pytest.mark.parametrize(("program", "first"), [("enwik8", []), ("scratchformer", ["plot"])])
def test_out_that_is_a_file(fail, tmp_path, enwik8_run, program, first):
    (tmp_path / "file").write_text("precious")
    run = [enwik8_run.folder] if first else []
    assert (
        fail(program, *first, *run, "--out", tmp_path / "file") == f"error: --out: {tmp_path / 'file'} is not a folder"
    )
    assert (tmp_path / "file").read_text() == "precious"


def test_the_snapshot_of_another_vocabulary(fail, imdb_copy):
    words = imdb_copy / "vocabulary.txt"
    lines = words.read_text().splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    words.write_text("\n".join(lines) + "\n")
    before = content(imdb_copy)
    assert f"made with another vocabulary than {words}" in fail("imdb", "--resume", imdb_copy)
    line = fail("scratchformer", "evaluate", imdb_copy)
    assert line.startswith(f"error: {imdb_copy / 'best.safetensors'} was made with other data: vocabulary '")
    assert content(imdb_copy) == before
    words.write_text("no vocabulary\n")
    assert "vocabulary.txt is damaged" in fail("imdb", "--resume", imdb_copy)
    words.unlink()
    assert "vocabulary.txt: No such file or directory" in fail("scratchformer", "evaluate", imdb_copy)


def test_the_snapshot_of_another_model(fail, enwik8_copy, imdb_run):
    edit_settings(enwik8_copy, d_model=16)
    assert "snapshot of another model (LanguageModel): {'d_model': '8 in the snapshot, 16 here'}" in fail(
        "enwik8", "--resume", enwik8_copy
    )
    edit_settings(enwik8_copy, d_model=8)
    shutil.copy(imdb_run.folder / "last.safetensors", enwik8_copy)
    assert "last.safetensors has " in fail("enwik8", "--resume", enwik8_copy)


def test_a_snapshot_of_xl_without_its_memory(fail, xl_run, tmp_path):
    run = shutil.copytree(xl_run.folder, tmp_path / "run")
    shutil.copy(run / "best.safetensors", run / "last.safetensors")  # saved without the batches
    before = content(run)
    assert "does not fit: " in fail("enwik8", "--resume", run, "--steps", 7)
    assert content(run) == before


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("d_model", "8", "a whole number"),
        ("depth", 1.0, "a whole number"),
        ("heads", True, "a whole number"),
        ("context", -1, "a whole number from 0 to 9,223,372,036,854,775,807"),
        ("replicas", 10**6, "a whole number from 0 to 512 or null"),
        ("lr", [1], "a finite number"),
        ("lr", math.inf, "a finite number"),
        pytest.param("lr", 10**310, "a finite number", id="lr-of-311-digits"),
        ("norm", None, "text"),
        ("data", 3, "text of at most 4,096 characters or null"),
        ("tensorboard", 1, "true or false"),
        ("schedule", {}, "expected one of cosine, constant"),
    ],
)
def test_settings_of_a_wrong_type_are_named(fail, enwik8_copy, name, value, expected):
    edit_settings(enwik8_copy, **{name: value})
    line = fail("enwik8", "--resume", enwik8_copy)
    assert f"settings.json is damaged: {name} is {shown(value)}" in line and expected in line


def test_the_settings_of_another_model(fail, xl_run, tmp_path):
    run = shutil.copytree(xl_run.folder, tmp_path / "run")
    edit_settings(run, model="plain")
    assert "snapshot of another model (TransformerXL)" in fail("enwik8", "--resume", run)
    edit_settings(run, model="xxl")
    expected = "model is 'xxl', expected one of plain, xl, llama"
    assert fail("enwik8", "--resume", run).endswith(f"settings.json is damaged: {expected}")


def test_a_damaged_snapshot(fail, enwik8_copy):
    for name, commands in {
        "last": [("enwik8", "--resume", enwik8_copy)],
        "best": [("scratchformer", "generate", enwik8_copy), ("scratchformer", "evaluate", enwik8_copy)],
    }.items():
        path = enwik8_copy / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        for command in commands:
            assert f"{path} is damaged or not a snapshot" in fail(*command)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is damaged"),
        (b'{"program": "enwik8",', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[1, 2]", "is damaged"),
        (b"3", "is damaged"),
        (b"{}", "is damaged: program, preset, seed, steps, data, replicas, micro_batch, tensorboard missing"),
    ],
)
def test_damaged_settings(fail, enwik8_copy, text, message):
    (enwik8_copy / "settings.json").write_bytes(text)
    before = content(enwik8_copy)
    for command in ("enwik8", "--resume", enwik8_copy), ("scratchformer", "evaluate", enwik8_copy):
        assert f"{enwik8_copy / 'settings.json'} {message}" in fail(*command)
    assert content(enwik8_copy) == before


def test_a_missing_setting_is_named(fail, enwik8_copy, imdb_copy, xl_run, tmp_path):
    xl_copy = shutil.copytree(xl_run.folder, tmp_path / "xl run")
    for program, run, name in (
        ("enwik8", enwik8_copy, "d_model"),
        ("imdb", imdb_copy, "keep"),
        ("enwik8", xl_copy, "xl_d_ff"),
    ):
        settings = json.loads((run / "settings.json").read_text())
        del settings[name]
        (run / "settings.json").write_text(json.dumps(settings))
        assert fail(program, "--resume", run).endswith(f"settings.json is damaged: {name} missing")


def test_a_run_in_use_by_another_process(start, fail, call, enwik8_copy):
    """It is refused before any data is read; commands that only read the run still work."""
    hold = (
        "import sys\nfrom pathlib import Path\nfrom scratchformer.shell.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()"
    )
    holder = start("python", "-c", hold, enwik8_copy, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    before = content(enwik8_copy)
    for option in ("--resume", enwik8_copy), ("--out", enwik8_copy):
        line = fail("enwik8", *option, "--data", "nowhere")
        assert re.match(rf"error: {enwik8_copy} is in use by process {holder.pid} on \S+, since [-0-9: ]+: wait", line)
    call("scratchformer", "generate", enwik8_copy, "--tokens", 3)
    assert content(enwik8_copy) == before
    holder.communicate("")
    assert sorted(content(enwik8_copy)) == sorted(path for path in before if path.name != "run.lock")


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
    assert "--text: " in fail("scratchformer", "plot", enwik8_copy, "--text", "a")
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
    assert line.startswith(f"error: {best} was made with other data: data '")


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

"""A run's folder from a stranger: no name in it executes code, no link in it is followed for writing, and no text in it
reaches the terminal with control characters.
"""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from scratchformer.commands import cli, plots
from scratchformer.models.pretrained import tensors_at
from scratchformer.shell.files import LOCK, InUse, append, locked
from scratchformer.shell.process import run_program
from scratchformer.shell.reading import MAX_HEADER, DataError
from scratchformer.training.snapshot import checksum

COMMANDS = ("evaluate", "generate", "plot", "resume")
HOSTILE = "\x1b]0;x\x07\n\x1b[31m$x^$\u202e\x9b2J"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]")  # not \r, with which a bar is drawn
NAMES = ("settings.json", "metrics.jsonl", "last.safetensors", "best.safetensors")  # of a run's files


@pytest.fixture
def run(enwik8_run, tmp_path):
    return shutil.copytree(enwik8_run.folder, tmp_path / "run")


@pytest.fixture
def told(tiny_main):
    """told("evaluate", run): all that a command prints on a run, its error included."""

    def told(command, run):
        options = {"evaluate": ["--device", "cpu"], "generate": ["--tokens", "3"], "plot": []}
        program = lambda: tiny_main("enwik8")(["--resume", str(run)])  # noqa: E731
        if command != "resume":
            program = lambda: cli.run_command([command, str(run), *options[command]])  # noqa: E731
        out, ended = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                run_program(program)
        except SystemExit as error:
            ended = str(error.code)
        return out.getvalue() + ended

    return told


def rewrite(path, change):
    """Change the objects of a run's file, `change(found)`, and write it; a snapshot with the right checksum."""
    if path.name == "settings.json":
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))
    elif path.name == "metrics.jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        change(found)
        path.write_text("".join(json.dumps(record) + "\n" for record in found))
    else:
        with safe_open(path, framework="numpy") as file:
            header = {name: value for name, value in file.metadata().items() if name != "sha256"}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        found = {"model": json.loads(header["model"]), "state": json.loads(header["state"]), "tensors": tensors}
        change(found)
        header |= {name: json.dumps(found[name]) for name in ("model", "state")}
        save_file(tensors, path, header | {"sha256": checksum(header, tensors)})


def places(value, strings=True, path=()):
    """Where the texts in JSON are, or its keys: a path of keys and indices to each."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from [] if strings else [(*path, key)]
            yield from places(part, strings, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, strings, (*path, index))
    elif strings and (isinstance(value, str) or value is None):
        yield path


def found_places(run, name, strings):
    """`places` in a file of a run; of the tensors, only the first, since all are read alike."""
    found = []
    rewrite(run / name, lambda value: found.extend(places(value, strings)))
    parts = ("model",), ("state",), ("tensors",)
    tensors = [place for place in found if place[0] == "tensors" and place not in parts]
    return [place for place in found if place not in (*parts, *tensors[1:])]


def put(run, name, place, text, strings=True):
    """Put a text where the text, or the key, at a place in a file of a run is."""

    def change(value):
        *outer, last = place
        for key in outer:
            value = value[key]
        if strings:
            value[last] = text
        else:
            value[text] = value.pop(last)

    rewrite(run / name, change)


# Code


def test_no_name_in_a_run_executes_code(told, run, enwik8_run, tmp_path, monkeypatch):
    """Every text in every file of the run names a module or a script that could be imported or executed."""
    (run / "trap").mkdir()
    for file in run / "trap.py", tmp_path / "trap.py", run / "trap" / "__init__.py", run / "trap" / "__main__.py":
        file.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(run)
    texts = ["trap:Model", "trap.__main__", str(run / "trap.py"), "run/trap.py", str(tmp_path / "trap.py")]
    tried = 0
    for name in "settings.json", "last.safetensors", "best.safetensors":
        for i, place in enumerate(found_places(run, name, True)):
            whole = place[-1] in ("made_by", "class")
            for text in texts if whole else [texts[i % len(texts)]]:
                for command in ("evaluate", "generate", "resume") if whole else ("evaluate",):
                    put(run, name, place, text)
                    said = told(command, run)
                    tried += 1
                    assert not (tmp_path / "executed").exists(), (name, place, text, command)
                    if place[-1] == "made_by" and command == "evaluate":
                        assert said.endswith("--program FILE") or said.endswith(f"--program {text}")
                    shutil.copy(enwik8_run.folder / name, run / name)
    assert tried > 40


# Sizes


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl"])
def test_a_text_of_gigabytes_is_not_read(told, run, name):
    os.truncate(run / name, 2**32)  # a hole: it takes no room on the disk
    for command in ("plot", "resume") if name == "metrics.jsonl" else ("plot", "resume", "evaluate"):
        assert f"error: {run / name}: expected at most " in told(command, run)


def test_a_header_of_megabytes_is_not_read(tmp_path):
    header, path = b"{}".ljust(MAX_HEADER + 1), tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=rf"model\.safetensors is damaged.*: a header of {len(header):,} bytes"):
        tensors_at(path)


# Links


def written(run):
    """Where a command may write in a run's folder."""
    unfinished = [f"{name}{end}" for name in NAMES for end in (".unfinished", ".unfinished/new")]
    return [*NAMES, LOCK, "no-snapshot-yet", "average.safetensors", *unfinished]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_outside_a_run_is_written_when_it_is_resumed(told, run, enwik8_run, tmp_path, kind):
    outside = tmp_path / "outside"
    for name in written(run):
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        path, victim = run / name, outside / "victim"
        if not path.parent.exists():
            path.parent.mkdir()
        victim.write_bytes(path.read_bytes() if path.is_file() else b"precious")
        path.unlink(missing_ok=True)
        path.symlink_to(outside if kind == "folder" else victim)
        before = victim.read_bytes()
        told("resume", run)
        assert victim.read_bytes() == before and os.listdir(outside) == ["victim"], name
        shutil.rmtree(run)
        shutil.copytree(enwik8_run.folder, run)


def test_a_link_in_place_of_the_lock_is_named(told, run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / LOCK).unlink()
    (run / LOCK).symlink_to(victim)
    assert told("resume", run).endswith(f"error: {run / LOCK}: expected no link, got one to {victim}: remove it")
    assert victim.read_text() == "precious"


def test_a_stage_or_log_that_is_a_link_to_a_folder_is_refused(fail, call, bert_run, run, reviews_folder, tmp_path):
    outside = tmp_path / "outside"
    stages = shutil.copytree(bert_run.folder, tmp_path / "bert")
    (stages / "scratch").rename(outside)
    (stages / "scratch").symlink_to(outside)
    before = sorted((p.name, p.read_bytes()) for p in outside.iterdir())
    line = fail("bert", "--resume", stages, "--data", reviews_folder, "--device", "cpu")
    assert line == f"error: {stages / 'scratch'}: expected no link, got one to {outside}: remove it"
    assert sorted((p.name, p.read_bytes()) for p in outside.iterdir()) == before
    pytest.importorskip("tensorboardX")
    put(run, "settings.json", ("tensorboard",), True)
    (run / "tensorboard").symlink_to(outside)
    line = fail("enwik8", "--resume", run, "--steps", 3, "--device", "cpu")
    assert line == f"error: {run / 'tensorboard'}: expected no link, got one to {outside}: remove it"


def test_plots_are_not_written_through_links(told, run, tmp_path):
    pytest.importorskip("matplotlib")
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "plots").symlink_to(outside)
    assert told("plot", run) == f"error: {run / 'plots'}: expected no link, got one to {outside}: remove it"
    assert not os.listdir(outside)
    (run / "plots").unlink()
    (run / "plots").mkdir()
    victim = outside / "victim"
    victim.write_text("precious")
    for name in "curves.png", "attention.png", "positions.png":
        (run / "plots" / name).symlink_to(victim)
    paths = told("plot", run).split()
    assert len(paths) == 3 and victim.read_text() == "precious"
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") and not Path(path).is_symlink() for path in paths)


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_file_that_is_written_in_place_is_no_link(tmp_path, target):
    victim, lock, log = tmp_path / "victim", tmp_path / "run" / LOCK, tmp_path / "log"
    lock.parent.mkdir()
    victim.write_text("precious")
    for path in lock, log:
        path.symlink_to(tmp_path / target)
    with pytest.raises(InUse, match=r"run\.lock: expected no link"), locked(lock.parent):
        pass
    with pytest.raises(DataError, match="log: expected no link"):
        append(log, "line")
    assert victim.read_text() == "precious" and not (tmp_path / "nowhere").exists()


# Texts


def hides_nothing(said):
    return not CONTROL.search(said)


@pytest.mark.parametrize("name", NAMES)
def test_no_control_character_of_a_run_is_printed(told, run, enwik8_run, name, monkeypatch):
    """Whichever text or key in a file of the run has them. The commands that read the file take turns."""
    pytest.importorskip("matplotlib")
    for slow in "plot_attention", "plot_positions":  # their figures have no text of these files
        monkeypatch.setattr(plots, slow, lambda *_: run)
    (run / name).write_text("damaged\n")
    readers = [command for command in COMMANDS if "error: " in told(command, run)]
    shutil.copy(enwik8_run.folder / name, run / name)
    assert "resume" in readers
    refused = turn = 0
    for strings in True, False:
        for place in found_places(run, name, strings):
            turn += 1
            read_by_all = strings and place[-1] in ("made_by", "program", "class")
            for command in readers if read_by_all else [readers[turn % len(readers)]]:
                put(run, name, place, HOSTILE, strings)
                said = told(command, run)
                assert hides_nothing(said), (place, command, said)
                errors = [line for line in said.splitlines() if line.startswith("error: ")]
                refused += len(errors)
                assert not errors or said.endswith(errors[-1]), said  # in one line
                shutil.copy(enwik8_run.folder / name, run / name)
    assert refused > 0


def test_no_control_character_of_a_name_is_printed(told, enwik8_run, tmp_path):
    pytest.importorskip("matplotlib")
    run = shutil.copytree(enwik8_run.folder, tmp_path / HOSTILE.replace("/", ""))
    for command in COMMANDS:
        assert hides_nothing(told(command, run)), command
    shutil.copy(run / "best.safetensors", run / f"step-{HOSTILE}.safetensors")
    (run / f"step-{HOSTILE}1.safetensors").write_text("damaged")
    (run / HOSTILE).mkdir()
    (run / HOSTILE / "metrics.jsonl").write_text("{}\n{}\n")
    for command in COMMANDS:
        assert hides_nothing(told(command, run)), command

"""A run that cannot be resumed is refused with one line, and its folder is unchanged: names, bytes and links."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from scratchformer.shell.process import run_program
from scratchformer.training import load_snapshot

PROGRAMS = {"enwik8": "", "xl": "", "imdb": "", "bert": "finetune"}  # and the subfolder whose snapshots are damaged


def tree(folder):
    """Everything in a folder: files with their bytes, links with their targets, folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "a folder"
        found[str(path.relative_to(folder))] = what
    return found


def remove(path):
    path.unlink()


def link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.parent / "moved away")


def folder_instead(path):
    path.unlink()
    path.mkdir()


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def damage_the_first_line(path):
    path.write_bytes(b'{"st\n' + path.read_bytes())


def swap_two_lines(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[5], lines[4], *lines[6:]]))


def of_another_program(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"program": "translate"}))


SNAPSHOT = (remove, link_to_nothing, folder_instead, empty, cut, flip_a_bit)
DAMAGES = {
    "last.safetensors": SNAPSHOT,
    "best.safetensors": [damage for damage in SNAPSHOT if damage is not remove],
    "metrics.jsonl": (damage_the_first_line, link_to_nothing, folder_instead),
    "settings.json": (remove, link_to_nothing, folder_instead, empty, cut, of_another_program),
    "vocabulary.txt": (remove, link_to_nothing, folder_instead, empty, swap_two_lines),
    "vocabulary.json": (remove, link_to_nothing, folder_instead, empty, cut),
}
VOCABULARIES = {"imdb": "vocabulary.txt", "bert": "vocabulary.json"}


@pytest.fixture(scope="module")
def finished(tiny_main, text_file, reviews_folder, tmp_path_factory):
    """finished("enwik8"): the folder of a finished run of this program, made on first use."""
    runs = {}

    def finished(name):
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp(name) / "run"
            data = text_file if name in ("enwik8", "xl") else reviews_folder
            tiny_main(name)(["--out", str(runs[name]), "--data", str(data), *STARTED.get(name, ())])
        return runs[name]

    return finished


STARTED = {"xl": ("--model", "xl")}


@pytest.fixture
def refused(tiny_main, capsys):
    """refused("enwik8", option, ...): the error line of the program."""

    def refused(name, *options):
        main = tiny_main(name)
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            run_program(lambda: main([str(option) for option in options]))
        line = str(raised.value.code)
        assert line.startswith("error: ") and "\n" not in line
        assert capsys.readouterr().err == ""
        return line

    return refused


def more(program):
    """The option for more steps; none for a program whose later stages have started from the model as it is."""
    return () if program == "bert" else ("--steps", 5)


def cases():
    for program, stage in PROGRAMS.items():
        for name, damages in DAMAGES.items():
            if name.startswith("vocabulary") and VOCABULARIES.get(program) != name:
                continue
            folder = stage if name in ("last.safetensors", "best.safetensors", "metrics.jsonl") else ""
            for damage in damages:
                yield pytest.param(program, Path(folder) / name, damage, id=f"{program}-{name}-{damage.__name__}")


@pytest.mark.parametrize(("program", "path", "damage"), list(cases()))
def test_a_damaged_run_is_refused_and_unchanged(finished, refused, tmp_path, program, path, damage):
    run = shutil.copytree(finished(program), tmp_path / "run")
    damage(run / path)
    before = tree(run)
    line = refused(program, "--resume", run, *more(program))
    assert tree(run) == before
    if damage is not of_another_program:
        assert path.name in line or (damage is swap_two_lines and "last.safetensors has vocabulary" in line)


@pytest.mark.parametrize("program", ["enwik8", "bert"])
def test_fewer_steps_than_the_run_has_done_are_refused(finished, refused, tmp_path, program):
    run = shutil.copytree(finished(program), tmp_path / "run")
    before, folder = tree(run), run if program == "enwik8" else run / "pretrain"
    line = refused(program, "--resume", run, "--steps", 2)
    assert line == f"error: steps: expected at least 3, which the run in {folder} has already done, got 2"
    assert tree(run) == before


def test_a_foreign_snapshot_among_those_kept_is_refused_at_the_start(finished, refused, tmp_path):
    run = shutil.copytree(finished("enwik8"), tmp_path / "run")
    shutil.copy(finished("imdb") / "best.safetensors", run / "step-foreign.safetensors")
    assert "step-foreign.safetensors has data" in refused("enwik8", "--resume", run)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", 1), "leave out --seed"),
        (("--out", "elsewhere"), "leave out --out"),
        (("--device", "gpu:x"), "device: expected auto, cpu, gpu or gpu:N"),
        (("--data", "nowhere"), "nowhere"),
        (("--data", "other"), "this run has"),
    ],
    ids=str,
)
def test_a_refused_option_leaves_the_run_unchanged(
    finished, refused, tmp_path, monkeypatch, reviews_folder, program, options, message
):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(finished(program), tmp_path / "run")
    if "other" in options:
        if program in VOCABULARIES:
            shutil.copytree(reviews_folder, tmp_path / "other")
            (tmp_path / "other" / "train" / "pos" / "0_9.txt").write_text("a dull film")
        else:
            (tmp_path / "other").write_bytes(b"another text " * 9000)
    before = tree(tmp_path)
    assert message in refused(program, "--resume", run, *more(program), *options)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("program", ["enwik8", "bert"])
def test_a_new_run_is_refused_in_a_folder_with_snapshots(
    finished, refused, tmp_path, text_file, reviews_folder, program
):
    run = shutil.copytree(finished(program), tmp_path / "run")
    data = text_file if program == "enwik8" else reviews_folder
    for damage in lambda path: None, link_to_nothing, remove:
        damage(run / "settings.json")
        before = tree(run)
        if damage is not remove or program == "enwik8":
            assert "holds a run" in refused(program, "--out", run, "--data", data)
        assert tree(run) == before
        if (run / "settings.json").is_symlink():
            (run / "settings.json").unlink()
            shutil.copy(finished(program) / "settings.json", run)


def test_a_run_stopped_before_its_first_snapshot_starts_over(finished, tiny_main, tmp_path, text_file, capsys):
    """Stopped after one of three steps, when only metrics had been written."""
    from scratchformer.training import metrics

    run, whole = tmp_path / "run", metrics.Metrics.write

    def stop(self, step, **values):
        whole(self, step, **values)
        raise KeyboardInterrupt

    main = tiny_main("enwik8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.Metrics, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            main(["--out", str(run), "--data", str(text_file)])
    assert (run / "metrics.jsonl").stat().st_size > 0
    assert not (run / "last.safetensors").exists()
    capsys.readouterr()
    main(["--resume", str(run)])
    assert f"{run}: no snapshot was saved yet, so training starts from the beginning" in capsys.readouterr().err
    first, second = load_snapshot(run), load_snapshot(finished("enwik8"))
    for name in first.model:
        np.testing.assert_array_equal(first.model[name], second.model[name])
    assert {path.name for path in run.iterdir()} == {path.name for path in finished("enwik8").iterdir()}

"""The settings of a run: from presets, options, and the folder of a run that goes on."""

import argparse
import math
import shutil

import pytest

from scratchformer.training.settings import save_settings
from scratchformer.training.settings import start_run as parse
from scratchformer.training.start import make_run
from scratchformer.version import __version__


def start_run(*arguments):
    return make_run(arguments[0], **parse(*arguments))


def save(run):
    save_settings(run.out, run.settings)


def test_options_of_a_program_that_are_paths(tmp_path, monkeypatch, capsys):
    """One that is given chooses the preset of its name, is kept with the run, and may not change."""
    monkeypatch.chdir(tmp_path)
    presets = {"small": {"steps": 5, "width": 3}, "weights": {"steps": 7}}
    options = {"weights": {"metavar": "PATH"}}
    start = lambda *argv: start_run("name", "", presets, list(argv), options)  # noqa: E731
    plain, loaded, chosen = start(), start("--weights", "."), start("--weights", ".", "--preset", "small")
    assert (plain.preset, plain.weights, plain.width) == ("small", None, 3)
    assert (loaded.preset, loaded.weights, loaded.total) == ("weights", str(tmp_path), 7)
    assert (chosen.preset, chosen.weights) == ("small", str(tmp_path))
    save(loaded)
    shutil.move(loaded.out, "run")
    resumed = start("--resume", "run")
    assert (resumed.preset, resumed.weights, resumed.total) == ("weights", str(tmp_path), 7)
    with pytest.raises(ValueError, match="--resume: the run keeps its settings, so leave out --weights"):
        start("--resume", "run", "--weights", ".")


def test_options_of_a_program_that_are_none(tmp_path, monkeypatch, capsys):
    """They have their defaults, and those that pass may change."""
    monkeypatch.chdir(tmp_path)
    options = {"kind": {"choices": ("a", "b"), "default": "a"}, "part": {"type": int, "changeable": True}}
    start = lambda *argv: start_run("name", "", {"small": {"steps": 5}}, list(argv), options)  # noqa: E731
    run = start("--kind", "b", "--part", "1")
    assert (start().kind, start().part) == ("a", None)
    assert (run.kind, run.part) == ("b", 1)
    (tmp_path / "b").mkdir()  # a folder of that name does not make it a path
    save(run)
    shutil.move(run.out, "run")
    assert (start("--resume", "run").kind, start("--resume", "run", "--part", "2").part) == ("b", 2)
    with pytest.raises(ValueError, match="--resume: the run keeps its settings, so leave out --kind"):
        start("--resume", "run", "--kind", "b")


def test_an_option_with_a_dash_may_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = {"old-part": {"action": argparse.BooleanOptionalAction, "default": False, "changeable": True}}
    start = lambda *argv: start_run("name", "", {"small": {"steps": 5}}, list(argv), options)  # noqa: E731
    run = start("--old-part", "--out", "run")
    save(run)
    capsys.readouterr()
    assert start("--resume", "run").old_part is True
    assert "as before: --old-part; to change this" in capsys.readouterr().out
    assert start("--resume", "run", "--no-old-part").old_part is False


@pytest.mark.parametrize(
    ("presets", "message"),
    [
        ({"tiny": {"steps": 5}}, "presets: expected one named small, got tiny"),
        ({"small": {"steps": 5}, "big": {}}, "presets: big has no steps"),
        ({"small": {"steps": 5, "state": 1}}, "settings: expected other names than state, which every run has already"),
        ({"small": {"steps": 5, "key": 1}}, "settings: expected other names than key, which every run has already"),
    ],
)
def test_presets_that_no_run_can_have(presets, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        start_run("name", "", presets, [])


def test_settings_and_options_of_any_kind_come_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    presets = {"small": {"steps": 5, "shift": -1, "betas": (0.9, 0.98), "clip": math.inf, "more": {"a": [1]}}}
    options = {
        "offset": {"type": int, "default": 3},
        "layers": {"type": int, "nargs": "+"},
        "fraction": {"type": lambda text: float(text)},
        "tag": {"action": "append"},
        "verbose": {"action": argparse.BooleanOptionalAction},
    }
    start = lambda *argv: start_run("name", "", presets, list(argv), options)  # noqa: E731
    given = "--offset -3 --layers 3 4 --fraction 0.5 --tag a --tag b --no-verbose".split()
    run = start(*given, "--out", "run")
    assert (run.offset, run.layers, run.fraction, run.tag, run.verbose) == (-3, [3, 4], 0.5, ["a", "b"], False)
    save(run)
    resumed = start("--resume", "run")
    assert resumed.settings == {**run.settings, "betas": [0.9, 0.98], "version": __version__}
    assert resumed.resumed and not run.resumed

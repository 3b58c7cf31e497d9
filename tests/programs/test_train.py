"""`scratchformer train` runs the programs of the package by name, from a checkout or installed."""

import configparser
import json
import shutil

import pytest

from scratchformer.training import examples as where
from scratchformer.training.examples import examples, examples_folder, first_line, is_example

from .conftest import EXAMPLES

TEXT = "to be, or not to be: that is the question. " * 2000


def test_all_programs_are_listed_with_the_first_lines_of_their_docstrings(call):
    lines = call("scratchformer", "train").stdout.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines)
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.py")]
    assert listed.keys() == {file.relative_to(EXAMPLES).with_suffix("").as_posix() for file in files} >= {"enwik8"}
    assert all(file.read_text(encoding="utf-8").startswith(f'"""{first_line(file)}\n') for file in files)
    assert listed["enwik8"] == first_line(EXAMPLES / "enwik8.py")


def test_it_runs_the_program_as_python_does(call, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    options = ["--data", tmp_path / "text", "--steps", 2, "--replicas", 1]
    by_name = call("scratchformer", "train", "enwik8", *options, cwd=tmp_path).stdout
    by_file = call(EXAMPLES / "enwik8.py", *options, "--out", "beside", cwd=tmp_path).stdout
    assert (tmp_path / "runs" / "enwik8" / "best.safetensors").is_file()
    settings = [json.loads((tmp_path / out / "settings.json").read_text()) for out in ("runs/enwik8", "beside")]
    assert settings[0]["made_by"] == settings[1]["made_by"] == str(EXAMPLES / "enwik8.py")
    score = next(line for line in by_name.splitlines() if "bits per byte" in line)
    assert score in by_file
    assert "test: " in call("scratchformer", "evaluate", "runs/enwik8", cwd=tmp_path).stdout


@pytest.mark.parametrize("name", ["enwik8.py", "./enwik8", "../examples/enwik8", "enwik9", "\x1b[31m"])
def test_only_names_of_programs_are_taken(fail, tmp_path, name):
    """Nothing in the current folder is executed, whatever the name says."""
    for file in ("enwik8.py", "enwik9.py"):
        (tmp_path / file).write_text("open('executed', 'w')")
    error = fail("scratchformer", "train", name, cwd=tmp_path)
    assert "train: expected the name of a program (bert" in error
    assert repr(name) in error
    assert not (tmp_path / "executed").exists()


def test_a_module_in_the_current_folder_is_not_imported(call, tmp_path):
    for module in ("numpy", "enwik8", "scratchformer"):
        (tmp_path / f"{module}.py").write_text("open('executed', 'w')")
    command = ["-c", "import sys; sys.path.remove(''); from scratchformer.commands.cli import main; main()"]
    call("python", *command, "train", "enwik8", "--help", cwd=tmp_path, stdin=None)
    assert not (tmp_path / "executed").exists()


def test_installed_programs_are_those_beside_the_package(monkeypatch, tmp_path):
    """An installed package has them inside; a file beside it, or in the current folder, is none of them."""
    package = tmp_path / "site-packages" / "scratchformer"
    package.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, "PACKAGE", package)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copytree(EXAMPLES, package.parent / "examples")
    assert examples_folder() is None
    assert examples() == {}
    shutil.copytree(EXAMPLES, package / "examples")
    assert examples()["enwik8"] == package / "examples" / "enwik8.py"
    assert is_example(package / "examples" / "enwik8.py")
    for stranger in (tmp_path, package.parent):
        assert not is_example(stranger / "examples" / "enwik8.py")
    (tmp_path / "link.py").symlink_to(package / "examples" / "enwik8.py")
    assert is_example(tmp_path / "link.py")


def test_the_wheel_contains_every_package_and_program():
    root = EXAMPLES.parent
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    folders = {file.parent.relative_to(root).as_posix() for file in EXAMPLES.rglob("*.py")}
    programs = [f"scratchformer.{folder.replace('/', '.')}" for folder in sorted(folders)]
    packages = setup["options"]["packages"].split()
    rooms = {file.parent.relative_to(root) for file in (root / "scratchformer").rglob("__init__.py")}
    assert packages == sorted(".".join(room.parts) for room in rooms) + programs
    assert setup["options"]["package_dir"].split() == ["scratchformer.examples", "=", "examples"]

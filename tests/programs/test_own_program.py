"""A user's own program: the commands work on its runs, and execute its file only where that is safe."""

import json
import re
import shlex
import shutil
import sys
from inspect import cleandoc
from pathlib import Path

import pytest

from scratchformer.commands import cli
from scratchformer.training import load_snapshot
from scratchformer.training.snapshot import load_file

GUIDE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
LISTING = re.search(r"\n    (\"\"\"Train a small.*?start\(main\))\n", GUIDE, re.DOTALL)[1]
POEMS = cleandoc(LISTING)
OWN_MODEL = POEMS.replace("return LanguageModel(", "return Mine(").replace(
    "def data(run)", "class Mine(LanguageModel):\n    pass\n\n\ndef data(run)"
)


@pytest.fixture(scope="module")
def runs(call, text_file, tmp_path_factory):
    """A folder with the documented program, poems.py, one with its own model class, own.py, and a run of each after two
    steps; and the output of the first.
    """
    folder = tmp_path_factory.mktemp("own programs")
    (folder / "poems.py").write_text(POEMS)
    (folder / "own.py").write_text(OWN_MODEL)
    options = ("--data", text_file, "--steps", 2, "--device", "cpu", "--out")
    told = [call(folder / f"{name}.py", *options, folder / name).stdout for name in ("poems", "own")]
    return folder, told[0]


@pytest.fixture
def command(runs, monkeypatch, capsys):
    """command("evaluate", "poems", ...): the output of a command on the run of this name, called in its folder."""
    monkeypatch.chdir(runs[0])

    def command(name, run, *options):
        capsys.readouterr()
        cli.main([name, run, *map(str, options), "--program", f"{run}.py"])
        return capsys.readouterr().out

    return command


@pytest.mark.parametrize("name", ["poems", "own"])
def test_the_commands_work_on_its_runs(command, runs, name):
    found = command("evaluate", name, "--device", "cpu")
    bits = float(re.fullmatch(r"test: loss [0-9.]+, bits_per_byte ([0-9.]+)\n", found)[1])
    told = float(re.search(r"text\.txt: ([0-9.]+) bits per byte on the last 5%", runs[1])[1])
    assert bits == pytest.approx(told, abs=1.01e-4)  # both models are the same
    best = load_snapshot(runs[0] / name).state["best"]["bits_per_byte"]
    assert f"bits_per_byte {best:.4f}" in command("evaluate", name, "--part", "validation", "--device", "cpu")
    assert command("generate", name, "--prompt", "the ", "--tokens", 5).startswith("the ")
    pytest.importorskip("matplotlib")
    paths = [str(Path(name, "plots", f"{picture}.png")) for picture in ("curves", "attention", "positions")]
    assert command("plot", name).split() == paths


@pytest.mark.parametrize("name", ["poems", "own"])
def test_the_command_at_the_end_of_training_works_as_it_is(call, runs, name):
    """That of a model whose class is in the program names the program."""
    output = call(runs[0] / f"{name}.py", "--resume", runs[0] / name, "--device", "cpu").stdout
    line = output.partition("for more: ")[2].splitlines()[0]
    assert ("--program" in line) is (name == "own")
    assert call(*shlex.split(line), "--tokens", 2, "--device", "cpu").stdout


def test_a_run_and_its_program_can_be_moved(call, runs, text_file, tmp_path):
    for name in "poems", "poems.py":
        (shutil.copytree if name == "poems" else shutil.copy)(runs[0] / name, tmp_path / name)
    call(tmp_path / "poems.py", "--resume", tmp_path / "poems", "--steps", 3, "--device", "cpu")
    assert load_snapshot(tmp_path / "poems").state["step"] == 3
    assert json.loads((tmp_path / "poems" / "settings.json").read_text())["made_by"] == str(tmp_path / "poems.py")


def test_a_file_elsewhere_is_executed_only_if_named(call, fail, runs, tmp_path):
    """Whatever the settings say, since a run may come from a stranger."""
    run = shutil.copytree(runs[0] / "poems", tmp_path / "run")
    script = run / "poems.py"
    script.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n{POEMS}")
    settings = json.loads((run / "settings.json").read_text())

    def refused(source, *command, **options):
        (run / "settings.json").write_text(json.dumps(settings | {"made_by": source}))
        line = fail("scratchformer", *command, run, **options)
        assert not (tmp_path / "executed").exists()
        return line

    told = f"error: {run} was made by {script}, which is executed only if you name it with --program"
    for cwd in tmp_path, run:
        line = refused(str(script), "evaluate", cwd=cwd)
        assert line == f"{told}; if you trust it: scratchformer evaluate {run} --program {script}"
    beside = shutil.copy(script, tmp_path / "poems.py")  # in the current folder, and where Python imports from
    assert refused(str(beside), "evaluate", cwd=tmp_path).endswith(f"scratchformer evaluate {run} --program {beside}")
    assert refused("poems", "evaluate", cwd=tmp_path).endswith(f"scratchformer evaluate {run} --program FILE")
    for source in str(tmp_path / "gone.py"), "poems.main", None:
        assert f"was made by {source}, which is executed only if you name it" in refused(source, "evaluate")
    assert call("scratchformer", "generate", run, "--tokens", 3).stdout  # needs no code of the program
    own = json.loads((runs[0] / "own" / "settings.json").read_text())
    shutil.copy(runs[0] / "own" / "last.safetensors", run / "best.safetensors")
    settings |= {"program": "own"}
    line = refused(own["made_by"], "generate")
    assert "its model Mine, of the module __main__, is not imported" in line
    assert line.endswith(f"scratchformer generate {run} --program {shlex.quote(own['made_by'])}")
    named = call("scratchformer", "evaluate", runs[0] / "poems", "--program", script, "--device", "cpu").stdout
    assert named.startswith("test: loss") and (tmp_path / "executed").exists()


def test_a_program_leaves_the_path_as_it_was(runs, tmp_path):
    """A module in its folder must not hide an installed one of the same name afterwards, even if the program fails."""
    (tmp_path / "fails.py").write_text("import json\nimport beside\n1 / 0")
    (tmp_path / "beside.py").write_text("")
    before = [*sys.path]
    assert load_file(runs[0] / "own.py").__name__ == "_program_own"
    with pytest.raises(ValueError, match=r"fails\.py cannot be loaded: ZeroDivisionError"):
        load_file(tmp_path / "fails.py")
    assert sys.path == before

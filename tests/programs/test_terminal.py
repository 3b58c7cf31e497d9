"""No program fails with a codec error on a terminal that cannot show every character."""

import io
import shutil
import sys

import pytest

from scratchformer.shell.process import run_program

TERMINALS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
on_every_terminal = pytest.mark.parametrize("terminal", TERMINALS)


@pytest.fixture
def shown(call, environment):
    """shown(terminal, program, option, ...): the program's output, one character per byte."""

    def shown(terminal, *command, **options):
        variables = {name: value for name, value in environment.items() if name != "PYTHONUTF8"} | TERMINALS[terminal]
        return call(*command, env=variables, encoding="latin-1", **options).stdout

    return shown


@pytest.fixture(scope="module")
def folder(enwik8_run, tmp_path_factory):
    """A run in a folder whose name is neither ASCII nor cp1252."""
    return shutil.copytree(enwik8_run.folder, tmp_path_factory.mktemp("runs") / "läufe 中文")


@on_every_terminal
def test_generate(shown, folder, terminal):
    written = shown(terminal, "scratchformer", "generate", folder, "--prompt", "straße 中 \u0394", "--tokens", 200)
    expected = {"ascii": "stra?e ? ?", "cp1252": "straße ? ?", "C": "stra?e ? ?"}[terminal]
    assert written.startswith(expected) and len(written) > len(expected) + 50


@on_every_terminal
def test_a_finished_training_in_this_process(tiny_main, text_file, tmp_path, monkeypatch, terminal):
    encoding = {"C": "ascii"}.get(terminal, terminal)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    run_program(lambda: tiny_main("enwik8")(["--data", str(text_file), "--out", str(tmp_path / "läufe 中")]))
    sys.stdout.flush()
    written = sys.stdout.buffer.getvalue().decode(encoding)
    assert "for more: scratchformer generate" in written and "?" in written


def test_translate(shown, translate_run, combinations):
    """Sentences from the command line and standard input are read as UTF-8, whatever the terminal."""
    run = translate_run.folder
    for drawn in combinations(1, terminal=TERMINALS):
        typed = shown(drawn["terminal"], "scratchformer", "translate", run, "a dog sees äpfel 中", "--device", "cpu")
        assert typed.endswith("\n")
    sentence = run / "sentences.txt"
    sentence.write_bytes("a dog sees äpfel 中\n".encode())
    with open(sentence) as lines:
        assert shown("C", "scratchformer", "translate", run, "--device", "cpu", stdin=lines) == typed
    sentence.unlink()

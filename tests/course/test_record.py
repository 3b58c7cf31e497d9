"""The file of the progress: several commands at once, and a damaged file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scratchformer.commands.cli import main
from scratchformer.course.course import NAMES
from scratchformer.course.record import find

ROOT = Path(__file__).parents[2]
COMMANDS = """
import os, sys
from scratchformer.commands.cli import main
os.read(0, 1)
for name in sys.argv[1:]:
    main(["learn", "start", name])
    main(["learn", "hint", name])
    main(["learn", "hint", "chain_rule"]) if name != "chain_rule" else None
"""


def test_commands_at_the_same_time_lose_nothing(tmp_path):
    """Each process waits for a line, so that all begin together."""
    main(["learn", "--dir", str(tmp_path / "exercises"), "start", "chain_rule"])
    groups = [NAMES[i:15:3] for i in range(3)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", COMMANDS, *group], cwd=tmp_path, env=env, **pipes) for group in groups
    ]
    try:
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
            process.wait()
    progress = find(str(tmp_path / "exercises"))
    assert {name: progress.of(name).hints for name in NAMES[:15]} == {
        name: 3 if name == "chain_rule" else 1 for name in NAMES[:15]
    }
    assert {path.name for path in (tmp_path / "exercises").iterdir()} == {
        "progress.json",
        "run.lock",
        *(f"{n}.py" for n in NAMES[:15]),
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"softmax": 1}'])
def test_a_file_that_cannot_be_read(text, tmp_path, monkeypatch):
    """The command says so, and does not change the file."""
    monkeypatch.chdir(tmp_path)
    main(["learn", "start", "softmax"])
    path = Path("exercises", "progress.json")
    path.write_text(text)
    for words in ["start", "relu"], ["hint", "softmax"], ["reset"]:
        with pytest.raises(SystemExit, match=r"progress\.json.*Your progress cannot be read: repair this file"):
            main(["learn", *words])
        assert path.read_text() == text
    assert not Path("exercises/relu.py").exists() and not Path("exercises/softmax.old1").exists()

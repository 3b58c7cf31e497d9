"""The file of the progress: several commands at once, a full disk, and values that cannot be right."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from scratchformer.commands.cli import main
from scratchformer.course.course import NAMES, exercise
from scratchformer.course.record import find

resource = pytest.importorskip("resource")
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
        *(f"{n}.py" for n in NAMES[:15]),
    }


@contextmanager
def full_disk(most):
    """No file can become larger than this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def learn(*words):
    """The message of an error, or ""."""
    try:
        main(["learn", *words])
    except SystemExit as end:
        return str(end.code)
    return ""


@pytest.mark.parametrize("most", [0, 10])
@pytest.mark.parametrize(
    "words", [("start", "relu"), ("reset", "softmax"), ("hint", "softmax"), ("solution", "softmax")]
)
def test_a_full_disk_leaves_no_cut_file_and_loses_nothing(most, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "exercises"
    learn("start", "softmax")
    learn("hint", "softmax")
    (folder / "softmax.py").write_text(exercise("softmax").solution, encoding="utf-8")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with full_disk(most):
        assert "File too large" in learn(*words)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"softmax": 1}', "softmax: expected an object {...}, got 1"),
        ('{"softmax": {"passed": "no"}}', "softmax: passed: expected true or false, got 'no'"),
        ('{"softmax": {"passed": 1}}', "softmax: passed: expected true or false, got 1"),
        ('{"softmax": {"solution": null}}', "softmax: solution: expected true or false, got None"),
        ('{"softmax": {"hints": true}}', "softmax: hints: expected a number from 0 to 3, got True"),
        ('{"softmax": {"hints": -1}}', "softmax: hints: expected a number from 0 to 3, got -1"),
        ('{"softmax": {"hints": 1e400}}', "softmax: hints: expected a number from 0 to 3, got inf"),
        ('{"softmax": {"hints": "\\u001b[31m2"}}', r"hints: expected a number from 0 to 3, got '\x1b[31m2'"),
        (
            '{"softmax": {"hints": ' + "9" * 3000 + "}}",
            "softmax: hints: expected a number from 0 to 3, got a number of",
        ),
        ('{"softmax": {"hints": 1}, "softmax": {"hints": 2}}', "two values for 'softmax'"),
    ],
)
def test_values_that_cannot_be_right(text, says, tmp_path, monkeypatch):
    """Every command says so, and none changes the file."""
    monkeypatch.chdir(tmp_path)
    learn("start", "softmax")
    path = Path("exercises", "progress.json")
    path.write_text(text)
    for words in (
        (),
        ("start", "relu"),
        ("check", "softmax"),
        ("hint", "softmax"),
        ("solution",),
        ("reset",),
        ("watch",),
    ):
        said = learn(*words)
        assert says in said and "Your progress cannot be read: repair this file, or move it away" in said
        assert path.read_text() == text
    assert not Path("exercises/relu.py").exists() and not Path("exercises/softmax.old1").exists()


def test_what_a_later_version_notes_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn("start", "softmax")
    later = {"softmax": {"hints": 1, "minutes": 12}, "relu": {}, "new_exercise": {"passed": "twice"}, "version": 2}
    Path("exercises/progress.json").write_text(json.dumps(later))
    learn("hint", "softmax")
    found = json.loads(Path("exercises/progress.json").read_text())
    assert found["softmax"] == {"hints": 2, "minutes": 12, "passed": False, "solution": False}
    assert found["new_exercise"] == {"passed": "twice"} and found["version"] == 2


def test_a_damaged_file_is_not_written_by_a_check_that_passes(tmp_path, monkeypatch):
    """It may be damaged while the check runs."""
    monkeypatch.chdir(tmp_path)
    learn("start", "softmax")
    Path("exercises/softmax.py").write_text(exercise("softmax").solution, encoding="utf-8")
    damaged = Path("exercises/progress.json")
    monkeypatch.setattr("scratchformer.course.child.grade_apart", lambda *_: (damaged.write_text("{"), passed())[1])
    assert "cannot be read" in learn("check")
    assert damaged.read_text() == "{"


def passed():
    from scratchformer.course.grading import Verdict

    return Verdict(True, "")

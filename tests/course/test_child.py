"""An answer that does not come to an end gets a verdict too, and the terminal does not suffer."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scratchformer.course import child
from scratchformer.course.course import exercise
from scratchformer.shell import apart

RIGHT = "    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))\n"


@pytest.fixture
def answer(tmp_path):
    """answer("a line", "another"): writes a right answer to softmax, with these lines before it; returns its path."""

    def write(*lines):
        path = tmp_path / "exercises" / "softmax.py"
        path.parent.mkdir(exist_ok=True)
        solution = exercise("softmax").solution
        assert solution.count(RIGHT) == 1
        path.write_text(solution.replace(RIGHT, "".join(f"    {line}\n" for line in lines) + RIGHT), encoding="utf-8")
        return path

    return write


def verdict(path, show=lambda text: None):
    return child.grade_apart("softmax", path, show)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("import os", "os._exit(0)"), "did not finish its check: it ended with status 0"),
        (("import sys", "sys.exit(0)"), r"line 23: sys.exit\(0\)\n    SystemExit: 0"),
        (("raise KeyboardInterrupt",), "line 22: raise KeyboardInterrupt\n    KeyboardInterrupt"),
        (("input()",), r"line 22: input\(\)\n    EOFError"),
        (("np.empty(1 << 40)",), r"line 22: .*\n    .*MemoryError: Unable to allocate"),
    ],
)
def test_an_answer_that_breaks_its_check_is_told_so(lines, says, answer):
    found = verdict(answer(*lines))
    assert not found.passed and re.search(says, found.message), found.message


@pytest.mark.parametrize(
    "lines",
    [
        ("while True: pass",),
        ("import time", "time.sleep(1000)"),
        ("import time", "while True:", "    try: time.sleep(1000)", "    except: pass"),
        ("import itertools", "sum(itertools.count())"),  # C code, which a signal handler would not end
    ],
)
def test_an_answer_that_never_ends_is_stopped(lines, answer, monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 1.0)
    monkeypatch.setattr(child, "GRACE", 0.5)
    found = verdict(answer(*lines))
    assert not found.passed
    assert re.search(r"After 1 seconds the answer was still running. Does a loop in it never end\?$", found.message)


def test_the_line_that_never_ends_is_named(answer, monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 1.0)
    for at in (answer("while True: pass"), answer("for i in iter(int, 1): pass")):
        assert re.match("line 22: (while|for) .*: pass\n    After 1 seconds", verdict(at).message)


def test_prints_are_shown_up_to_a_limit(answer):
    shown = []
    assert verdict(answer("print('seen', dy.shape)"), shown.append).passed
    assert "".join(shown).startswith("seen (3, 4)\n")
    shown = []
    assert verdict(answer("print('x' * 100_000)"), shown.append).passed
    assert "".join(shown).startswith("x" * 1000) and "".join(shown).endswith("prints more than is shown here)\n")
    assert len("".join(shown)) < child.PRINTED + 100


def test_systems_without_fork(answer, monkeypatch, tmp_path):
    for name in "multiprocessing", "numpy", "json":
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(apart, "METHOD", "spawn")
    shown = []
    assert verdict(answer("print('seen')"), shown.append).passed and "seen" in "".join(shown)
    assert "status 0" in verdict(answer("import os", "os._exit(0)")).message
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_an_answer_that_never_ends(answer):
    path = answer("print('begun')", "import time", "while True: time.sleep(1)")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "scratchformer", "learn", "--dir", str(path.parent), "check", "softmax"]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""  # its end: no process has it open any more
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_nothing_that_an_answer_starts_goes_on(answer, tmp_path):
    started = tmp_path / "pid"
    code = f"import os, time; open({str(started)!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(1000)"
    wait = f"while not os.path.exists({str(started)!r}): pass"
    assert verdict(
        answer("import os, subprocess, sys", f"subprocess.Popen([sys.executable, '-c', {code!r}])", wait)
    ).passed
    for pid in map(int, started.read_text().split()):
        deadline = time.monotonic() + 30
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_verdict_is_valid_json_whatever_is_printed(answer):
    shown = []
    assert verdict(answer(r"print('\ud800 [red] \x1b[31m é')"), shown.append).passed
    assert json.dumps("".join(shown))

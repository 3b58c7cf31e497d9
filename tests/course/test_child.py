"""Whatever an answer does, it gets a verdict, and neither the progress nor the terminal suffers."""

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
    "lines",
    [
        ("import os", "os.chdir('/')"),
        ("import sys", "sys.stdout.close(); sys.stderr.close()"),
        ("import os", "for i in range(3): os.dup2(os.open(os.devnull, os.O_RDONLY), i)"),
        ("import sys", "sys.setrecursionlimit(10**6)"),
        ("import threading, time", "threading.Thread(target=time.sleep, args=(1000,)).start()"),
        ("import atexit, os", "atexit.register(os._exit, 1)"),
        ("import subprocess, sys", "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"),
        ("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        ("np.seterr(all='raise')",),
        ("np.random.seed(0)",),
    ],
)
def test_a_right_answer_is_right_whatever_it_does_besides(lines, answer):
    before = os.getcwd()
    found = verdict(answer(*lines))
    assert found.passed, found.message
    assert os.getcwd() == before


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ("import os", "os._exit(0)"),
            r"ended the program \(exit status 0\) before the check was done: take out os._exit",
        ),
        (("import os", "os.kill(os.getpid(), 9)"), r"Python crashed in the answer \(SIGKILL\)"),
        (("import os", "os.closerange(0, 1000); os._exit(3)"), r"ended the program \(exit status \d\)"),
        (("import sys", "sys.exit(0)"), r"line 23: sys.exit\(0\)\n    SystemExit: 0"),
        (("raise KeyboardInterrupt",), "line 22: raise KeyboardInterrupt\n    KeyboardInterrupt"),
        (("import os", "os.fork()"), "line 23: .*\n    PermissionError: an answer must not start another process"),
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


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_is_stopped_is_ended(answer, monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 1.0)
    monkeypatch.setattr(child, "GRACE", 0.5)
    assert "still running" in verdict(answer("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)")).message


def test_prints_are_shown_up_to_a_limit(answer):
    shown = []
    assert verdict(answer("print('seen', dy.shape)"), shown.append).passed
    assert "".join(shown).startswith("seen (3, 4)\n")
    shown = []
    assert verdict(answer("print('x' * 100_000)"), shown.append).passed
    assert "".join(shown).startswith("x" * 1000) and "".join(shown).endswith("prints more than is shown here)\n")
    assert len("".join(shown)) < child.PRINTED + 100


@pytest.mark.parametrize(
    "line",
    [
        "os.remove('{}')",
        "open('{}', 'w')",
        "open('{}', 'r+')",
        "os.truncate('{}', 1)",
        "os.rename('{}', '{}.old')",
        "os.replace(__file__, '{}')",
        "os.unlink(b'{}')",
        "__import__('shutil').rmtree(os.path.dirname('{}'))",
        "__import__('pathlib').Path('{}').write_text('')",
        "os.open('{}', os.O_WRONLY | os.O_TRUNC)",
        "os.chdir(os.path.dirname('{}')); open('progress.json', 'a')",
    ],
)
def test_an_answer_cannot_change_the_progress(line, answer):
    path = answer("import os", line.replace("{}", "PROGRESS"))
    progress = path.parent / "progress.json"
    path.write_text(path.read_text(encoding="utf-8").replace("PROGRESS", str(progress)), encoding="utf-8")
    progress.write_text('{"relu": {"passed": true}}')
    found = verdict(path)
    assert "must not change files in the folder of the exercises" in found.message
    assert progress.read_text() == '{"relu": {"passed": true}}' and path.exists()


def test_an_answer_may_write_elsewhere(answer, tmp_path):
    assert verdict(answer(f"np.save({str(tmp_path / 'dy.npy')!r}, dy)")).passed
    assert (tmp_path / "dy.npy").exists()


def test_systems_without_fork(answer, monkeypatch, tmp_path):
    for name in "multiprocessing", "numpy", "json":
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(apart, "METHOD", "spawn")
    shown = []
    assert verdict(answer("print('seen')"), shown.append).passed and "seen" in "".join(shown)
    assert "exit status 0" in verdict(answer("import os", "os._exit(0)")).message
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

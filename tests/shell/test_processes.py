"""What `conftest.py` promises: no test leaves a process running, and signals act however pytest was started."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PATIENCE = 600
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are listed as Linux does it")

# A program that ignores signals, as a shell's background job and nohup do, and then becomes pytest.
IGNORING = """
import os, signal, sys
for name in "SIGINT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGCHLD", "SIGALRM":
    signal.signal(getattr(signal, name), signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""

# Tests that start a process like a daemon, in a session of its own, whose parent ends.
LEAVING = """
import subprocess, sys, time
from pathlib import Path
import conftest

conftest.SECONDS = 1
ENDLESS = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n print(os.getpid(), flush=True)\\n time.sleep(600)"

def leave(name):
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True) as process:
        Path(f"left-{name}").write_text(process.stdout.readline())
        process.stdout.close()

def test_passes(guard):
    leave("passes")

def test_fails(guard):
    leave("fails")
    assert 1 > 2

def test_waits(guard):
    leave("waits")
    Path("ready").touch()
    time.sleep(600)
"""


def environment():
    """Without what belongs to this process of pytest-xdist."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]), "PYTEST_ADDOPTS": ""}


@pytest.fixture
def start(tmp_path):
    """start("test_fails"): a process of pytest that runs these tests of LEAVING."""
    (tmp_path / "test_leaving.py").write_text(LEAVING)

    def start(*names):
        options = ["-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", "."]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "pytest", *options, *(f"test_leaving.py::{name}" for name in names)]
        return subprocess.Popen(command, cwd=tmp_path, env=environment(), **streams)

    return start


def runs(process):
    """Whether a process runs: no longer if its end only has not been noticed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left(folder):
    return [path.read_text().strip() for path in folder.glob("left-*")]


def test_a_process_that_a_test_leaves_is_killed(start, tmp_path):
    """If the test passes, that is an error."""
    told, _ = start("test_passes", "test_fails").communicate(timeout=PATIENCE)
    assert "1 failed, 1 passed, 1 error" in told and "left running by the test: [" in told, told
    assert len(left(tmp_path)) == 2 and not any(map(runs, left(tmp_path)))


def test_a_process_is_killed_with_pytest_itself(start, tmp_path):
    process, deadline = start("test_waits"), time.monotonic() + PATIENCE
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    (number,) = left(tmp_path)
    while runs(number):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_a_test_starts_heeds_all_signals():
    code = "import signal; print({s.name for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(told) == {"SIGPIPE", "SIGXFSZ"}  # as Python sets them


def test_tests_of_signals_pass_where_signals_are_ignored():
    """Those that send a signal to their own process, and the one above, for all that start another."""
    found = [f"{__file__}::test_a_process_that_a_test_starts_heeds_all_signals"]
    for path in {*HERE.rglob("test_*.py")} - {Path(__file__)}:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "signal" in text else ():
            source = ast.get_source_segment(text, node) if isinstance(node, ast.FunctionDef) else ""
            if source.startswith("def test_") and re.search(r"raise_signal|os\.kill\(os\.getpid\(\)", source):
                found.append(f"{path}::{node.name}")
    assert len(found) > 7
    command = [sys.executable, "-c", IGNORING, "-p", "no:cacheprovider", "-p", "no:xdist", *found]
    told = subprocess.run(command, cwd=HERE.parent, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert re.search(r"^\d+ passed", told.stdout, re.M), told.stdout + told.stderr

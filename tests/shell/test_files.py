"""Locking folders and appending lines; replacing files is tested with snapshots."""

import errno
import subprocess
import sys

import pytest

from scratchformer.shell import files
from scratchformer.shell.files import LOCK, InUse, locked

HOLD = """
import sys, time
from pathlib import Path
from scratchformer.shell.files import LOCK, InUse, locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder `run`."""
    command = [sys.executable, "-c", HOLD, tmp_path / "run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_killed_process_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with locked(tmp_path / "run"):
        pass


def test_another_process_is_refused_and_the_folder_unchanged(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(InUse, match="run is in use by another process"), locked(tmp_path / "run"):
            pass
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.communicate("")
    with locked(tmp_path / "run"), pytest.raises(InUse), locked(tmp_path / "run"):
        pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", fail)
    with pytest.warns(UserWarning, match=r"cannot be locked: .*No locks available"), locked(tmp_path / "run"):
        pass

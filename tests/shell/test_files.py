"""Locking folders and appending lines; replacing files is tested with snapshots."""

import builtins
import errno
import os
import re
import subprocess
import sys

import pytest

from scratchformer.shell import files
from scratchformer.shell.files import LOCK, InUse, append, locked

HOLD = """
import sys, time
from pathlib import Path
from scratchformer.shell.files import locked
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


def test_a_lock_leaves_no_trace_in_the_folder(tmp_path):
    (tmp_path / "file").write_text("here")
    for _ in range(2):
        with locked(tmp_path):
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", LOCK])
            assert re.match(rf"process {os.getpid()} on ", (tmp_path / LOCK).read_text())
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_new_folder_stays_if_it_is_not_empty(tmp_path):
    for name in "empty", "full":
        with locked(tmp_path / "new" / name):
            (tmp_path / "new" / name / "file").write_text("here")
            if name == "empty":
                (tmp_path / "new" / name / "file").unlink()
        assert (tmp_path / "new").exists() == (tmp_path / "new" / name).exists() == (name == "full")


def test_another_process_is_named(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(InUse, match=rf"run is in use by process {holder.pid} on \S+, since 20\d\d-"):
            with locked(tmp_path / "run"):
                pass
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.communicate("")
    with locked(tmp_path / "run"):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with locked(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run" / LOCK).read_text()
        assert str(holder.pid) not in (tmp_path / "run" / LOCK).read_text()
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no file that is open")
def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    """The other process ends after this one opens the lock file and before it locks it."""
    lock, calls = files._lock, []

    def end_before(file):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(file)
        lock(file)

    monkeypatch.setattr(files, "_lock", end_before)
    with locked(tmp_path):
        assert len(calls) == 2 and (tmp_path / LOCK).exists()
        with pytest.raises(InUse), locked(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", fail)
    with pytest.warns(UserWarning, match=r"cannot be locked: .*No locks available"), locked(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_file_and_leaves_none(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "open", lambda *args, **options: Full(builtins.open(*args, **options)), raising=False)
    with pytest.raises(OSError, match=f"No space left on device: .*{LOCK}"), locked(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        append(tmp_path / "metrics.jsonl", "{}")

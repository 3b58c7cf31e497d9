"""The disk is full at any one write: the same command again, or --resume, gives the same run."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from scratchformer.data import subwords, vocabulary
from scratchformer.shell import files
from scratchformer.training import load_snapshot, metrics, run, settings, snapshot

MODULES = (subwords, vocabulary, metrics, run, settings, snapshot)


@pytest.fixture
def disk(monkeypatch):
    """disk.full_at(n): the n-th write from now fails; disk.writes counts the writes."""

    class Disk:
        full, writes = 0, 0

        def full_at(self, n):
            self.full, self.writes = n, 0

        def write(self, whole, path, *args):
            self.writes += 1
            if self.writes == self.full:
                raise OSError(28, "No space left on device", str(path))
            return whole(path, *args)

    disk = Disk()
    for name in "replacing", "append":
        for module in MODULES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, partial(disk.write, getattr(files, name)))
    return disk


def content(folder, name):
    """The tensors of a run's snapshots and its other files, except the metrics, which have the speed. BERT's sub-words
    differ each time they are learned, and so does all else: for its runs, the names of files, and the steps.
    """
    snapshots = {path.relative_to(folder): load_snapshot(path) for path in folder.rglob("*.safetensors")}
    readers = {".jsonl": lambda path: None, ".json": lambda path: json.loads(path.read_bytes())}
    found = {p.relative_to(folder): readers.get(p.suffix, Path.read_bytes)(p) for p in folder.rglob("*.*")}
    if name == "bert":
        return sorted(found), {path: snapshot.state["step"] for path, snapshot in snapshots.items()}
    tensors = {
        path: {name: a.tobytes() for part in (snapshot.model, snapshot.optimizer) for name, a in part.items()}
        for path, snapshot in snapshots.items()
    }
    return found | tensors


@pytest.mark.parametrize("name", ["enwik8", "imdb", "bert"])
def test_a_disk_that_is_full_at_any_write(tiny_main, disk, text_file, reviews_folder, tmp_path, name):
    main, data = tiny_main(name), str(text_file if name == "enwik8" else reviews_folder)
    command = ["--out", str(tmp_path / "run"), "--data", data]
    main(command)
    writes = disk.writes
    expected = content(tmp_path / "run", name)
    shutil.rmtree(tmp_path / "run")
    again = resumed = 0
    for n in range(1, writes + 1) if name != "bert" else (2, 3, 12):  # its stages save alike
        disk.full_at(n)
        with pytest.raises((OSError, snapshot.SnapshotError), match="No space left on device"):
            main(command)
        disk.full_at(0)
        try:
            main(command)
            again += 1
        except ValueError as error:
            assert "holds a run: continue it with --resume" in str(error)
            main(["--resume", str(tmp_path / "run")])
            resumed += 1
        assert content(tmp_path / "run", name) == expected
        shutil.rmtree(tmp_path / "run")
    assert again and resumed

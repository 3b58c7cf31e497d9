"""Power cuts: what may be on the disk after a power cut at any moment of a run.

A tiny run, stopped once and resumed, is recorded: the bytes of all files before every call that flushes, renames or
deletes. Until a file is flushed, the disk may have any part of what was written to it, or zeros. Until a folder is
flushed, the disk may have any of the changes to its names. From every state that is possible by these rules, it must be
possible to resume the run, or to start it again if it has no settings yet. It must then end bit for bit like the run
without a power cut.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from area import Area, Case
from folders import quiet

from scratchformer.data import TextBatches, Vocabulary
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine
from scratchformer.shell.process import run_program
from scratchformer.training import Replicas, Run, evaluate_language_model, load_corpus, load_snapshot, read_metrics
from scratchformer.training.start import run_main

STEPS = 8
# The program of the run: a tiny language model, with a vocabulary, so that there are files of every kind.
PRESETS = {"small": dict(d_model=8, heads=2, depth=1, context=8, batch_size=2, lr=1e-2, warmup=2, steps=STEPS)}
evaluations_to_go = -1  # the number of evaluations before the run stops; -1: it never stops


def data(run: Run) -> Any:
    corpus = load_corpus(run)
    words = run.saved_vocabulary(Vocabulary) or Vocabulary.build(["one two three two"], 5)
    return SimpleNamespace(**corpus._asdict(), fingerprint=corpus.fingerprint, vocabulary=words)


def model(run: Run, _corpus: Any) -> LanguageModel:
    return LanguageModel(256, key=run.key("weights"), **run.sizes("d_model", "heads", "depth", "context"))


def score(_run: Run, replicas: Replicas, corpus: Any, part: str) -> dict[str, float]:
    global evaluations_to_go
    if evaluations_to_go == 0:
        raise Stopped
    evaluations_to_go -= 1
    return evaluate_language_model(replicas, getattr(corpus, part)[:20])


def main(run: Run) -> None:
    corpus = run.load(data)
    batches = TextBatches(corpus.train, run.batch_size, run.context, run.key("batches"))
    with run.replicas(model(run, corpus), batches) as replicas:
        adam = Adam(replicas.model.parameters(), run.lr)
        rate = Cosine(run.lr, run.warmup, run.total, run.lr / 10)
        for step in run.steps(replicas, adam, batches, keep=2, snapshot_every=2, log_every=1):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(3):
                run.keep_best(score(run, replicas, corpus, "validation"))
        run.load_best()
        score(run, replicas, corpus, "test")


class Stopped(Exception):
    """Stops a run in the middle."""


class Call(NamedTuple):
    """A call that flushes or changes names, and the bytes of all files just before it, by their inode."""

    name: str  # "flush", "rename", "unlink", "mkdir", "rmdir", "create" or "end"
    paths: tuple[str, ...]  # relative to the parent of the run's folder
    inode: int  # of the file that is flushed or named
    files: dict[int, bytes]


class Power(Area):
    name = "power"

    def prepare(self, folder: Path) -> None:
        global evaluations_to_go
        self.text = folder / "text.txt"
        self.text.write_bytes(bytes(random.Random(0).choices(b"abcdefgh \n", k=3000)))
        self.whole, self.calls = folder / "disk" / "runs" / "run", []
        (folder / "disk").mkdir()
        with quiet():
            with recorded(folder / "disk", self.calls):
                evaluations_to_go = 1
                with suppress(Stopped):
                    self.train(self.whole)
                evaluations_to_go = -1
                self.train(self.whole, "--resume", str(self.whole))
            shutil.rmtree(self.whole)
            self.train(self.whole)

    def train(self, run: Path, *options: str) -> None:
        new = ("--data", str(self.text), "--out", str(run), "--replicas", "1")
        run_main(main, [*(options or new), "--device", "cpu"])

    def case(self, draw: random.Random, folder: Path) -> Case:
        end = draw.randrange(1, len(self.calls))
        disk = folder / "disk"
        disk.mkdir()
        build(draw, self.calls[: end + 1], disk)
        call = self.calls[end]
        run = disk / "runs" / "run"

        def go_on() -> None:
            """What a user does: resume the run, or start it again if there is none."""
            if (run / "settings.json").exists():
                run_program(lambda: self.train(run, "--resume", str(run)))
            else:
                run_program(lambda: self.train(run))

        what = f"power cut before call {end} of {len(self.calls)}, {call.name} {' '.join(call.paths)}"
        return Case(what, go_on, "accepted", check=lambda _: next(differences(run, self.whole), None))


@contextmanager
def recorded(disk: Path, calls: list[Call]) -> Iterator[None]:
    """Record in `calls` every call of this process that flushes something below `disk` or changes names there."""
    before = {name: getattr(os, name) for name in ("fsync", "replace", "unlink", "mkdir", "rmdir")}
    number: dict[int, int] = {}  # inodes are used again once a file is deleted, so each file gets a number of its own
    names: dict[str, int] = {}

    def scan() -> dict[int, bytes]:
        """The bytes of all files; new names are recorded as created."""
        files = {}
        for path in sorted(disk.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(disk))
                if name not in names:
                    names[name] = len(number)
                    number[len(number)] = 0
                    calls.append(Call("create", (name,), names[name], dict(files)))
                files[names[name]] = path.read_bytes()
        return files

    def note(call: str, *paths: Any) -> None:
        relative = tuple(os.path.relpath(os.fspath(path), disk) for path in paths)
        if any(path.startswith("..") for path in relative):
            return
        files = scan()
        calls.append(Call(call, relative, names.get(relative[0], -1), files))
        if call == "rename":
            names[relative[1]] = names.pop(relative[0])
        elif call == "unlink":
            names.pop(relative[0], None)

    def fsync(descriptor: int) -> None:
        note("flush", os.readlink(f"/proc/self/fd/{descriptor}"))
        before["fsync"](descriptor)

    def replace(source: Any, target: Any, **options: Any) -> None:
        note("rename", source, target)
        before["replace"](source, target, **options)

    def changed(name: str, call: str) -> Callable[..., None]:
        def change(path: Any, *args: Any, **options: Any) -> None:
            if call != "rmdir" or not any(Path(path).iterdir()):  # otherwise it fails
                note(call, path)
            before[name](path, *args, **options)

        return change

    try:
        os.fsync, os.replace = fsync, replace
        os.unlink, os.mkdir, os.rmdir = (
            changed("unlink", "unlink"),
            changed("mkdir", "mkdir"),
            changed("rmdir", "rmdir"),
        )
        yield
        note("end", disk)
    finally:
        for name, function in before.items():
            setattr(os, name, function)


def build(draw: random.Random, calls: list[Call], disk: Path) -> None:
    """Make in `disk` what a disk may have if the power fails just before the last of these calls."""
    flushed: dict[int, bytes] = {}  # the flushed bytes of each file
    names: dict[str, int] = {}  # the names on the disk and their inodes; -1 is a folder
    waiting: list[Call] = []  # changes of names that were not flushed yet
    for call in calls[:-1]:
        if call.name == "flush" and call.inode >= 0:
            flushed[call.inode] = call.files[call.inode]
        elif call.name == "flush":
            own = [one for one in waiting if os.path.dirname(one.paths[-1]) == call.paths[0].removeprefix(".")]
            for one in own:
                change(names, one)
                waiting.remove(one)
        else:
            waiting.append(call)
    kind = draw.choice(["none", "all", "some", "some", "first"])
    first = draw.randrange(len(waiting) + 1)
    for i, one in enumerate(waiting):
        if kind == "all" or (kind == "some" and draw.random() < 0.5) or (kind == "first" and i < first):
            change(names, one)
    written = calls[-1].files
    for name, inode in sorted(names.items()):
        path = disk / name
        if inode == -1:
            path.mkdir(parents=True, exist_ok=True)
    for name, inode in sorted(names.items()):
        path = disk / name
        if inode >= 0 and path.parent.is_dir():
            path.write_bytes(partly(draw, flushed.get(inode, b""), written.get(inode, flushed.get(inode, b""))))


def change(names: dict[str, int], call: Call) -> None:
    """Change names as a call does, if it still applies."""
    if call.name == "mkdir":
        names[call.paths[0]] = -1
    elif call.name == "create":
        names[call.paths[0]] = call.inode
    elif call.name == "rename":
        names.pop(call.paths[0], None)
        names[call.paths[1]] = call.inode
    elif call.name in ("unlink", "rmdir"):
        names.pop(call.paths[0], None)


def partly(draw: random.Random, old: bytes, new: bytes) -> bytes:
    """What the disk may have of a file that had the bytes `old` when it was flushed, and has since grown to `new`."""
    if old == new:
        return new
    length = draw.randint(len(old), len(new)) if len(new) > len(old) else len(new)
    kind = draw.choice(["old", "new", "part", "zeros", "holes"])
    if kind == "old":
        return old
    if kind == "new":
        return new
    if kind == "part":
        return new[:length]
    if kind == "zeros":
        return old + bytes(len(new) - len(old))
    hole = draw.randint(len(old), length) if length >= len(old) else 0
    return new[:hole] + bytes(length - hole) + new[length:]


def differences(run: Path, whole: Path) -> Iterator[str]:
    """What differs between two finished runs, apart from the speed in their metrics."""
    found = ({str(path.relative_to(one)) for path in one.rglob("*")} for one in (run, whole))
    names, expected = ({name for name in names if ".unfinished" not in name} for names in found)
    if names != expected:
        yield f"other files: {', '.join(sorted(names ^ expected))}"
    for name in sorted(names & expected):
        if content(run / name) != content(whole / name):
            yield f"{name} differs"


def content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        snapshot = load_snapshot(path)
        tensors = [snapshot.model, snapshot.optimizer, snapshot.batches]
        return snapshot.state, [{name: array.tobytes() for name, array in part.items()} for part in tensors]
    if path.name == "metrics.jsonl":
        return [{name: value for name, value in r.items() if name != "tokens_per_second"} for r in read_metrics(path)]
    if path.name == "settings.json":
        return {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    return path.read_bytes()

"""Runs that are killed at random moments, resumed, killed again, and in the end compared with an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from area import Area, Case, last_line
from runs import command, make_data

from scratchformer.training import load_snapshot, read_metrics

STEPS = 20
MOMENTS = ("time", "line", "write", "write", "end")


class Reference(NamedTuple):
    """An undisturbed run. begun: a copy of its folder from just before the first step. seconds: how long it took."""

    begun: Path
    folder: Path
    seconds: float


class Kills(Area):
    """A run is killed up to four times: at a random time, some milliseconds after a random line of its metrics, while
    it writes a file, or after its last step. After each kill every snapshot is readable; in the end the run has the
    weights, moments, best models, settings and metrics of the undisturbed run, bit for bit.
    """

    name = "kills"
    slow = True
    seconds = 300

    def prepare(self, folder: Path) -> None:
        self.data = make_data(folder)
        self.references = {name: self.undisturbed(name, folder / name) for name in self.data}

    def undisturbed(self, name: str, folder: Path) -> Reference:
        folder.mkdir()
        run, begun, started = folder / "run", folder / "begun", time.monotonic()
        process = self.start(name, run)
        _wait(process, lambda: _files(run, "no-snapshot-yet"))
        process.kill()
        process.wait()
        shutil.copytree(run, begun)
        _finish(self.start(name, run), run)
        return Reference(begun, run, time.monotonic() - started)

    def start(self, name: str, run: Path, **environment: str) -> subprocess.Popen:
        """Start a program in a process of its own. It resumes the run in this folder if there is one."""
        if (run / "settings.json").exists():
            arguments = ["--resume", run]
        else:
            options = ["--data", self.data[name], "--steps", STEPS, "--replicas", 2]
            arguments = ["--out", run, *options]
        with open(run.with_name("output"), "w") as output:
            streams = dict(stdout=output, stderr=output)
            return subprocess.Popen(
                command(name, *arguments, "--device", "cpu"), env=os.environ | environment, **streams
            )

    def case(self, draw: random.Random, folder: Path) -> Case:
        name, run = draw.choice(list(self.data)), folder / "run"
        moments = sorted((draw.choice(MOMENTS) for _ in range(draw.randint(1, 4))), key="end".__eq__)
        reference = self.references[name]
        if name == "bert" or draw.random() < 0.5:  # BERT learns other sub-words every time
            shutil.copytree(reference.begun, run)
        return Case(
            f"{name}, killed at: {', '.join(moments)}",
            lambda: self.kill(name, run, moments, draw),
            expect="accepted",
            check=lambda _: next(differences(run, reference.folder), None),
        )

    def kill(self, name: str, run: Path, moments: list[str], draw: random.Random) -> str:
        """Kill a run at each of these moments, then let it end. Returns what was done, in words."""
        kills: list[str] = []
        for moment in moments:
            if moment == "write":
                kills += self.kill_in_write(name, run, draw)
            else:
                kills += self.kill_at(moment, name, run, draw)
            for path in _files(run, ".safetensors"):
                load_snapshot(path)
        _finish(self.start(name, run), run)
        writes = sum(kill.startswith("writing") for kill in kills)
        return f"{name}: {len(kills)} kills, {writes} of them during a write: {', '.join(kills)}"

    def kill_at(self, moment: str, name: str, run: Path, draw: random.Random) -> list[str]:
        """Kill a program at a moment. Returns what it was doing, in words; nothing if it ended before."""
        reference, process = self.references[name], self.start(name, run)
        total = _lines(reference.folder)
        if moment == "time":
            seconds = draw.uniform(0, reference.seconds)
            end = time.monotonic() + seconds
            reached = _wait(process, lambda: time.monotonic() > end)
            doing = f"{seconds:.2f} s after the start"
        elif moment == "line":
            target = draw.randint(min(_lines(run) + 1, total), total)
            reached = _wait(process, lambda: _lines(run) >= target)
            time.sleep(draw.uniform(0, 0.02))
            doing = f"after line {target} of {total} of the metrics"
        else:
            reached = _wait(process, lambda: _lines(run) >= total)
            time.sleep(draw.uniform(0, 0.3))
            doing = "after the last step"
        process.kill()
        return [doing] if process.wait() == -signal.SIGKILL and reached else []

    def kill_in_write(self, name: str, run: Path, draw: random.Random) -> list[str]:
        """Let a program kill itself while it writes. Returns which file it wrote; nothing if it ended before."""
        death = f"{draw.randint(1, 45)} {int(10 ** draw.uniform(0, 5.3))}"
        process = self.start(name, run, CAMPAIGN_DEATH=death)
        if process.wait() not in (-signal.SIGKILL, -signal.SIGXFSZ):
            return []
        left = [
            f"writing {str(path.relative_to(run)).partition('.unfinished')[0]}, {path.stat().st_size:,} bytes"
            for path in _files(run, "")
            if ".unfinished" in str(path)
        ]
        return left[:1] or ["before a write"]

    def summary(self, messages: list[str]) -> str:
        kills, writes, runs = 0, 0, Counter[str]()
        for message in messages:
            name, *counts = re.match(r"(\w+): (\d+) kills, (\d+)", message).groups()
            kills, writes, runs[name] = kills + int(counts[0]), writes + int(counts[1]), runs[name] + 1
        which = ", ".join(f"{count} {name}" for name, count in runs.items())
        return f"{kills} kills of {len(messages)} runs ({which}), {writes} of them during a write"


def differences(run: Path, reference: Path) -> Iterator[str]:
    """What differs between two finished runs, apart from the speed in their metrics."""
    contents, expected = ({p.relative_to(root): p for p in root.rglob("*")} for root in (run, reference))
    for name in sorted(contents.keys() | expected.keys()):
        if name not in expected:
            yield f"{name} is in the folder of the killed run only"
        elif name not in contents:
            yield f"{name} is missing in the folder of the killed run"
        elif _content(contents[name]) != _content(expected[name]):
            yield f"{name} differs"


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        found = load_snapshot(path)
        parts = [
            {name: (a.dtype, a.shape, a.tobytes()) for name, a in part.items()}
            for part in (found.model, found.optimizer, found.batches)
        ]
        return found.model_class, found.config, found.state, parts
    if path.name == "metrics.jsonl":
        return [{n: value for n, value in record.items() if n != "tokens_per_second"} for record in read_metrics(path)]
    return path.read_bytes() if path.is_file() else None


def _lines(run: Path) -> int:
    """How far a run has come: the number of lines in the metrics of all its stages."""
    return sum(path.read_bytes().count(b"\n") for path in _files(run, "metrics.jsonl"))


def _files(run: Path, ending: str) -> list[Path]:
    """The files below a folder whose names end with `ending`. Files may appear and disappear meanwhile."""
    return [Path(folder, name) for folder, _, names in os.walk(run) for name in names if name.endswith(ending)]


def _finish(process: subprocess.Popen, run: Path) -> None:
    if status := process.wait():
        output = run.with_name("output").read_text(errors="replace")
        raise RuntimeError(f"the program ended with status {status}: {last_line(output)}")


def _wait(process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds. Returns False if the process ends before that."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True

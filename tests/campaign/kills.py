"""Runs that are killed at random moments, continued, and killed again, and then compared with an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from area import Area, Case
from runs import ARGUMENTS, command, make_data

from scratchformer.training import load_snapshot, read_metrics

STEPS = 20
MOMENTS = ("time", "line", "write", "write", "end")


class Reference(NamedTuple):
    """A run that nobody disturbed. begun: its folder just before the first step. seconds: how long it took."""

    begun: Path
    folder: Path
    seconds: float


class Kills(Area):
    """A run is killed up to four times: at a random time, some milliseconds after a random line of its metrics, while it
    writes a file, or after its last step. After each kill every snapshot is readable; in the end the run has the
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
        _wait(process, lambda: any(run.rglob("no-snapshot-yet")))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.copytree(run, begun)
        _finish(self.start(name, run))
        return Reference(begun, run, time.monotonic() - started)

    def start(self, name: str, run: Path) -> subprocess.Popen:
        """Start a program in a process of its own. It resumes the run in this folder if there is one."""
        if (run / "settings.json").exists():
            arguments = ["--resume", run]
        else:
            options = ["--data", self.data[name], "--steps", STEPS, "--replicas", 2, *ARGUMENTS.get(name, [])]
            arguments = ["--out", run, *options]
        with open(run.with_name("output"), "w") as output:
            return subprocess.Popen(
                command(name, *arguments, "--device", "cpu"), stdout=output, stderr=output, start_new_session=True
            )

    def case(self, draw: random.Random, folder: Path) -> Case:
        name, run = draw.choice(list(self.data)), folder / "run"
        moments = [draw.choice(MOMENTS) for _ in range(draw.randint(1, 4))]
        reference = self.references[name]
        if name == "bert" or draw.random() < 0.5:  # BERT's sub-words differ whenever they are learned
            shutil.copytree(reference.begun, run)
        return Case(
            f"{name}, killed at: {', '.join(moments)}",
            lambda: self.kill(name, run, moments, draw),
            expect="accepted",
            check=lambda _: next(differences(run, reference.folder), None),
        )

    def kill(self, name: str, run: Path, moments: list[str], draw: random.Random) -> str:
        """Kill a run at each of these moments, and let it end; returns what was done."""
        kills = []
        for moment in moments:
            process = self.start(name, run)
            try:
                hit = kill_at(moment, process, run, self.references[name], draw)
            finally:
                process.kill()
                process.wait()
            if hit:
                kills.append(hit)
            for path in sorted(run.rglob("*.safetensors")):
                load_snapshot(path)
        _finish(self.start(name, run))
        writes = sum("writing" in kill for kill in kills)
        return f"{len(kills)} kills, {writes} of them during a write: {', '.join(kills)}"

    def summary(self, messages: list[str]) -> str:
        counts = [list(map(int, re.findall(r"\d+", message)[:2])) for message in messages]
        kills, writes = map(sum, zip(*counts, strict=True))
        return f"{kills} kills in {len(messages)} runs, {writes} of them during a write"


def kill_at(moment: str, process: subprocess.Popen, run: Path, reference: Reference, draw: random.Random) -> str:
    """Kill a process at a moment; returns what it was doing, or "" if it ended before that."""
    total = _lines(reference.folder)
    target = draw.randint(min(_lines(run), total - 1), total - 1)
    if moment == "time":
        seconds = draw.uniform(0, reference.seconds)
        end = time.monotonic() + seconds
        reached = _wait(process, lambda: time.monotonic() > end)
        doing = f"{seconds:.2f} s after the start"
    elif moment == "line":
        reached = _wait(process, lambda: _lines(run) > target)
        time.sleep(draw.uniform(0, 0.02))
        doing = f"after line {target + 1} of {total} of the metrics"
    elif moment == "write":
        reached = _wait(process, lambda: _lines(run) >= target) and _wait(process, lambda: _stopped_in_write(process, run))
        doing = f"writing {', '.join(path.stem for path in run.rglob('*.unfinished'))}"
    else:
        reached = _wait(process, lambda: _lines(run) >= total)
        time.sleep(draw.uniform(0, 0.3))
        doing = "after the last step"
    process.kill()
    return doing if reached and process.wait() == -signal.SIGKILL else ""


def differences(run: Path, reference: Path) -> Iterator[str]:
    """What differs between two runs, except for the speed in their metrics and the checksums of lines and files."""
    names, expected = ({p.relative_to(r) for r in [root] for p in r.rglob("*") if p.is_file()} for root in (run, reference))
    if names != expected:
        yield f"other files: {', '.join(map(str, sorted(names ^ expected)))}"
    for name in sorted(names & expected):
        one, other = read(run / name), read(reference / name)
        if one != other:
            yield f"{name} differs"

"""Runs of several ranks, of which one is killed or stopped at a random moment. They end, are resumed on another number
of ranks, and in the end are compared with an undisturbed run of one process.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from area import Case
from kills import STEPS, Kills, _files, _finish, _lines, _wait, differences
from runs import command

from scratchformer.training import load_snapshot

MPIEXEC = Path(sys.executable).with_name("mpiexec")
IN_TIME = 30  # seconds in which all ranks end


class LostRanks(Kills):
    """One of two to four ranks is killed (SIGKILL), or stopped (SIGSTOP), up to three times in a run. All ranks end in
    time, and a message names the rank. Every snapshot is readable. After each time the run goes on with another number
    of ranks; in the end it has what the undisturbed run has, bit for bit.
    """

    name = "ranks"
    only_when_named = True  # it needs mpi4py and mpiexec
    seconds = 600

    def prepare(self, folder: Path) -> None:
        if importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists():
            sys.exit("ranks: mpi4py or mpiexec is not installed: pip install 'scratchformer[distributed]'")
        super().prepare(folder)

    def start_ranks(self, name: str, run: Path, size: int) -> subprocess.Popen:
        options = ["--data", self.data[name], "--steps", STEPS, "--replicas", 2]
        arguments = ["--resume", run] if (run / "settings.json").exists() else ["--out", run, *options]
        launcher = [MPIEXEC, "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
        with open(run.with_name("output"), "w") as output:
            streams = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
            own = command(name, *arguments, "--device", "cpu")
            return subprocess.Popen([*launcher, *own], process_group=0, **streams)

    def case(self, draw: random.Random, folder: Path) -> Case:
        name, run = draw.choice(list(self.data)), folder / "run"
        faults = draw.choices(["SIGKILL", "SIGSTOP"], [3, 1], k=draw.randint(1, 3))
        reference = self.references[name]
        if name == "bert" or draw.random() < 0.5:  # BERT learns other sub-words every time
            shutil.copytree(reference.begun, run)
        return Case(
            f"{name}: {', '.join(faults)}",
            lambda: self.lose(name, run, faults, draw),
            expect="accepted",
            check=lambda _: next(differences(run, reference.folder), None),
        )

    def lose(self, name: str, run: Path, faults: list[str], draw: random.Random) -> str:
        """Lose a rank in each of these ways, then let the run end. Returns what was done, in words."""
        size, told = draw.choice([2, 2, 3, 4]), []
        for fault in faults:
            told.append(self.lose_one(name, run, size, fault, draw))
            for path in _files(run, ".safetensors"):
                load_snapshot(path)
            size = draw.choice([other for other in (1, 2, 3, 4) if other != size])
            if size == 1:
                break
        _finish(self.start_ranks(name, run, size), run)
        return f"{name}: {'; '.join(told)}; ended on {size}"

    def lose_one(self, name: str, run: Path, size: int, fault: str, draw: random.Random) -> str:
        process, begun = self.start_ranks(name, run, size), time.monotonic()
        total, victim = _lines(self.references[name].folder), draw.randrange(size)
        if draw.random() < 0.4:
            seconds = draw.uniform(0.2, 1.5 * self.references[name].seconds)
            reached, when = (
                _wait(process, lambda: time.monotonic() > begun + seconds),
                f"{seconds:.1f} s after the start",
            )
        else:
            line = draw.randint(min(_lines(run) + 1, total), total)
            reached = _wait(process, lambda: _lines(run) >= line)
            time.sleep(draw.uniform(0, 0.05))
            when = f"after line {line} of {total}"
        if not (reached and _wait(process, lambda: victim in ranks_of(process.pid))):
            _finish(process, run)
            return "it ended before that"
        os.kill(ranks_of(process.pid)[victim], getattr(signal, fault))
        started = time.monotonic()
        try:
            status = process.wait(IN_TIME)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks_of(process.pid).values():
                os.kill(rank, signal.SIGKILL)
            raise RuntimeError(f"{fault} to rank {victim} of {size} {when}: not ended after {IN_TIME} s") from None
        seconds, text = time.monotonic() - started, run.with_name("output").read_text(errors="replace")
        said = next((line for line in re.split(r"[\r\n]+", text) if re.search(rf"\brank {victim}\b", line)), None)
        if said is None and status:
            raise RuntimeError(f"{fault} to rank {victim} of {size} {when}: no message names it: {text[-1500:]}")
        done = "it had ended" if status == 0 else f"ended in {seconds:.1f} s with status {status}"
        return f"{fault} to rank {victim} of {size} {when}: {done}, {str(said).strip()!r}"

    def summary(self, messages: list[str]) -> str:
        return "\n" + "\n".join(messages)


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank that a process of mpiexec has started."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:
            continue
        found |= {int(v.partition(b"=")[2]): int(pid) for v in variables if v.startswith(b"PMIX_RANK=")}
    return found

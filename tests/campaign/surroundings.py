"""The surroundings of a process: standard streams without a reader, signals at any moment, folders that are read-only
or disappear, full disks, little memory, odd environment variables.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from area import Area, Case
from runs import EXAMPLES, command, make_data, set_intervals, tiny

from scratchformer.commands import cli
from scratchformer.training import Replicas, load_snapshot, start
from scratchformer.training.folder import read_run

STEPS = 8
BROKEN = ("closed", "no reader", "full disk")
NOBODY = 65534
# A traceback with a line of the package, an example or a library. A traceback without one comes from Python's own
# start, or from the first line of the package.
OWN = re.compile(r'(?s)(Traceback|Exception ignored).*File "[^"]*/(scratchformer|examples|site-packages)/')
ENVIRONMENTS: dict[str, list[str | None]] = {
    "HOME": [None, "", "/nonexistent", "/dev/null", "\udcff"],
    "TMPDIR": [None, "/nonexistent", "/dev/null"],
    "LC_ALL": ["C", "POSIX", "tr_TR.UTF-8", "nonsense", ""],
    "PYTHONIOENCODING": ["ascii", "utf-16", "cp1252", "latin-1:strict"],
    "PYTHONUTF8": ["0", "1"],
    "PYTHONUNBUFFERED": [None, "1"],
    "COLUMNS": ["0", "1", "-5", "many", "1000000"],
    "TERM": [None, "dumb", "nonsense"],
    "TZ": ["nonsense", ""],
    "SCRATCHFORMER_DATA": ["", "/nonexistent/x", "/dev/null"],
    "OMP_NUM_THREADS": ["0", "-1", "many", "1"],
    "USER": [None],
    "PATH": [None, ""],
}


class Surroundings(Area):
    name = "surroundings"
    seconds = 60

    def prepare(self, folder: Path) -> None:
        folder.parent.chmod(0o755)
        self.text = make_data(folder)["plain"]
        self.text.write_bytes(self.text.read_bytes()[:16_000])
        self.finished = folder / "finished"
        options = ["--data", self.text, "--out", self.finished, "--steps", STEPS, "--device", "cpu", "--replicas", 2]
        subprocess.run(command("plain", *options), check=True, capture_output=True)
        self.expected = load_snapshot(self.finished).model
        self.program = tiny("plain")

    def case(self, draw: random.Random, folder: Path) -> Case:
        folder.chmod(0o777)
        kinds = [self.streams, self.commands, self.limits, self.folders, self.signals, self.processes]
        return draw.choices(kinds, [6, 6, 4, 4, 2, 2])[0](draw, folder)

    def train(self, out: Path, *options: str, steps: int = STEPS) -> None:
        set_intervals()
        argv = ["--data", str(self.text), "--out", str(out), "--steps", str(steps), "--device", "cpu", *options]
        sys.argv = ["enwik8.py", *argv, "--replicas", "2"]
        start(self.program.main)

    def ended_right(self, out: Path, _result: Any = None) -> str | None:
        """What is wrong with a finished run; None if nothing is."""
        found = load_snapshot(out)
        if found.state["step"] != STEPS or any((found.model[name] != a).any() for name, a in self.expected.items()):
            return f"step {found.state['step']}, or other weights"
        return None

    def streams(self, draw: random.Random, folder: Path) -> Case:
        """Training with broken standard streams saves the same as with working ones."""
        broken = {number: draw.choice(BROKEN) for number in range(3) if draw.random() < 0.5}
        moment = draw.choice(["from the start", "after two steps"])

        def run() -> None:
            if moment == "from the start":
                break_streams(broken)
                return self.train(folder / "run")
            gradients = Replicas.gradients
            at(Replicas, "gradients", 2, lambda: break_streams(broken, python=False), gradients)
            self.train(folder / "run")

        what = f"training, {moment} {broken or 'working streams'}"
        return Case(what, run, expect="accepted", check=partial(self.ended_right, folder / "run"))

    def commands(self, draw: random.Random, folder: Path) -> Case:
        """Commands with broken streams, and with any bytes on standard input, end with a status and no traceback."""
        argv = draw.choice(
            [
                ["generate", str(self.finished), "--tokens", "20", "--device", "cpu"],
                ["evaluate", str(self.finished), "--device", "cpu"],
                ["doctor"],
                ["check", "relu"],
                ["check", "relu", "--derivations"],
                ["learn", "start", "softmax"],
                ["--help"],
                ["--nonsense"],
            ]
        )
        broken = {number: draw.choice(BROKEN) for number in range(3) if draw.random() < 0.6}
        environment = {name: draw.choice(values) for name, values in ENVIRONMENTS.items() if draw.random() < 0.2}
        vanished = draw.random() < 0.1

        def run() -> None:
            os.environ.update({name: value for name, value in environment.items() if value is not None})
            for name in environment:
                if environment[name] is None:
                    os.environ.pop(name, None)
            if vanished:
                gone = folder / "gone"
                gone.mkdir()
                os.chdir(gone)
                gone.rmdir()
            break_streams(broken)
            try:
                cli.main(argv)
            except SystemExit as ended:
                if not isinstance(ended.code, str):  # the message may be lost with standard error
                    raise SystemExit(0) from ended
                raise

        where = " in a folder that is gone" * vanished
        return Case(f"{' '.join(argv)}{where}, {broken}, {environment}", run, expect="either")

    def limits(self, draw: random.Random, folder: Path) -> Case:
        """Training with a limit on the size or number of files, or without enough memory."""
        kind = draw.choice(["RLIMIT_FSIZE", "RLIMIT_NOFILE", "memory"])
        most = {"RLIMIT_FSIZE": int(2 ** draw.uniform(0, 18)), "RLIMIT_NOFILE": draw.randrange(3, 40)}.get(kind, 0)
        owner, name, call = draw.choice([(Replicas, "gradients", 3), (Replicas, "rows", 0)])
        fail = draw.choice([partial(np.empty, 1 << 48), no_memory])

        def run() -> None:
            if kind == "memory":
                at(owner, name, call, fail, getattr(owner, name))
                return self.train(folder / "run")
            soft, hard = resource.getrlimit(getattr(resource, kind))
            resource.setrlimit(getattr(resource, kind), (most, hard))
            try:
                self.train(folder / "run")
            finally:
                resource.setrlimit(getattr(resource, kind), (soft, hard))

        expect, names = ("refused", ("memory",)) if kind == "memory" else ("either", ())
        what = f"training, {kind} {most or (name, getattr(fail, '__name__', 'numpy.empty'))}"
        return Case(what, run, expect, names, check=partial(self.readable, folder / "run"))

    def folders(self, draw: random.Random, folder: Path) -> Case:
        """The run's folder becomes read-only, disappears, or is replaced while the run goes on."""
        out, step = folder / "run", draw.randrange(STEPS)

        def vanish() -> None:
            shutil.rmtree(out, ignore_errors=True)

        def file_instead() -> None:
            vanish()
            out.write_text("a file")

        def link_instead() -> None:
            vanish()
            out.symlink_to("run")

        def read_only() -> None:
            for path in (out, *out.rglob("*")):
                path.chmod(0o500 if path.is_dir() else 0o400)

        happening = draw.choice([vanish, file_instead, link_instead, read_only])

        def run() -> None:
            os.seteuid(NOBODY)
            if step == 0 and happening is read_only:
                folder.joinpath("run").mkdir()
            at(Replicas, "gradients", step, happening, Replicas.gradients)
            self.train(out)

        return Case(f"training, {happening.__name__} before step {step}", run, expect="either")

    def readable(self, out: Path, _result: Any = None) -> str | None:
        read_run(out)
        return None

    def signals(self, draw: random.Random, folder: Path) -> Case:
        """Signals while a run trains: it saves a snapshot, and after resuming it ends like an undisturbed run."""
        numbers = draw.choices([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], k=draw.choice([1, 1, 1, 2]))
        if numbers == [signal.SIGINT] * 2:  # the second stops at once
            numbers = numbers[:1]
        step = draw.randrange(1, STEPS - 1)

        def send() -> None:
            for number in numbers:
                os.kill(os.getpid(), number)

        def run() -> None:
            gradients = Replicas.gradients
            at(Replicas, "gradients", step, send, gradients)
            try:
                self.train(folder / "run")
            except SystemExit as ended:
                if ended.code not in [128 + number for number in numbers]:
                    raise
            if (saved := load_snapshot(folder / "run").state["step"]) != step + 1:
                raise AssertionError(f"step {saved} was saved, not {step + 1}")
            Replicas.gradients = gradients
            sys.argv = ["enwik8.py", "--resume", str(folder / "run"), "--device", "cpu"]
            start(self.program.main)

        named = ", ".join(number.name for number in numbers)
        check = partial(self.ended_right, folder / "run")
        return Case(f"training, {named} in step {step + 1}", run, expect="accepted", check=check)

    def processes(self, draw: random.Random, folder: Path) -> Case:
        """A new process, with signals at any moment from its start, broken streams and odd environment variables."""
        training = ["--data", str(self.text), "--out", str(folder / "run"), "--device", "cpu", "--steps", "5"]
        argv = draw.choice(
            [
                [str(EXAMPLES["enwik8"]), *training],
                [str(EXAMPLES["enwik8"]), "--steps", "0"],
                ["-m", "scratchformer", "doctor"],
                ["-m", "scratchformer", "generate", str(self.finished), "--tokens", "200", "--device", "cpu"],
                ["-m", "scratchformer", "evaluate", str(self.finished), "--device", "cpu"],
                ["-m", "scratchformer", "--nonsense"],
            ]
        )
        numbers = draw.choices([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [4, 1, 1], k=draw.choice([0, 1, 1, 2]))
        delays = [draw.uniform(0.05, 1.5), draw.uniform(0, 0.3)]
        broken = {number: draw.choice(BROKEN) for number in (0, 1) if draw.random() < 0.2}
        changed = {name: draw.choice(values) for name, values in ENVIRONMENTS.items() if draw.random() < 0.1}
        environment = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path[1:3])

        def run() -> None:
            process = subprocess.Popen(
                [sys.executable, *argv],
                stderr=subprocess.PIPE,
                env=environment,
                preexec_fn=partial(break_streams, broken, python=False),
            )
            for number, delay in zip(numbers, delays, strict=False):
                time.sleep(delay)
                process.send_signal(number)
            errors = process.communicate()[1].decode(errors="replace")
            said = errors.strip().splitlines()[-1:] or [""]
            if re.search(OWN, errors) and "import starting" not in errors:
                raise AssertionError(f"{process.returncode}: {errors[-1500:]}")
            good = {0, 1, 2, *(128 + number for number in numbers), *(-number for number in numbers)}
            if process.returncode not in good:
                raise AssertionError(f"{process.returncode}: {said}")
            if process.returncode == 1 and 1 not in broken and not said[0].startswith("error: "):
                raise AssertionError(f"status 1: {said}")
            if (folder / "run").exists():
                self.readable(folder / "run")

        named = [f"{number.name} after {delay:.2f} s" for number, delay in zip(numbers, delays, strict=False)]
        words = " ".join(Path(word).name if "/" in word else word for word in argv)
        return Case(f"python {words}: {', '.join(named)}, {broken}, {changed}", run, expect="either")


def break_streams(broken: dict[int, str], python: bool = True) -> None:
    """Close standard streams, end their readers, or fill their disks.

    python: also set the streams of `sys` that are closed to None, as if Python had started with closed streams.
    """
    for number, how in broken.items():
        if how == "closed":
            os.close(number)
        elif how == "full disk":
            os.dup2(os.open("/dev/full", os.O_RDWR), number)
        else:
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, number)
            os.close(write)
        if python and how == "closed":
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)


def no_memory() -> None:
    raise MemoryError


def at(owner: Any, name: str, call: int, happening: Callable[[], None], function: Callable) -> None:
    """Replace a method so that `happening` is called before its call number `call`."""
    calls = iter(range(10**9))

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            happening()
        return function(*args, **options)

    setattr(owner, name, wrapped)

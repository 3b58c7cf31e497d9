"""Run cases in forks of this process: each has a folder, a time limit and a measured peak of memory."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from area import Area, Verdict, judge

from scratchformer.shell.process import SIGNALS

CEILING = 4 << 30  # bytes of memory at which a case is stopped
WAITING = 20  # times its seconds of processor time a case may take if it waits, for example for the processor


class Task(NamedTuple):
    """Case `number` of an area."""

    area: Area
    seed: int
    number: int

    @property
    def draw(self) -> random.Random:
        return random.Random(f"{self.area.name} {self.seed} {self.number}")


class Result(NamedTuple):
    task: Task
    what: str
    verdict: Verdict
    seconds: float
    peak: int  # bytes that the process grew by


class Running(NamedTuple):
    """A case that has begun. said: the bytes that its process has sent so far."""

    task: Task
    process: int
    pipe: int
    folder: Path
    started: float
    said: bytearray

    def listen(self) -> bool:
        """Read what the process has sent. Returns True if nothing more will come."""
        part = os.read(self.pipe, 1 << 16)
        self.said.extend(part)
        return not part or (b'"outcome"' in self.said and self.said.endswith(b"\n"))

    def too_late(self) -> bool:
        waited = time.monotonic() - self.started
        return waited > self.task.area.seconds and (
            _seconds(self.process) > self.task.area.seconds or waited > WAITING * self.task.area.seconds
        )

    def too_large(self) -> bool:
        return _memory("VmRSS", self.process) > CEILING


def run_all(tasks: Iterable[Task], processes: int) -> Iterator[Result]:
    """The results of all tasks, in the order in which they end. At most `processes` tasks run at once."""
    tasks, running = iter(tasks), {}
    try:
        while True:
            while len(running) < processes and (task := next(tasks, None)) is not None:
                started = _start(task)
                running[started.pipe] = started
            if not running:
                return
            ready, _, _ = select.select(list(running), [], [], 0.05)
            ended = {pipe for pipe in ready if running[pipe].listen()}
            stopped = {pipe for pipe, r in running.items() if r.too_late() or r.too_large()} - ended
            for pipe in ended | stopped:
                yield _end(running.pop(pipe), pipe in ended)
    finally:
        for r in running.values():
            _end(r, False)


def _start(task: Task) -> Running:
    folder = Path(tempfile.mkdtemp(prefix=f"campaign-{task.area.name}-"))
    read, write = os.pipe()
    sys.stdout.flush()
    if (process := os.fork()) == 0:
        os.close(read)
        try:
            _run(task, folder, write)
        except BaseException:
            _send(write, what="the campaign itself failed", outcome="crash", message=traceback.format_exc())
        finally:
            os._exit(0)
    os.close(write)
    return Running(task, process, read, folder, time.monotonic(), bytearray())


def _run(task: Task, folder: Path, pipe: int) -> None:
    os.setsid()
    for number in SIGNALS:  # some are ignored in a shell's background and under nohup
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    errors = folder.with_name(folder.name + ".errors")
    for number, path, flags in (0, os.devnull, os.O_RDONLY), (1, os.devnull, os.O_WRONLY), (2, errors, os.O_RDWR):
        os.dup2(os.open(path, flags | os.O_CREAT), number)
    os.chdir(folder)
    case = task.area.case(task.draw, folder)
    _send(pipe, what=case.what)
    _forget_peak()
    before = _memory("VmRSS")
    verdict = judge(case, lambda: errors.read_text(errors="replace"))
    peak = _memory("VmHWM") - before
    allowed = max(10 * case.size, task.area.memory)
    if verdict.outcome in ("refused", "accepted") and peak > allowed:
        message = f"{peak >> 20} MB of memory, {allowed >> 20} MB allowed: {verdict.message}"
        verdict = Verdict("memory", message)
    _send(pipe, peak=peak, **verdict._asdict())


def _send(pipe: int, **values: object) -> None:
    os.write(pipe, (json.dumps(values) + "\n").encode())


def _end(running: Running, finished: bool) -> Result:
    """Collect the result of a process, which is stopped if it has not finished."""
    late = running.too_late()
    if not finished:
        _kill(running.process)
    os.close(running.pipe)
    _, status = os.waitpid(running.process, 0)
    _kill(running.process)  # processes that the case has started and left running
    shutil.rmtree(running.folder, ignore_errors=True)
    running.folder.with_name(running.folder.name + ".errors").unlink(missing_ok=True)
    said: dict = {"what": "before the case was made"}
    for line in running.said.splitlines():
        said |= json.loads(line)
    seconds = time.monotonic() - running.started
    if "outcome" in said:
        verdict = Verdict(said["outcome"], said["message"], said.get("where", ""))
    elif not finished and late:
        verdict = Verdict("hang", f"not finished after {seconds:.0f} s")
    elif not finished:
        verdict = Verdict("memory", f"stopped at {CEILING >> 30} GB")
    else:
        verdict = Verdict("crash", f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    return Result(running.task, said["what"], verdict, seconds, said.get("peak", 0))


def _kill(session: int) -> None:
    """Kill the process of a case, and all that it has started: also in process groups of their own, as mpiexec does."""
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process) == session:
                os.kill(process, signal.SIGKILL)


def _seconds(process: int) -> float:
    """The processor time of a process, and of those that it has started and that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _memory(name: str, process: int | str = "self") -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
        return 1024 * int(status.split(name + ":")[1].split()[0])
    except (OSError, IndexError):
        return 0


def _forget_peak() -> None:
    """Reset the measured peak of the memory, so that it is measured from here on."""
    Path("/proc/self/clear_refs").write_text("5")

"""Running tests with mistakes planted, on several cores."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from .mutants import Mutant
from .targets import Target

SECONDS = 600.0  # for tests without a mistake
TIMES_LONGER = 5  # than without a mistake, and
SECONDS_LONGER = 5.0  # tests may take: after that they count as endless


class Answer(NamedTuple):
    """What a run of the tests gave.

    status: pytest's exit status, negative for a signal, None if it ran out of time. loaded: whether the tests imported
    the file. failed: the first test that failed. modules: the files of all modules that were imported, by name.
    """

    status: int | None
    loaded: bool
    failed: str
    modules: dict[str, str]
    output: str


class Runner:
    """A process that runs tests in forks of itself; see `runner`. Use it in a `with` block."""

    def __init__(self, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        if not hasattr(os, "fork"):
            raise OSError("tests with mistakes run in forks of a process, which this system does not have")
        self.temporary = tempfile.TemporaryDirectory()
        self.output = Path(self.temporary.name, "output.txt")
        kept = {"OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": self.temporary.name}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("runner.py")],
            cwd=folder,
            env=kept | dict(os.environ if environment is None else environment),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent alone
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.send_signal(signal.SIGTERM)  # and it kills its fork
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.temporary.cleanup()

    def run(self, tests: Sequence[str], path: Path, code: str, **options: Any) -> Answer:
        """Run pytest with these arguments, in a process where `path` contains `code`.

        options: "seconds", "imports" and "compiled", see `runner`.
        """
        request = {"tests": list(tests), "path": str(path), "code": code, "output": str(self.output)}
        try:
            print(json.dumps({"seconds": SECONDS, **request, **options}), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline() if self.process.stdout else ""
        except OSError:
            answer = ""
        if not answer:
            raise RuntimeError("the process that runs the tests has ended")
        output = self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""
        return Answer(**json.loads(answer), output=output)


class Job(NamedTuple):
    """A mistake in a function, and the tests that should find it."""

    target: Target
    mutant: Mutant
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    """killed: the test that found the mistake, or "timed out", "crashed"; "" if none did."""

    job: Job
    killed: str


class Plain(NamedTuple):
    """A run of the tests without a mistake: its time in seconds, and the files of the modules that it imported."""

    seconds: float
    modules: dict[str, str]


def run_plain(target: Target, tests: Sequence[str], environment: Mapping[str, str] | None = None) -> Plain:
    """Run the tests without a mistake. Raises ValueError unless they pass and import the file."""
    start = time.perf_counter()
    with Runner(environment=environment) as runner:
        answer = runner.run(tests, target.path, target.source)
    command = f"pytest {shlex.join(tests)}"
    if answer.status == 5:
        raise ValueError(f"{command}: there are no tests")
    if answer.status != 0:
        what = "take too long" if answer.status is None else "do not pass"
        raise ValueError(f"without a mistake, the tests {what}: {command}\n{answer.output.strip()[-4000:]}")
    if not answer.loaded:
        raise ValueError(f"{command}: the tests do not import {target.path}, at least not in pytest's own process")
    return Plain(time.perf_counter() - start, answer.modules)


def importable(modules: Mapping[str, str], paths: Collection[Path]) -> list[str]:
    """The modules that need not be imported again for every mistake: what is installed, but not the files' packages."""
    folder = Path.cwd().resolve()
    files = {name: Path(file).resolve() for name, file in modules.items() if file}
    changed = {path.resolve() for path in paths}
    own = {"__main__"} | {name.partition(".")[0] for name, file in files.items() if file in changed}
    return [
        name
        for name, file in files.items()
        if name.partition(".")[0] not in own
        and (not file.is_relative_to(folder) or {"site-packages", "dist-packages"} & set(file.parts))
    ]


def run_jobs(
    jobs: Sequence[Job],
    plain: Mapping[tuple[Path, tuple[str, ...]], Plain],
    processes: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """The outcomes of all jobs, as they come in, from this many processes. plain: of each file with its tests."""
    modules = {name: file for ran in plain.values() for name, file in ran.modules.items()}
    imports = importable(modules, {job.target.path for job in jobs})
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def outcome(job: Job) -> Outcome:
        runner = idle.get()
        try:
            seconds = TIMES_LONGER * plain[job.target.path, job.tests].seconds + SECONDS_LONGER
            code = job.mutant.plant(job.target.source)
            options = {"seconds": seconds, "imports": imports, "compiled": compiled}
            answer = runner.run(job.tests, job.target.path, code, **options)
        finally:
            idle.put(runner)
        if not answer.loaded:
            raise RuntimeError(f"{job.target.path}: another installed package imports it, so no mistake can be planted")
        if answer.status is None:
            return Outcome(job, "timed out")
        return Outcome(job, "" if answer.status == 0 else answer.failed or "crashed")

    with ExitStack() as stack:
        compiled = stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        for _ in range(processes):
            idle.put(
                stack.enter_context(Runner(environment=environment))
            )  # ended before the pool waits for its threads
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for future in as_completed([pool.submit(outcome, job) for job in jobs]):
            yield future.result()

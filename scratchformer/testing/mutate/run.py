"""Running tests with mistakes planted, on several cores."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from .mutants import Mutant
from .targets import TargetFunction

SECONDS = 600.0  # the most that tests without a mistake may take
# With a mistake they may take this many times as long, plus this many seconds. Then they count as endless.
TIMES_LONGER = 5
SECONDS_LONGER = 5.0


class Answer(NamedTuple):
    """What a run of the tests gave.

    status: pytest's exit status, negative for a signal, None if time ran out. planted: whether the tests imported the
    file. failed: the first test that failed. output: what the tests printed.
    """

    status: int | None
    planted: bool
    failed: str
    output: str


class Runner:
    """A process that runs tests in forks of itself; see `runner`. Use it in a `with` block.

    environment: its environment variables (default: this process's). folder: where it runs (default: here). imports:
    modules to import before the forks, which saves time in `run`; do not name modules whose code is changed.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, folder: Path | None = None, imports: Sequence[str] = ()
    ) -> None:
        if not hasattr(os, "fork"):
            raise OSError("mistakes are planted with os.fork, which this system does not have")
        self.temporary = tempfile.TemporaryDirectory()
        self.output = Path(self.temporary.name, "output.txt")
        self.collected = False
        kept = {"OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": self.temporary.name}
        asserts = {"PYTHONOPTIMIZE": ""}  # without them, tests miss every mistake
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("runner.py"), *imports],
            cwd=folder,
            env=kept | dict(os.environ if environment is None else environment) | asserts,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent alone
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # and it kills its fork
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.temporary.cleanup()

    def run(self, tests: Sequence[str], path: Path, code: str, seconds: float = SECONDS) -> Answer:
        """Run pytest with these arguments, in a process where `path` contains `code`."""
        return self.ask(tests=list(tests), path=str(path), code=code, seconds=seconds)

    def run_function(
        self,
        tests: Sequence[str],
        path: Path,
        name: str,
        code: str,
        seconds: float = SECONDS,
        brief: bool = True,
        chosen: Sequence[str] | None = None,
    ) -> Answer:
        """As `run`, but only the function `name` is as in `code`. A runner collects its tests once: for other tests,
        make another runner. brief: print no tracebacks. chosen: which of the collected tests to run, by pytest's ids
        in their order (default: all).
        """
        if not self.collected:
            answer = self.ask(collect=list(tests))
            if answer.status != 0:
                return answer
            self.collected = True
        return self.ask(path=str(path), function=name, code=code, seconds=seconds, brief=brief, chosen=chosen)

    def ask(self, **request: Any) -> Answer:
        answer = ""
        with contextlib.suppress(OSError):
            print(json.dumps({**request, "output": str(self.output)}), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline() if self.process.stdout else ""
        output = self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""
        if not answer:
            raise RuntimeError(f"the process that runs the tests has ended: {output[-4000:]}")
        return Answer(**json.loads(answer), output=output)


class Job(NamedTuple):
    """A mistake in a function, and the tests that should find it."""

    target: TargetFunction
    mutant: Mutant
    tests: tuple[str, ...]


class MutationResult(NamedTuple):
    """killed: the test that found the mistake, or "timed out", "crashed"; "" if none did."""

    job: Job
    killed: str


def run_plain(runner: Runner, target: TargetFunction, tests: Sequence[str]) -> float:
    """Run the tests without a mistake. Returns the seconds; raises ValueError unless they pass and import the file."""
    start, command = time.perf_counter(), f"pytest {shlex.join(tests)}"
    answer = runner.run_function(tests, target.path, target.name, target.source, brief=False)
    if answer.status == 5:
        raise ValueError(f"{command}: found no tests")
    if answer.status != 0:
        what = "take too long" if answer.status is None else "do not pass"
        print(answer.output.strip()[-4000:])
        raise ValueError(f"even without a mistake, the tests {what}: {command}")
    if not answer.planted:
        raise ValueError(f"{command}: the tests do not import {target.path}, or not in pytest's own process")
    return time.perf_counter() - start


def run_jobs(
    jobs: Sequence[Job], processes: int, environment: Mapping[str, str] | None = None
) -> Iterator[MutationResult]:
    """The outcomes of jobs that have the same tests, as they come in, from this many processes.

    Raises ValueError unless the tests pass without a mistake.
    """
    tests = jobs[0].tests
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(processes))  # left last: its threads wait for the runners
        runners = [stack.enter_context(Runner(environment)) for _ in range(processes)]
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        one_of_each_file = {job.target.path: job.target for job in jobs}.values()
        seconds = TIMES_LONGER * max(run_plain(runners[0], t, tests) for t in one_of_each_file) + SECONDS_LONGER
        for runner in runners:
            idle.put(runner)

        def outcome(job: Job) -> MutationResult:
            runner = idle.get()
            try:
                target, code = job.target, job.mutant.plant(job.target.source)
                answer = runner.run_function(tests, target.path, target.name, code, seconds)
            finally:
                idle.put(runner)
            if not answer.planted:
                raise RuntimeError(f"{target}: the tests imported it without the mistake")
            if answer.status is None:
                return MutationResult(job, "timed out")
            return MutationResult(job, "" if answer.status == 0 else answer.failed or "crashed")

        for future in as_completed([pool.submit(outcome, job) for job in jobs]):
            yield future.result()

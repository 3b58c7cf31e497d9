"""A process that runs tests again and again, each time in a fork of its own, with a mistake planted or without.

It imports only the modules that it is told to, which may be slow but do not contain what is changed. Each fork imports
the rest again, with one file replaced. A line of JSON on standard input is one run: "tests", pytest's arguments; "path"
and "code", a file and the code to import instead, which is written nowhere; "output", the file that the tests print to;
"seconds", after which they are killed; "imports", modules to import before; and "compiled", a folder for compiled
files. The answer is one line: "status", pytest's exit status, negative for a signal, or null if it ran out of time;
"loaded", whether the file was imported; "failed", the first test that did; and "modules", what was imported.

This file is run as a program, and imports nothing of the package.
"""

import contextlib
import importlib
import importlib.machinery
import json
import os
import signal
import sys
from typing import Any, NoReturn


class TimeIsUpError(Exception):
    """The tests take too long."""


class Watcher:
    """A pytest plugin that notes the first failure, and makes Hypothesis keep no record and shrink nothing."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        if hypothesis := sys.modules.get("hypothesis"):
            phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
            profile = hypothesis.settings.get_current_profile_name()
            current = hypothesis.settings.get_profile(profile)
            hypothesis.settings.register_profile(profile, current, database=None, deadline=None, phases=phases)
            hypothesis.settings.load_profile(profile)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def plant(path: str, code: str) -> list[str]:
    """Make an import from this path get this code, whatever the file contains. Returns a list of the names it got."""
    loader: Any = importlib.machinery.SourceFileLoader
    as_it_stands = loader.get_code
    names: list[str] = []

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> Any:
        if os.path.realpath(self.path) != path:
            return as_it_stands(self, name)
        names.append(name)
        return compile(code, self.path, "exec")

    loader.get_code = get_code
    return names


def run(request: dict[str, Any]) -> dict[str, Any]:
    """In the fork: run pytest."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request.get("compiled"):  # for the next run, and not beside the sources
        sys.pycache_prefix, sys.dont_write_bytecode = request["compiled"], False
    import pytest

    names, watcher = plant(os.path.realpath(request["path"]), request["code"]), Watcher()
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--no-header", *request["tests"]]
    status = int(pytest.main(arguments, plugins=[watcher]))
    modules = {name: str(getattr(module, "__file__", "") or "") for name, module in list(sys.modules.items())}
    return {"status": status, "loaded": bool(names), "failed": watcher.failed, "modules": modules}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a request in a fork, and wait for it."""
    for name in request.get("imports", ()):
        try:
            importlib.import_module(name)
        except Exception:  # the tests import it themselves, in some other way
            continue
    end, start = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            report = json.dumps(run(request)) + "\n"
            for stream in sys.stdout, sys.stderr:
                stream.flush()
            os.write(start, report.encode())
        finally:
            os._exit(0)
    os.close(start)

    def stop(*_: Any) -> NoReturn:
        kill(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    report, late = "", False
    with os.fdopen(end) as pipe:
        try:
            report = pipe.readline()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeIsUpError:
            kill(child)
            late = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    if report:
        return json.loads(report)
    return {
        "status": None if late else os.waitstatus_to_exitcode(status) or 70,
        "loaded": True,
        "failed": "",
        "modules": {},
    }


def too_late(*_: Any) -> NoReturn:
    raise TimeIsUpError


def kill(child: int) -> None:
    """Kill a fork, which may have ended, and all processes that it started."""
    for send in os.killpg, os.kill:  # the first only once it has called setsid
        with contextlib.suppress(ProcessLookupError):
            send(child, signal.SIGKILL)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints when it is imported is no answer
    sys.path[0] = os.getcwd()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()

"""A process that runs tests again and again, each time in a new fork, with a file changed or as it is.

Nothing is written to the file: the fork gets other code for it. A line of JSON on standard input is one request, and
the answer is one line of JSON. There are two kinds.

{"collect": [...]} holds pytest's arguments. It imports and collects the tests; each later request runs them in a fork
of that process. Such a request holds "path" and "function"; "code", the text of the whole file, from which the
function is taken, or all of it if the file is imported later; "brief", to leave out tracebacks and summary; and
"chosen", the tests to run, by pytest's ids in their order, or null for all.

{"tests": [...], "path": ..., "code": ...} forks the process before anything but pytest is imported, so that the file
may be changed anywhere.

Both hold "output", a file for what the tests print, and "seconds", after which they are killed. The answer is "status",
pytest's exit status, negative for a signal, or null if the time was up; "planted", whether the code was used; and
"failed", the first test that failed.

This file is run as a program, and imports nothing of the package; its arguments are modules to import first.
"""

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest

# The tests stop at the first failure, in this process, and nothing is kept for the next run.
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--capture=sys", "--no-header"]


class TimeIsUpError(Exception):
    """The tests take too long."""


class Watcher:
    """A pytest plugin that notes the first failure, and keeps Hypothesis from shrinking and remembering it."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        if hypothesis := sys.modules.get("hypothesis"):
            name = hypothesis.settings.get_current_profile_name()
            phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
            settings = hypothesis.settings(hypothesis.settings.get_profile(name), database=None, deadline=None)
            hypothesis.settings.register_profile(name, settings, phases=phases)
            hypothesis.settings.load_profile(name)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_runtest_logreport = pytest_collectreport


class Server(Watcher):
    """A pytest plugin that answers requests once the tests are collected; each fork then goes on to run them."""

    def __init__(self) -> None:
        super().__init__()
        self.planted, self.names, self.brief = False, list[str](), False
        self.report: Callable[[int, bool, str], NoReturn] | None = None  # in a fork

    def silence(self, config: pytest.Config) -> None:
        """Leave out what takes time and only a reader of the failure needs."""
        config.option.tbstyle = "no"
        if config.pluginmanager.has_plugin("scratchformer-counterexamples"):
            config.pluginmanager.unregister(name="scratchformer-counterexamples")
        if diagnosis := sys.modules.get("scratchformer.testing.diagnosis"):
            self.without_diagnosis = diagnosis.without_diagnosis()
            self.without_diagnosis.__enter__()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> Generator[None, Any, None]:
        """Skip the summary where nobody reads it: plugins import a lot for it."""
        yield
        if self.brief:
            self.finish(int(exitstatus))

    def finish(self, status: int) -> None:
        """Report pytest's exit status."""
        (self.report or answer)(status, self.planted or bool(self.names), self.failed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> None:
        if session.testsfailed or not session.items:
            return
        answer(0, True, "")
        functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
        gc.freeze()  # the forks need not look through what exists now
        for request in requests():
            if finish := forked(request):
                self.planted = replace_code(functions, request["path"], request["function"], request["code"])
                self.brief = request["brief"]
                if self.brief:
                    self.silence(session.config)
                if request["chosen"] is not None:
                    by_id = {item.nodeid: item for item in session.items}
                    session.items[:] = [by_id[name] for name in request["chosen"]]
                self.names = plant(request["path"], request["code"])
                self.report = finish
                return
        os._exit(0)


def requests() -> Iterator[dict[str, Any]]:
    for line in REQUESTS:
        yield json.loads(line)


def answer(status: int | None, planted: bool, failed: str) -> None:
    print(json.dumps({"status": status, "planted": planted, "failed": failed}), file=ANSWERS, flush=True)


def plant(path: str, code: str) -> list[str]:
    """Make an import from this path get this code, whatever the file contains. Returns a list of the names it got."""
    loader: Any = importlib.machinery.SourceFileLoader
    as_it_stands, path = loader.get_code, os.path.realpath(path)
    names: list[str] = []

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> Any:
        if os.path.realpath(self.path) != path:
            return as_it_stands(self, name)
        names.append(name)
        return compile(code, self.path, "exec")

    loader.get_code = get_code
    return names


def replace_code(functions: list[FunctionType], path: str, name: str, text: str) -> bool:
    """Give the functions with this name and file the code that they have in this text. Returns whether any exist."""
    path, replaced = os.path.realpath(path), False
    codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(compile(text, path, "exec"))}
    for function in functions:
        old = function.__code__
        if old.co_qualname == name and os.path.realpath(old.co_filename) == path:
            # `super()` makes the class a variable of a method, which it keeps when the call is lost.
            function.__code__ = codes[name, old.co_firstlineno].replace(co_freevars=old.co_freevars)
            replaced = True
    return replaced


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def forked(request: dict[str, Any]) -> Callable[[int, bool, str], NoReturn] | None:
    """Fork. In the fork: a function that reports (status, planted, failed) and ends it. Else answer and return None."""
    end, start = os.pipe()
    child = os.fork()
    if child:
        os.close(start)
        answer(**wait_for(child, end, request["seconds"]))
        return None
    os.setsid()
    os.close(end)
    redirect(request["output"])

    def finish(status: int, planted: bool, failed: str) -> NoReturn:
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        os.write(start, json.dumps({"status": status, "planted": planted, "failed": failed}).encode() + b"\n")
        os._exit(0)

    return finish


def redirect(output: str) -> None:
    """Send what is printed to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)


def wait_for(child: int, end: int, seconds: float) -> dict[str, Any]:
    """The answer of a fork, which is killed after so many seconds, or when this process is told to end."""

    def stop(*_: Any) -> NoReturn:
        kill(child)
        os._exit(1)

    def too_late(*_: Any) -> NoReturn:
        raise TimeIsUpError

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    report, late = "", False
    with os.fdopen(end) as pipe:
        try:
            report = pipe.readline()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeIsUpError:
            late = True
            kill(child)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    if report:
        return json.loads(report)
    return {"status": None if late else os.waitstatus_to_exitcode(status) or 70, "planted": True, "failed": ""}


def kill(child: int) -> None:
    """Kill a fork, which may have ended, and all processes that it started."""
    for send in os.killpg, os.kill:  # the first works once it has called setsid
        with contextlib.suppress(ProcessLookupError):
            send(child, signal.SIGKILL)


def run(tests: list[str], watcher: Watcher) -> int:
    """Pytest's exit status."""
    plugins = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
    here = ["-n0"] if plugins and importlib.util.find_spec("xdist") else []  # not in processes of pytest-xdist
    return int(pytest.main([*OPTIONS, *here, *tests], plugins=[watcher]))


def serve() -> None:
    sys.path[0] = os.getcwd()
    for request in requests():
        if "collect" in request:
            server = Server()
            redirect(request["output"])
            status = run(request["collect"], server)
            server.finish(status)
        elif finish := forked(request):
            watcher, names = Watcher(), plant(request["path"], request["code"])
            status = run(request["tests"], watcher)
            finish(status, bool(names), watcher.failed)


if __name__ == "__main__":
    REQUESTS, ANSWERS = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the tests can neither read requests
    os.dup2(2, 1)  # nor print answers
    for module in sys.argv[1:]:
        importlib.import_module(module)
    serve()

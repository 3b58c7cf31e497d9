"""The pytest plugin of scratchformer: the fixture `gradients`, and small counterexamples of failed gradient checks.

pytest loads this module in every run, for everyone who has scratchformer installed. So the module is outside the
package, which takes a while to import, and it imports the package only in a run that uses it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from scratchformer.testing import GradientError
    from scratchformer.testing.plugin import Gradients


_LONG = 300  # characters of a call in the list of counterexamples


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("scratchformer", "gradient checks")
    group.addoption(
        "--gradient-seed",
        type=_seed,
        metavar="N|random",
        help="seed of the arrays and checks of the fixture `gradients` (default: 0); random: a new one in each run",
    )
    group.addoption(
        "--gradient-counterexamples",
        metavar="FILE",
        help="a test module to which small counterexamples of failed gradient checks are added; its tests run first "
        "(default: a module in pytest's cache, with those of the last run that had any)",
    )


def _seed(text: str) -> int:
    if text == "random":
        return random.SystemRandom().randrange(2**32)
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number >= 0 or random, got {text}")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Counterexamples(config), "scratchformer-counterexamples")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("gradient_seed")
    return None if seed is None else f"gradient seed: {seed}"


@pytest.fixture(scope="session")  # with @given, Hypothesis objects to a fixture of narrower scope
def gradients(pytestconfig: pytest.Config) -> Gradients:
    """Checks gradients: `gradients(op, op_backward, *args)`, `gradients.layer(layer, *inputs)`, `.torch`, `.jax`,
    `.precision`. `gradients.normal(shape)` and `gradients.rng` give random numbers that depend on `--gradient-seed`.
    """
    from scratchformer.testing.plugin import Gradients

    fixture = Gradients(_seed_of(pytestconfig))
    pytestconfig.pluginmanager.register(fixture)  # for its hook
    return fixture


class _Counterexamples:
    """Finds small counterexamples for the gradient checks that fail, shows them, and writes them to a file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.counterexamples: list[dict[str, Any]] = []
        self.last_line = "Not written to a file, since pytest's cache is switched off"
        name = config.getoption("gradient_counterexamples")
        self.file = Path(config.invocation_params.dir, name).resolve() if name else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.file:
            items.sort(key=lambda item: item.path != self.file)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, None]:
        errors = self._shortened(call)
        report = (yield).get_result()
        if not errors:
            errors = self._shortened(call)  # a unittest.TestCase says only now how it failed
            if errors and call.excinfo and report.failed:
                report.longrepr = item.repr_failure(call.excinfo)
        if report.failed and errors:
            self._add_counterexamples(report, errors)
        if report.failed and "gradients" in getattr(item, "fixturenames", ()):
            _add_text(report, "gradients", f"Repeat with --gradient-seed {_seed_of(self.config)}")

    def _shortened(self, call: pytest.CallInfo) -> list[GradientError]:
        """The GradientErrors of a test, with their tracebacks and notes cut down to what helps."""
        errors = _gradient_errors(call.excinfo.value) if call.excinfo else []
        if errors and call.excinfo and not self.config.getoption("fulltrace"):
            from scratchformer.testing.plugin import shorten_notes, until_check

            if self.config.option.verbose <= 0:
                for each in errors:
                    shorten_notes(each)
            error, shown = call.excinfo.value, until_check(call.excinfo.tb)
            call.excinfo = pytest.ExceptionInfo.from_exc_info((type(error), error, shown or call.excinfo.tb))
        return errors

    def _add_counterexamples(self, report: pytest.TestReport, errors: list[GradientError]) -> None:
        """Add them to the report, as text and as data; pytest-xdist sends the data to its main process."""
        from scratchformer.testing.plugin import counterexample

        counterexamples = []
        for error, call in ((error, error.call) for error in errors):
            if call is None:
                continue
            try:
                counterexamples.append(counterexample(error, call, report.nodeid))
                _add_text(report, "counterexample", counterexamples[-1]["source"].rstrip())
            except Exception as problem:  # whatever happens here, the failure itself must be reported
                _add_text(report, "counterexample", f"No smaller one was found. {type(problem).__name__}: {problem}")
        report.gradient_counterexamples = counterexamples  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.counterexamples += getattr(report, "gradient_counterexamples", [])

    def pytest_sessionfinish(self) -> None:
        cache: Any = getattr(self.config, "cache", None)
        if not self.counterexamples or not (self.file or cache) or hasattr(self.config, "workerinput"):
            return
        from scratchformer.testing.plugin import write_module

        try:
            file = self.file or cache.mkdir("scratchformer") / "test_counterexamples.py"
            write_module(file, self.counterexamples, keep=self.file is not None)
            self.last_line = f"Run them again: pytest {os.path.relpath(file, self.config.invocation_params.dir)}"
        except OSError as problem:
            self.last_line = f"Not written to a file: {problem}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.counterexamples:
            terminalreporter.section("gradient counterexamples")
            for each in self.counterexamples:
                call = each["call"] if len(each["call"]) <= _LONG else each["call"][:_LONG] + "..."
                terminalreporter.line(f"{each['nodeid']}: {call}")
            terminalreporter.line(self.last_line)


def _seed_of(config: pytest.Config) -> int:
    return config.getoption("gradient_seed") or 0


def _add_text(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a section below the message of a failure, if there can be one."""
    add_section = getattr(report.longrepr, "addsection", None)
    if add_section:
        add_section(title, text)


def _gradient_errors(error: BaseException) -> list[GradientError]:
    """The GradientErrors that an exception is or contains: Hypothesis raises several failures as a group."""
    contracts = sys.modules.get("scratchformer.testing.contracts")
    if contracts is None:
        return []
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _gradient_errors(each)]
    return [error] if isinstance(error, contracts.GradientError) else []

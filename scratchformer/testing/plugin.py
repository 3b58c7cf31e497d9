"""The part of the pytest plugin that imports this package: the `gradients` fixture, and the report of a failed check.

The plugin is the module `scratchformer_pytest`, which pytest loads in every run. It imports this module when needed.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .. import testing
from ..rng import Key
from .contracts import CheckCall, GradientError
from .paste import paste
from .shrink import SECONDS, shrink_call

_HERE = Path(__file__).parent
_NOTE_LINES = 3
_HEAD = '"""Small counterexamples of gradient checks that failed."""\n'


class Gradients:
    """The fixture `gradients`: gradient checks and random arrays that depend on `--gradient-seed`.

    `gradients(op, op_backward, *args)` calls `check_gradients`. `gradients.layer`, `.torch`, `.jax` and `.precision`
    call `check_layer`, `check_torch`, `check_jax` and `check_precision`. Each takes the options of its check and
    returns its Report.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._test, self._rng = "", Key(seed).generator()

    def __repr__(self) -> str:
        return f"<gradients with seed {self.seed}>"

    @property
    def rng(self) -> np.random.Generator:
        """A generator that depends on the seed and on the name of the test: every test draws numbers of its own."""
        test = name_of_test(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
        if test != self._test:
            self._test, self._rng = test, Key(self.seed).fold(test).generator()
        return self._rng

    def normal(self, shape: int | tuple[int, ...] = (), scale: float = 1.0, dtype: Any = np.float64) -> np.ndarray:
        """An array of normal numbers with standard deviation `scale`, from `rng`."""
        return np.asarray(scale * self.rng.standard_normal(shape), dtype)

    def pytest_runtest_setup(self) -> None:
        """Draw from the start in each test, also if the same test runs again, as with pytest-rerunfailures."""
        self._test = ""

    def _check(self, name: str, *args: Any, **options: Any) -> Any:
        check = getattr(testing, name)
        if "seed" in inspect.signature(check).parameters:
            options.setdefault("seed", self.seed)
        return check(*args, **options)

    __call__ = partialmethod(_check, "check_gradients")
    layer = partialmethod(_check, "check_layer")
    torch = partialmethod(_check, "check_torch")
    jax = partialmethod(_check, "check_jax")
    precision = partialmethod(_check, "check_precision")


def name_of_test(nodeid: str) -> str:
    """The file, class and name of a test without folders, which depend on where pytest was started."""
    path, colons, name = nodeid.partition("::")
    return path.rpartition("/")[2] + colons + name


def until_check(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that leads to the call of a check, without what happened inside the check."""
    if traceback is None or Path(traceback.tb_frame.f_code.co_filename).parent == _HERE:
        return None
    rest = until_check(traceback.tb_next)
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def shorten_notes(error: GradientError) -> None:
    """Leave out the arrays that Hypothesis adds to an exception as notes."""
    for i, note in enumerate(getattr(error, "__notes__", [])):
        first, _, rest = note.partition("(\n")
        if rest.count("\n") > _NOTE_LINES and first.startswith(("Failing test case", "Falsifying example")):
            error.__notes__[i] = f"{first}(...) with arrays too long to show: see the counterexample below, or use -v"


def counterexample(error: GradientError, call: CheckCall, nodeid: str, seconds: float = SECONDS) -> dict[str, Any]:
    """A smaller call that fails in the same way as `error`, as strings, which pytest-xdist can send elsewhere."""
    smaller, search = shrink_call(call, error, seconds)
    pasted = paste(smaller, _name(nodeid), _in_short(search.error))
    notes = [] if getattr(error, "diagnoses", ()) else _diagnoses(call)
    if not search.finished:
        notes.append(f"The search stopped after {seconds:g} s: there may be a smaller counterexample.")
    source = "".join(f"# {note}\n" for note in notes) + pasted.source
    return {**pasted._asdict(), "nodeid": nodeid, "source": source}


def _diagnoses(call: CheckCall) -> list[str]:
    """What the mistake looks like. Under Hypothesis the check itself does not say it."""
    try:
        call.check(*call.args, **call.options)
    except GradientError as error:
        return [str(diagnosis.what) for diagnosis in getattr(error, "diagnoses", ())]
    return []


def _name(nodeid: str) -> str:
    """`swish_counterexample` for `tests/test_swish.py::test_swish`."""
    name = nodeid.rpartition("::")[2].partition("[")[0]
    return name.removeprefix("test_").removesuffix("_counterexample") + "_counterexample"


def _in_short(error: GradientError) -> str:
    """One line of a message: what is wrong, with both values for a wrong gradient."""
    message = str(error.args[0])
    first = message.partition("\n")[0].partition(": ")[2].rstrip(":")
    numbers = re.findall(r"^  (analytic|numeric) +(\S+)", message, re.MULTILINE)
    return ": ".join([first, ", ".join(f"{kind} {float(value):.4g}" for kind, value in numbers)][: 1 + bool(numbers)])


def write_module(file: Path, counterexamples: list[dict[str, Any]], keep: bool) -> None:
    """Write a test module with the counterexamples. If `keep`, add those that are not there yet to what is there."""
    text = file.read_text(encoding="utf-8") if keep and file.exists() else _HEAD
    for each in counterexamples:
        head, _, body = each["source"].partition("\ndef test_")
        name, _, body = body.partition("():\n")
        if body in text:
            continue
        names = (name + f"_{i}" * (i > 1) for i in itertools.count(1))
        name = next(name for name in names if f"def test_{name}(" not in text)
        skip = f"@pytest.mark.skip(reason={' '.join(each['missing'])!r})\n" if each["missing"] else ""
        lines = [f"# {each['nodeid']}", *_paths(each["folders"], file), head.strip(), *["import pytest"] * bool(skip)]
        text = text.rstrip() + "\n\n\n" + "\n".join(lines) + f"\n\n\n{skip}def test_{name}():\n{body}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="\n")


def _paths(folders: Iterable[str], file: Path) -> list[str]:
    """Lines that let Python import from `folders`, which are given relative to the module `file`."""
    relative = [Path(os.path.relpath(folder, file.parent)).as_posix() for folder in folders]
    lines = [f'sys.path.append(os.path.join(os.path.dirname(__file__), "{path}"))' for path in relative]
    return ["import os", "import sys", "", *lines] if lines else []

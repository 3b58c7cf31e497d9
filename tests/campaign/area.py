"""Areas, which generate the cases of the campaign, and the verdict on each case."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

MEGABYTE = 1 << 20
# What Python, NumPy and other libraries say when a mistake of the user reaches code that did not expect it.
FOREIGN = re.compile(
    r"object has no attribute|not subscriptable|object is not (callable|an iterator)|unhashable|has no len|"
    r"positional argument|unexpected keyword|unsupported operand|invalid literal for|could not convert|"
    r"not supported between|must be (str|int|real|a real|a string|bytes)|cannot be interpreted as|not enough values|"
    r"too many values|maximum recursion|recursion depth|Exceeds the limit|codec can't|could not be broadcast|"
    r"sequence item|list indices|dictionary update|NoneType|ufunc|<class '|argument of type|bad operand|"
    r"truth value of|inhomogeneous|invalid index to scalar|takes no arguments|matmul:|0-dimensional|len\(\) of unsized|"
    r"not iterable|non-iterable|iteration over a 0-d|(tuple|list|string) index out of range|out of bounds for axis|"
    r"zero-size array to reduction|cannot reshape|not seekable|Field elements must be|^Unable to allocate|"
    r"Cannot interpret|not understood"
)
OUTCOMES = ("refused", "accepted", "silent", "wrong", "traceback", "message", "hang", "memory", "crash")
GOOD = OUTCOMES[:2]


class Case(NamedTuple):
    """One attempt.

    what: the case in words. run: what a user does; it is called in a process of its own. expect: "refused", "accepted",
    or "either"; with "either", only tracebacks, hangs, memory and bad messages are failures. names: texts, of which the
    message must contain at least one, as whole words. size: the size of the input in bytes. check: returns what is
    wrong with the result of `run`, or None. If `run` returns a text, it is the message of an accepted case.
    """

    what: str
    run: Callable[[], Any]
    expect: str = "refused"
    names: tuple[str, ...] = ()
    size: int = 0
    check: Callable[[Any], str | None] | None = None


class Verdict(NamedTuple):
    """How a case ended. outcome: one of OUTCOMES. message: what the user sees, or what is wrong. where: the innermost
    line of the traceback.
    """

    outcome: str
    message: str = ""
    where: str = ""


class Area:
    """A kind of cases. Case number N of seed S is always the same: `draw` depends on nothing else.

    seconds: a case that takes more processor time, or twenty times as long by the clock, counts as a hang. memory: how
    many bytes a case may take even if its input is small. only_when_named: leave the area out unless the command names
    it. slow: its cases take seconds, so --quick leaves it out.
    """

    name: ClassVar[str]
    only_when_named: ClassVar[bool] = False
    slow: ClassVar[bool] = False
    seconds: ClassVar[float] = 15
    memory: ClassVar[int] = 64 * MEGABYTE

    def prepare(self, folder: Path) -> None:
        """Make in `folder` what all cases use. Called once, before the first case."""

    def case(self, draw: random.Random, folder: Path) -> Case:
        """A case, with its files in the empty `folder`. Called in the process in which the case will run."""
        raise NotImplementedError

    def summary(self, messages: list[str]) -> str:
        """A line below the table, from the messages of the accepted cases that have one."""
        return ""


def judge(case: Case, errors: Callable[[], str]) -> Verdict:
    """Run a case and say how it ended. errors: returns what was written to standard error."""
    try:
        result = case.run()
    except SystemExit as ended:
        if ended.code in (None, 0):
            return _accepted(case, None)
        message = ended.code if isinstance(ended.code, str) else last_line(errors())
        return _refused(case, message)
    except (ValueError, TypeError, IndexError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if isinstance(error, RecursionError | NotImplementedError) or type(error) is RuntimeError:
            return Verdict("traceback", f"{type(error).__name__}: {error}", _where(error))
        return _refused(case, str(error), _where(error))
    except BaseException as error:
        return Verdict("traceback", f"{type(error).__name__}: {error}", _where(error))
    return _accepted(case, result)


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _accepted(case: Case, result: Any) -> Verdict:
    if case.expect == "refused":
        return Verdict("silent", "accepted")
    if case.check is not None and (wrong := case.check(result)):
        return Verdict("wrong", wrong)
    return Verdict("accepted", result if isinstance(result, str) else "")


def _refused(case: Case, message: str, where: str = "") -> Verdict:
    if case.expect == "accepted":
        return Verdict("wrong", f"refused: {message}", where)
    text = message.removeprefix("error:").strip()
    if not text or "\n" in text or FOREIGN.search(text) or not _named(case.names, text):
        return Verdict("message", message, where)
    return Verdict("refused", message)


def _named(names: tuple[str, ...], text: str) -> bool:
    """Whether a message contains one of the names, and not merely as a part of a word. True without names."""
    return not names or any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"

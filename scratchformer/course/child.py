"""The check of an answer in a separate process with a time limit, since a loop in it may never end."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..shell.apart import ProcessEnded, Send, run_apart
from .course import exercise
from .grading import Verdict, grade, where

SECONDS = 30.0  # that an answer may take; the solutions take less than one
GRACE = 10.0  # more seconds, after which a process that cannot end itself is killed, as when C code hangs
MEMORY = 4 << 30  # bytes that an answer may take
PRINTED = 20_000  # characters that an answer may print


def grade_apart(name: str, path: Path, show: Callable[[str], Any]) -> Verdict:
    """`grade` in another process. show: is called with what the answer prints."""
    try:
        for what, text in run_apart(report, name, path.resolve(), SECONDS, seconds=SECONDS + GRACE, memory=MEMORY):
            if what != "printed":
                return Verdict(what == "right", text)
            show(text)
    except TimeoutError:
        return Verdict(False, too_long(""))
    except ProcessEnded as ended:
        return Verdict(False, f"The process of the answer did not finish its check: {ended}")
    raise AssertionError("unreachable: the process tells a verdict, or ends")


def too_long(line: str) -> str:
    return f"{line}After {SECONDS:.0f} seconds the answer was still running. Does a loop in it never end?"


def report(tell: Send, name: str, path: Path, seconds: float) -> None:
    """Grade an answer, and tell what it prints and the verdict. Runs in the process of the answer."""
    sending = threading.Lock()

    def send(what: str, text: str) -> None:
        with sending:
            tell([what, text])

    def stop() -> None:
        frame, number = sys._current_frames().get(threading.main_thread().ident or 0), 0
        while frame and not number:
            number = frame.f_lineno if frame.f_code.co_filename == str(path) else 0
            frame = frame.f_back
        send("wrong", too_long(f"line {number}: {lines[number - 1].strip()}\n    " if number else ""))
        os._exit(1)

    sys.stdout = sys.stderr = Printed(send)
    limit = threading.Timer(seconds, stop)
    limit.daemon = True
    limit.start()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        verdict = grade(exercise(name), path)
    except BaseException as error:  # also KeyboardInterrupt, which cannot come from the terminal here
        verdict = Verdict(False, where(error, path))
    send("right" if verdict.passed else "wrong", verdict.message)


class Printed(io.TextIOBase):
    """Standard output of an answer: sends what is printed, up to a limit."""

    def __init__(self, send: Callable[[str, str], None]) -> None:
        self.send, self.left = send, PRINTED

    def write(self, text: str) -> int:
        if self.left > 0:
            more = "\n... (the answer prints more than is shown here)\n" if len(text) > self.left else ""
            self.send("printed", text[: self.left] + more)
            self.left -= len(text)
        return len(text)

    def close(self) -> None:
        pass

"""The check of an answer in a separate process, so that nothing it does can harm the verdict or the progress.

An answer may loop forever, end the program, use up all memory, or change the working directory or NumPy. The verdict
counts only if the process sends it before it ends.
"""

from __future__ import annotations

import io
import os
import signal
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
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "shutil.rmtree")


def grade_apart(name: str, path: Path, show: Callable[[str], Any]) -> Verdict:
    """`grade` in another process. show: is called with what the answer prints."""
    status = None
    try:
        for what, text in run_apart(report, name, path.resolve(), SECONDS, seconds=SECONDS + GRACE, memory=MEMORY):
            if what != "printed":
                return Verdict(what == "right", text)
            show(text)
    except TimeoutError:
        return Verdict(False, too_long(""))
    except ProcessEnded as ended:
        status = ended.status
    return Verdict(False, without_verdict(status))


def without_verdict(status: int | None) -> str:
    """What to say of a process that ended with this exit code without a verdict, or broke off the connection (None)."""
    if status is None:
        return "The answer closed or changed files that it did not open, so that its check could not go on"
    if status >= 0:
        return f"The answer ended the program (exit status {status}) before the check was done: take out os._exit"
    name = next((number.name for number in signal.Signals if number == -status), f"signal {-status}")
    return f"Python crashed in the answer ({name}). Is memory full, or does a function call itself without end?"


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

    sys.addaudithook(lambda event, args: expect_harmless(path.parent, event, args))
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


def expect_harmless(folder: Path, event: str, args: tuple) -> None:
    """Raise PermissionError if an answer is about to change a file in the folder of the exercises, or to fork."""
    if event in ("os.fork", "os.forkpty"):  # each of the two would fork again, at the next call
        raise PermissionError("an answer must not start another process")
    if event == "open":
        paths = args[:1] if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) else ()
    else:
        paths = args[:2] if event in CHANGES else ()
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            changed = Path(os.fsdecode(path)).resolve()
            if folder in (changed, *changed.parents) or changed in folder.parents:
                raise PermissionError(f"an answer must not change files in the folder of the exercises: {path!r}")


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

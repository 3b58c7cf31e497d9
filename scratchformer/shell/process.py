"""The end of a program: signals, standard streams, and errors in one line."""

from __future__ import annotations

import io
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from .starting import end_on_interrupt
from .text import one_line

PACKAGE = Path(__file__).parents[1]
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
LESS_MEMORY = "use a smaller model, batch, text or file, or fewer --replicas"


class Stopped(KeyboardInterrupt):
    """Ctrl-C (SIGINT) or a request to end (the other SIGNALS). The message, if there is one, says what was saved."""

    def __init__(self, number: int, *saved: str) -> None:
        super().__init__(*saved)
        self.number = number


def run_program(program: Callable[[], None], needs_output: bool = True) -> None:
    """Run a program's main function: an error in the input ends it with one line and exit status 1.

    SIGTERM, SIGHUP and SIGUSR1, which queues send before they end a job, end it as Ctrl-C does. The exit status is then
    128 plus the signal's number, as in a shell, so that the caller can tell it from an error. If standard error is
    closed, the program goes on. If standard output is closed, it goes on unless it needs its output. Characters that
    the terminal cannot show are printed as "?".
    needs_output: whether the program is of no use without standard output.
    """
    prepare_streams(needs_output)
    try:
        with signals_caught(stop):
            program()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output, such as `head`, has gone
        sys.exit(1)
    except (ValueError, TypeError, IndexError, OSError, RuntimeError, ImportError, MemoryError) as error:
        sys.exit(f"error: {one_line(in_words(error))}")
    except KeyboardInterrupt as stopped:  # `train` says which snapshot it saved
        end_on_interrupt()
        number = getattr(stopped, "number", signal.SIGINT)
        how = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        print(one_line(f"{how}; {stopped}: continue with --resume") if stopped.args else how, file=sys.stderr)
        sys.exit(128 + number)


def in_words(error: Exception) -> str:
    """The message of an error, for a user."""
    text = str(error)
    if isinstance(error, MemoryError) or text == "can't start new thread":
        return f"out of memory in {_place(error)}{': ' * bool(text)}{text}; {LESS_MEMORY}"
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply for {_place(error)}"
    if isinstance(error, OSError) and error.strerror and text.startswith(("[Errno", "[WinError")):
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return text or f"{type(error).__name__} in {_place(error)}"


def _place(error: Exception) -> str:
    """The innermost function of the package, or of a program, in which an error was raised."""
    libraries = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    places = [(frame.name, Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    name, path = [(n, p) for n, p in places if PACKAGE in p.parents or not libraries & {*p.parents}][-1]
    return f"{name} ({path.name})"


# Signals


@contextmanager
def signals_caught(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` for Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 inside the block.

    Signals that are ignored stay ignored, as SIGHUP does under nohup. A user's own handler is kept, except for Ctrl-C.
    Does nothing outside the main thread, since Python handles signals only there.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {
        number: handled
        for number, handled in before.items()
        if handled in (signal.SIG_DFL, stop) or (number == signal.SIGINT and handled not in (signal.SIG_IGN, None))
    }
    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        for number, handled in taken.items():
            signal.signal(number, handled)


def stop(number: int, frame: Any) -> NoReturn:
    """End the program: the handler of a signal outside the training loop."""
    raise Stopped(number)


# Standard streams


class Stream(io.FileIO):
    """Standard output or standard error, whose reader may end or whose disk may be full.

    After such a failure, everything that is written is discarded. The failure is raised only if the stream is `needed`.
    """

    def __init__(self, number: int, name: str, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.title, self.needed = name, needed

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.needed:
                raise OSError(error.errno, error.strerror, self.title) from error
            if self.fileno() == 1:
                print(f"{self.title}: {error.strerror}; the rest of the output is lost", file=sys.stderr)
            return len(data)


def prepare_streams(needs_output: bool = True) -> None:
    """Make sure that the standard streams are open, take any text, and fail only as `run_program` says.

    A closed stream is opened on the null device. Otherwise the next file that is opened, such as a snapshot, would get
    its number, and whatever a library prints would be written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for number, name, title in (1, "stdout", "standard output"), (2, "stderr", "standard error"):
        _survive(name, Stream(number, title, needs_output and number == 1))
    # Of characters, those that the terminal cannot show, or that the locale (LC_ALL=C, cp1252) cannot decode, too.
    for stream, errors in (sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _survive(name: str, new: Stream) -> None:
    """Let sys.stdout or sys.stderr write to `new`, unless it was replaced, as in a test or a notebook."""
    stream = getattr(sys, name)
    buffer = getattr(stream, "buffer", None)
    old = getattr(buffer, "raw", buffer)  # with `python -u` there is no buffer in between
    if not (isinstance(old, io.FileIO) and old.fileno() == new.fileno()):
        return
    with suppress(OSError):
        stream.flush()
    kept = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
    setattr(sys, name, io.TextIOWrapper(new if old is buffer else io.BufferedWriter(new), **kept))

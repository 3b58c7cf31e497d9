"""The end of a program: signals, standard streams, and errors in one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def run_program(program: Callable[[], None]) -> None:
    """Run a program's main function: an error in the input ends it with one line and exit status 1.

    SIGTERM, SIGHUP and SIGUSR1, which queues send before they end a job, end it as Ctrl-C does. The exit status is then
    128 plus the signal's number, as in a shell, so that the caller can tell it from an error. Characters that the
    terminal cannot show are printed as "?".
    """
    prepare_streams()
    try:
        with signals_caught(stop):
            program()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that what is left can be flushed
        sys.exit(1)
    except (ValueError, TypeError, IndexError, OSError, RuntimeError, ImportError, MemoryError) as error:
        sys.exit(f"error: {one_line(in_words(error))}")
    except KeyboardInterrupt as stopped:  # `train` says which snapshot it saved
        end_on_interrupt()
        number = getattr(stopped, "number", signal.SIGINT)
        how = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        print(one_line(f"{how}; {stopped}: continue with --resume") if stopped.args else how, file=sys.stderr)
        sys.exit(128 + number)


def in_words(error: BaseException) -> str:
    """The message of an error, for a user."""
    text = str(error)
    if isinstance(error, MemoryError) or text == "can't start new thread":
        return f"out of memory{': ' * bool(text)}{text}; {LESS_MEMORY}"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    if isinstance(error, OSError) and error.strerror and text.startswith(("[Errno", "[WinError")):
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return text or type(error).__name__


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


def prepare_streams() -> None:
    """Open the standard streams that are closed on the null device, and let all take any text.

    Otherwise the next file that is opened, such as a snapshot, would get the number of a closed stream, and whatever a
    library prints would be written into that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))
    # Of characters, those that the terminal cannot show, or that the locale (LC_ALL=C, cp1252) cannot decode, too.
    for stream, errors in (sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)

"""Ctrl-C while a program starts. This module is loaded before all others, which take a third of a second."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def end_on_interrupt() -> None:
    """From here on, Ctrl-C ends the process at once, without a traceback: nothing can be lost while it starts or ends.

    Only in a process that was started to run the command or a program of examples/. A script or a session that imports
    the package, and a process that ignores Ctrl-C, are not changed.
    """
    if _is_program() and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _end)


def _end(number: int, _frame: Any) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)


def _is_program() -> bool:
    started = getattr(sys, "argv", None) or [""]
    if started[0] not in sys.orig_argv[1:] or sys.flags.interactive or "bdb" in sys.modules:  # bdb: a debugger, IPython
        return False
    if started[0] == "-m":
        return any(argument.partition(".")[0] == "scratchformer" for argument in sys.orig_argv)
    folder, name = os.path.split(os.path.abspath(started[0]))
    return name.partition(".")[0] == "scratchformer" or folder == os.path.join(os.path.dirname(HERE), "examples")


end_on_interrupt()

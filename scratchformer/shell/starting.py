"""Ctrl-C while a program starts, and where Python looks for modules then. This module is imported first, since the
others take a third of a second, and before it imports anything itself, the current folder may have to be forgotten.
"""

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def forget_current_folder() -> None:
    """In a program of this package, import no module from the current folder, which may be a stranger's.

    `python -m` puts it before all others, so a file numpy.py in it would be executed; the checkout of this package is
    kept. The path entry of an editable installation is relative, and could be a zip file there.
    """
    started = getattr(sys, "argv", None) or [""]
    if started[0] == "-m" and not sys.flags.safe_path and sys.path[0] != os.path.dirname(PACKAGE):
        del sys.path[0]
    if _is_program():
        sys.path[:] = filter(os.path.isabs, sys.path)


def _is_program() -> bool:
    started = getattr(sys, "argv", None) or [""]
    if started[0] not in sys.orig_argv[1:] or sys.flags.interactive or "bdb" in sys.modules:  # bdb: a debugger, IPython
        return False
    if started[0] == "-m":
        return any(argument.partition(".")[0] == "scratchformer" for argument in sys.orig_argv)
    folder, name = os.path.split(os.path.abspath(started[0]))
    return name.partition(".")[0] == "scratchformer" or folder == os.path.join(os.path.dirname(PACKAGE), "examples")


forget_current_folder()

import signal  # noqa: E402


def end_on_interrupt() -> None:
    """From here on, let Ctrl-C end the process at once, without a traceback.

    Call it while a program starts or ends, when nothing can be lost. It has an effect only in a process that was
    started to run the command `scratchformer` or a program of examples/. It does not change a script or an interactive
    interpreter that imports the package, or a process that ignores Ctrl-C.
    """
    if _is_program() and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _end)


def _end(number: int, _frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)


end_on_interrupt()

"""How a program ends: signals, standard streams, errors in one line."""

import os
import signal
import sys

import numpy as np
import pytest

from scratchformer.shell import starting
from scratchformer.shell.process import (
    SIGNALS,
    Stopped,
    in_words,
    prepare_streams,
    run_program,
    signals_caught,
)

pytestmark = pytest.mark.usefixtures("default_signals")
posix = pytest.mark.skipif(os.name != "posix", reason="needs the signals of POSIX")


def ended(program, **options):
    """The exit status of a program, or the message that it ends with; None if it ends as usual."""
    try:
        run_program(program, **options)
    except SystemExit as end:
        return end.code
    return None


def raising(error):
    def program():
        raise error

    return program


class OnWindows(OSError):
    def __str__(self):
        return f"[WinError 32] {self.strerror}: {self.filename!r}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory; use a smaller model, batch, text or file"),
        (FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OnWindows(13, "It is used by another process", "x"), "x: It is used by another process"),
        (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply"),
        (ValueError(), "ValueError"),
        (ValueError("x: expected y"), "x: expected y"),
    ],
)
def test_an_error_has_words(error, message):
    assert str(ended(raising(error))).startswith(f"error: {message}")


def test_memory_that_numpy_does_not_get():
    with pytest.raises(MemoryError) as refused:
        np.empty(1 << 48)
    said = in_words(refused.value)
    assert "Unable to allocate 2.00 PiB" in said and "--replicas" in said


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_a_program_with_its_status(number, capsys):
    before = signal.getsignal(number)
    assert ended(lambda: signal.raise_signal(number)) == 128 + number
    said = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert capsys.readouterr().err == f"{said}\n"
    assert ended(raising(Stopped(number, "step 3 is saved"))) == 128 + number
    assert capsys.readouterr().err == f"{said}; step 3 is saved: continue with --resume\n"
    assert signal.getsignal(number) is before


@posix
@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda *_: None])
def test_ignored_signals_and_handlers_of_a_user_stay(own):
    received = []
    signal.signal(signal.SIGHUP, own)
    with signals_caught(lambda number, _: received.append(number)):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) is own


def without_reader():
    read, write = os.pipe()
    os.close(read)
    return write


def in_a_fork(function):
    """Whether a function returns True in a fork of this process."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    if (child := os.fork()) == 0:
        right = False
        try:
            right = function()
        finally:
            os._exit(not right)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_never_gets_the_number_of_a_closed_stream(number, tmp_path):
    def check():
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        prepare_streams()
        print("to nobody", file=(sys.stdout, sys.stdout, sys.stderr)[number])
        with open(tmp_path / "snapshot", "w") as file:
            return file.fileno() > 2 and sys.stdin.read is not None

    assert in_a_fork(check)


def test_a_program_without_a_reader_ends():
    def check():
        os.dup2(without_reader(), 1)
        sys.stdout = open(1, "w", closefd=False)
        return ended(lambda: print("lost", flush=True)) == 1

    assert in_a_fork(check)


EXAMPLE = os.path.join(os.path.dirname(starting.PACKAGE), "examples", "imdb.py")


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (EXAMPLE, ["python", EXAMPLE, "--steps", "3"], True),
        ("/venv/bin/scratchformer", ["python", "/venv/bin/scratchformer", "doctor"], True),
        ("-m", ["python", "-m", "scratchformer", "doctor"], True),
        ("-m", ["python", "-m", "pytest"], False),
        ("mine.py", ["python", "mine.py"], False),
        ("", ["python"], False),
        (EXAMPLE, ["ipython"], False),
    ],
)
def test_only_a_program_changes_what_ctrl_c_does_while_it_starts(argv, original, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.delitem(sys.modules, "bdb", raising=False)
    assert starting._is_program() is expected


def test_a_program_that_waits_is_interrupted():
    def program():
        read, _ = os.pipe()
        signal.raise_signal(signal.SIGTERM)
        os.read(read, 1)

    assert ended(program) == 128 + signal.SIGTERM


@posix
def test_a_signal_just_before_the_end_is_not_lost():
    assert ended(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 128 + signal.SIGTERM

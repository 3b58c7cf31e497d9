"""How a program ends: signals, standard streams, errors in one line."""

import ctypes
import os
import signal
import sys
import time

import numpy as np
import pytest

from scratchformer.shell import process, starting
from scratchformer.shell.process import (
    SIGNALS,
    Stopped,
    Stream,
    in_words,
    prepare_streams,
    requests_taken,
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
        (MemoryError(), "out of memory in program (test_process.py); use a smaller model, batch, text or file"),
        (FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OnWindows(13, "It is used by another process", "x"), "x: It is used by another process"),
        (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply for program ("),
        (ValueError(), "ValueError in program (test_process.py)"),
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


def test_a_stream_without_a_reader_loses_what_is_written():
    stream = Stream(number := without_reader(), "standard error", needed=False)
    assert [stream.write(text) for text in (b"lost", b"lost too")] == [4, 8]
    os.close(number)


def test_a_stream_that_is_needed_fails_once():
    stream = Stream(number := without_reader(), "standard output", needed=True)
    with pytest.raises(BrokenPipeError, match="standard output"):
        stream.write(b"lost")
    assert stream.write(b"more") == 4
    os.close(number)


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


@pytest.mark.parametrize("needed", [True, False])
def test_a_program_goes_on_without_output_if_it_does_not_need_it(needed):
    def check():
        os.dup2(without_reader(), 1)
        sys.stdout = open(1, "w", closefd=False)
        done = []

        def program():
            print("first", flush=True)
            done.append(True)

        return (ended(program, needs_output=needed), done) == ((1, []) if needed else (None, [True]))

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


def called_back(function):
    """Let C call a function, as a library does in the middle of its work. Returns the function's result."""
    return ctypes.CFUNCTYPE(ctypes.c_int)(function)()


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_while_c_calls_python_costs_no_result_and_still_ends_the_program(name):
    number, results = getattr(signal, name), []

    def work():
        os.kill(os.getpid(), number)
        return 7

    def program():
        results.append(called_back(work))
        time.sleep(600)

    before = signal.getsignal(number)
    assert ended(program) == 128 + number and results == [7]
    assert signal.getsignal(number) is before and not requests_taken()


def test_a_request_whose_exception_c_has_lost_is_repeated(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: lost.append(type(found.exc_value)))

    def work():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # raises
        return 7

    def program():
        called_back(work)
        time.sleep(600)

    assert ended(program) == 128 + signal.SIGTERM and lost == [Stopped]


def test_signals_while_llvm_compiles_do_not_end_the_compilation():
    numba, registry = pytest.importorskip("numba"), pytest.importorskip("numba.core.registry")
    codegen = registry.cpu_target.target_context.codegen()
    library, calls, results = codegen._library_class, [], []

    def signalled(*args):
        calls.append(signal.raise_signal(signal.SIGTERM))
        calls.append(signal.raise_signal(signal.SIGTERM))
        return library._object_compiled_hook(*args)

    def program():
        results.append(numba.njit(lambda x: x + 1)(1))
        time.sleep(600 if calls else 0)

    codegen._engine.set_object_cache(signalled, library._object_getbuffer_hook)  # Numba has set its own once for all
    try:
        assert ended(program) == 128 + signal.SIGTERM
    finally:
        codegen._engine.set_object_cache(library._object_compiled_hook, library._object_getbuffer_hook)
    assert calls and results in ([2], [])  # []: stopped in Numba's own code, which nothing calls back


def test_a_program_that_waits_is_interrupted():
    def program():
        read, _ = os.pipe()
        signal.raise_signal(signal.SIGTERM)
        os.read(read, 1)

    assert ended(program) == 128 + signal.SIGTERM


def test_a_kept_error_of_an_earlier_program_hides_no_signal():
    kept = []

    def program():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
        except Stopped as error:
            kept.append(error)
            raise

    assert ended(program) == ended(program) == 128 + signal.SIGTERM and len(kept) == 2


@posix
def test_a_signal_just_before_the_end_is_not_lost():
    assert ended(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 128 + signal.SIGTERM


def test_a_cleanup_is_not_interrupted_by_the_request_that_it_follows():
    cleaned = []

    def program():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
        finally:
            time.sleep(5 * process.MOMENT)
            cleaned.append(True)

    assert ended(program) == 128 + signal.SIGTERM and cleaned

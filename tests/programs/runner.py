"""A process that runs programs in forks of itself, so that NumPy and the package are imported only once.

A line of JSON on standard input is one call: "program", the path of a script, or "scratchformer" for the command; its
arguments, "argv"; "cwd", the folder it is called in; "output" and "errors", the files that take its standard streams;
and "sizes", settings that replace those of the same name in the presets of a program in examples/. The answer is one
line, the exit status.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from scratchformer.commands import cli
from scratchformer.training import start
from scratchformer.training.snapshot import load_file

SECONDS = 600  # after which a program that hangs is ended
OPTIONAL = ("matplotlib.pyplot", "networkx", "sacrebleu", "sacremoses", "sklearn.linear_model", "tokenizers")
MODULES = ("generation", "commands.plots", "commands.doctor", "catalogue.check", "training.readers")


def with_sizes(path: Path, sizes: dict[str, Any]) -> ModuleType:
    """A program of examples/, freshly loaded, with these sizes in its presets."""
    program = load_file(path)
    for preset in program.PRESETS.values():
        preset |= {name: value for name, value in sizes.items() if name in preset or name in program.OPTIONS}
    return program


def run(program: str, argv: list[str], cwd: str, output: str, errors: str, sizes: dict[str, Any]) -> None:
    """In the fork: what `python PROGRAM ARGV` or `python -m scratchformer ARGV` does."""
    signal.alarm(SECONDS)
    os.chdir(cwd)
    sys.stdin = open(os.devnull)
    for stream, path in (1, output), (2, errors):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = [program, *argv]
    sys.path[0] = cwd if program == "scratchformer" else str(Path(program).parent)
    if program == "scratchformer":
        cli.main()
    elif sizes:
        start(with_sizes(Path(program), sizes).main)
    else:
        runpy.run_path(program, run_name="__main__")


def ending(function: Callable[[], None]) -> None:
    """Call a function, then end the process as the interpreter would, but without tearing down the modules."""
    status: Any = 0
    try:
        function()
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        for stream in sys.stdout, sys.stderr:
            if not stream.closed:
                stream.flush()
        os._exit(status)


def serve() -> None:
    for name in OPTIONAL:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for name in MODULES:
        importlib.import_module(f"scratchformer.{name}")
    while line := sys.stdin.readline():
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            ending(partial(run, **json.loads(line)))


if __name__ == "__main__":
    serve()

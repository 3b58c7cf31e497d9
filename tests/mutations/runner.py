"""A process that runs tests again and again, each time in a fork of its own, with a mistake planted or without.

It has already imported the libraries that are slow to import, but nothing of the project. Each fork imports the project
again, with one of its files replaced. A line of JSON on standard input holds "tests", pytest's arguments; "path" and
"code", a file and the code to import instead; and "output", the file that the tests print to. The answer is a line with
pytest's exit status.
"""

import importlib.machinery
import json
import os
import signal
import sys

import hypothesis  # noqa: F401
import pytest
import scipy.special  # noqa: F401

SECONDS = 300


def plant(path: str, code: str) -> None:
    """Make an import from this path get this code, whatever the file contains."""
    loader = importlib.machinery.SourceFileLoader
    as_it_stands = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        return compile(code, path, "exec") if self.path == path else as_it_stands(self, name)

    loader.get_code = get_code


def run(request: dict) -> int:
    """In the fork: the exit status of pytest."""
    signal.alarm(SECONDS)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    plant(request["path"], request["code"])
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *request["tests"]])


for line in sys.stdin:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    else:
        status = 70
        try:
            status = run(json.loads(line))
            sys.stdout.flush()
        finally:
            os._exit(status)

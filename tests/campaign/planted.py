"""Cases whose outcome is known, to check that the judge is right: one for each outcome."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from area import MEGABYTE, Area, Case


class Planted(Area):
    """Cases whose `what` is the outcome that they must have."""

    name = "planted"
    only_when_named = True
    seconds = 1

    def case(self, draw: random.Random, folder: Path) -> Case:
        run = draw.choice([refused, accepted, silent, wrong, traceback, message, hang, memory, crash])
        expect = "either" if run in (accepted, wrong) else "refused"
        check = (lambda result: f"{result}, not 5") if run is wrong else None
        return Case(run.__name__, run, expect, names=("settings.json",), check=check)


def refused() -> None:
    raise ValueError("settings.json: expected a number of steps, got 'many'")


def accepted() -> None:
    pass


def silent() -> None:
    pass


def wrong() -> int:
    return 4


def traceback() -> None:
    {}["steps"]


def message() -> None:
    sys.exit("error: invalid literal for int() with base 10: 'many'")


def hang() -> None:
    while True:
        pass


def memory() -> None:
    _ = b"x" * (128 * MEGABYTE)
    refused()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)

"""The command lines of commands and programs: argparse, with limits for numbers and options in any place."""

from __future__ import annotations

import argparse
import math
from textwrap import shorten
from typing import Any

INT64_MAX = 2**63 - 1  # a signed number of 64 bits, in NumPy and in files
MAX_STEPS = 10**9  # they would take twelve days at a millisecond a step
SEED = {"type": int, "metavar": "N", "min": 0, "max": INT64_MAX}


class CommandLine(argparse.ArgumentParser):
    """A parser with two more rules, for all its arguments: none may be empty, and every number has limits.

    `add_argument` also takes `min` and `max`, both inclusive; by default a number must be finite and fit in 64 bits.
    An argument out of range raises ValueError. Options may stand between the other arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.limits: list[tuple[argparse.Action, float, float]] = []
        self.intermixing = self.has_commands = False
        super().__init__(*args, **kwargs)

    def add_argument(self, *names: Any, min: float = -INT64_MAX, max: float = INT64_MAX, **kwargs: Any) -> Any:
        action = super().add_argument(*names, **kwargs)
        self.limits.append((action, min, max))
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        self.has_commands = True
        return super().add_subparsers(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.intermixing:
            return super().parse_known_args(args, namespace)
        if self.has_commands:
            namespace, unknown = super().parse_known_args(args, namespace)
        else:
            self.intermixing = True
            try:
                namespace, unknown = self.parse_known_intermixed_args(args, namespace)
            finally:
                self.intermixing = False
        for action, low, high in self.limits:
            value = getattr(namespace, action.dest, None)
            for each in value if isinstance(value, list) else [value]:
                _expect_in_range(_name(action), each, low, high)
        return namespace, unknown

    def error(self, message: str) -> Any:
        super().error(shorten(message, 500, placeholder=" ..."))


def _name(action: argparse.Action) -> str:
    return max(action.option_strings, key=len, default=str(action.metavar or action.dest))


def _expect_in_range(name: str, value: Any, low: float, high: float) -> None:
    if value == "":
        raise ValueError(f"{name}: expected at least one character")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if math.isnan(value) or value < low:
        raise ValueError(f"{name}: expected at least {low}, got {value}")
    if value > high:
        raise ValueError(f"{name}: expected at most {high:,}, got {value}")

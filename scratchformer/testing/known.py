"""What the search for a mistake knows besides the code that is checked: operations, their derivations, known mistakes.

It is handed in: `learn_from("my_package.catalogue")` names a module, which is imported when a check fails. The module
has `MISTAKES`, a sequence, and `known_operations()`, a dict by name; `KnownMistake` and `KnownOperation` say of what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

_modules: list[str] = []


class KnownMistake(Protocol):
    """A mistake that others have made, with a sentence or two about it.

    operation: the name of the known operation that has it, or "". equation: the one of its derivation that is wrong, or
    "", and `wrong`, what was written instead.
    """

    name: str
    title: str
    effect: str
    operation: str
    equation: str
    wrong: str

    def pair(self) -> tuple[Callable, Callable]:
        """The operation and its backward with the mistake; raises an error if it is not in their code."""

    def classes(self) -> set[str]:
        """The names of the classes that may have the mistake."""

    def module(self) -> ModuleType:
        """The module of these classes, without the mistake."""

    def names(self) -> Mapping[str, Any]:
        """What that module defines with the mistake."""


class KnownOperation(Protocol):
    """A pair with a derivation. names: a function of its arguments that gives further names of the derivation."""

    op: Callable
    op_backward: Callable
    names: Callable[..., Mapping[str, Any]]


def learn_from(module: str) -> None:
    """Look in this module when a check fails."""
    _modules.append(module)


def operations() -> dict[str, KnownOperation]:
    """All known operations, by name."""
    return {name: each for module in _modules for name, each in import_module(module).known_operations().items()}


def mistakes() -> Iterator[KnownMistake]:
    """All known mistakes."""
    for module in _modules:
        yield from import_module(module).MISTAKES

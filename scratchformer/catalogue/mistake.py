"""A mistake in the package's own code, and the code with it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import ops

PACKAGE = Path(__file__).parent.parent


@dataclass(eq=False)
class Mistake:
    """A mistake in hand-written code, most of them found in other projects, where the tests passed.

    title: the mistake in a few words. effect: what it does to the gradient. equation: the one of the operation's
    derivation that is wrong, and `wrong`, what was written instead. code: the wrong line of a program, if that says
    more than the equation. file: a file of the package. replace: texts of the file, each of which must occur there
    once, with what takes their places. tests: those that must fail then, as arguments of pytest; by default those of
    the file. operation: the name in `ops`, and name: what tests call it, both from the entry that has the mistake. A
    mistake has an equation, texts to replace, or both.
    """

    title: str
    effect: str = ""
    equation: str = ""
    wrong: str = ""
    code: str = ""
    file: str = ""
    replace: Mapping[str, str] = field(default_factory=dict)
    tests: str = ""
    operation: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.title
        self.file = self.file if self.replace else ""
        self.tests = self.tests or f"tests/{self.file.replace('/', '/test_')}" * bool(self.replace)

    def source(self) -> str:
        """The text of the file with the mistake."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        for right, wrong in self.replace.items():
            text = text.replace(right, wrong)
        return text

    def classes(self) -> set[str]:
        """The names of the classes in the file."""
        return set(re.findall(r"^class (\w+)", self.source(), re.MULTILINE)) if self.file else set()

    def module(self) -> ModuleType:
        """The module of the file, without the mistake."""
        return import_module(f"{PACKAGE.name}.{self.file.removesuffix('.py').replace('/', '.')}")

    @functools.cache  # noqa: B019  # there is one of each, and it stays
    def names(self) -> dict[str, Any]:
        """What the file defines if it is executed with the mistake. The package itself does not change."""
        module = self.module()
        defined = {"__name__": module.__name__, "__package__": module.__package__, "__file__": module.__file__}
        with no_twins():
            exec(compile(self.source(), self.file, "exec"), defined)
        return defined

    def pair(self) -> tuple[Any, Any]:
        """The operation and its backward with the mistake."""
        return self.names()[self.operation], self.names()[f"{self.operation}_backward"]


@contextmanager
def no_twins() -> Iterator[None]:
    """A context in which operations have no twins, so that twins can be registered; afterwards all is as before."""
    operations = [value for value in vars(ops).values() if hasattr(value, "add_twin")]
    tables = [table for each in operations for table in each.chosen]
    before = [{kind: copy.copy(twins) for kind, twins in table.items()} for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, twins in zip(tables, before, strict=True):
            table.clear()
            table.update(twins)

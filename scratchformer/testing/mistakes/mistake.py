"""What a mistake is, and the code with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ... import ops

PACKAGE = Path(__file__).parent.parent.parent


class Mistake(NamedTuple):
    """A mistake in hand-written code, most of them found in other projects, where the tests passed.

    name: never changes. title: the mistake in a few words. effect: what it does to the gradient. operation: the name in
    `ops` of the operation that has it. equation: the one of the operation's derivation that is wrong, and `wrong`, what
    was written instead. code: the wrong line of a program, if that says more than the equation. file: a file of the
    package, with `replacements` of its text that plant the mistake. A mistake has an equation, a file, or both.
    """

    name: str
    title: str = ""
    effect: str = ""
    operation: str = ""
    equation: str = ""
    wrong: str = ""
    code: str = ""
    file: str = ""
    replacements: tuple[tuple[str, str], ...] = ()

    def source(self) -> str:
        """The text of the file with the mistake."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        for right, wrong in self.replacements:
            text = text.replace(right, wrong)
        return text

    def module(self) -> ModuleType:
        """The module of the file, without the mistake."""
        return import_module(f"{PACKAGE.name}.{self.file.removesuffix('.py').replace('/', '.')}")

    @functools.cache  # noqa: B019  # there is one of each, and it stays
    def names(self) -> dict[str, Any]:
        """What the file defines if it is executed with the mistake. The package itself does not change."""
        module = self.module()
        found = {"__name__": module.__name__, "__package__": module.__package__, "__file__": module.__file__}
        with no_twins():
            exec(compile(self.source(), self.file, "exec"), found)
        return found

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
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)

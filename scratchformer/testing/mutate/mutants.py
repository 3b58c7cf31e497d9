"""Mistakes to plant in a backward: the places in its source where they are possible, and the text with each of them.

Places are found in the syntax tree, and only the text there is changed. The rest of the file stays as it is, and so do
the line numbers. The kinds of mistake are in `kinds`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from ...shell.source import syntax_tree
from .kinds import edits
from .source import Source, functions


class Mutant(NamedTuple):
    """A mistake in the source of one function: the bytes from `start` to `end` are replaced by `text`."""

    function: str  # "layernorm_backward", "Gate.backward"
    what: str  # the kind of mistake
    line: int
    start: int
    end: int
    text: str

    def plant(self, source: str) -> str:
        """The source with the mistake."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def difference(self, source: str) -> tuple[list[str], list[str]]:
        """The lines that change, before and after; nothing for a line that is deleted."""
        lines = zip(source.split("\n"), self.plant(source).split("\n"), strict=True)
        before, after = zip(*((old, new) for old, new in lines if old != new), strict=True)
        return list(before), [line for line in after if line.strip()]


def mutants(source: str, name: str) -> list[Mutant]:
    """All mistakes that can be planted in the function `name` ("op_backward", "Layer.backward") of a module's source.

    Each compiles, and none is equal to another or to the function as it stands. Raises ValueError if there is no such
    function, SyntaxError if the source is not Python.
    """
    node = next((node for function, node in functions(syntax_tree(source)) if function == name), None)
    if node is None:
        raise ValueError(f"there is no function {name}")
    return list(_Planter(Source(source, node), name).mutants())


class _Planter:
    """Turns the edits of one function into mutants."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name
        self.seen = {ast.dump(source.function)}

    def mutants(self) -> Iterator[Mutant]:
        for node in self.source.nodes:
            for what, place, text in edits(node, self.source):
                expected = self.expected(place, text) if isinstance(place, ast.expr) else None
                start, end = self.source.span(place)
                for form in [text] if expected is None else [text, f"({text})"]:
                    mutant = Mutant(self.name, what, self.source.line(start), start, end, self.padded(form, start, end))
                    tree = self.dump(mutant)
                    if tree and expected in (None, tree):
                        if tree not in self.seen:
                            self.seen.add(tree)
                            yield mutant
                        break

    def padded(self, text: str, start: int, end: int) -> str:
        """The text with as many line ends as what it replaces."""
        return text + "\n" * (self.source.data[start:end].count(b"\n") - text.count("\n"))

    def expected(self, place: ast.expr, text: str) -> str:
        """The syntax tree with this expression in the place of another."""
        new = ast.parse(f"({text})", mode="eval").body
        return self.source.dump_with(place, new)

    def dump(self, mutant: Mutant) -> str:
        """The syntax tree of the function with the mistake; "" if it does not compile."""
        start, end = self.source.whole_lines()
        rest = self.source.data[mutant.end : end].decode()
        code = "if 1:\n" * self.source.indented + self.source.data[start : mutant.start].decode() + mutant.text + rest
        try:
            tree = syntax_tree(code)
            compile(tree, "mutant", "exec")
        except (SyntaxError, ValueError):
            return ""
        return next(ast.dump(node) for _, node in functions(tree))

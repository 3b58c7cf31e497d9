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
    function = next((node for each, node in functions(syntax_tree(source)) if each == name), None)
    if function is None:
        raise ValueError(f"there is no function {name}")
    return list(_planted(Source(source, function), name))


def _planted(source: Source, name: str) -> Iterator[Mutant]:
    seen = {ast.dump(source.function)}
    for node in source.nodes:
        for what, place, text in edits(node, source):
            start, end = source.span(place)
            forms, expected = [text], None
            if isinstance(place, ast.expr):  # in brackets, if the text alone means something else there
                forms.append(f"({text})")
                expected = source.dump_with(place, ast.parse(forms[1], mode="eval").body)
            for form in forms:
                lines = source.data[start:end].count(b"\n") - form.count("\n")  # as many as before
                mutant = Mutant(name, what, source.line(start), start, end, form + "\n" * lines)
                tree = _dump(source, mutant)
                if tree and expected in (None, tree):
                    if tree not in seen:
                        seen.add(tree)
                        yield mutant
                    break


def _dump(source: Source, mutant: Mutant) -> str:
    """The syntax tree of the function with the mistake; "" if it does not compile."""
    start, end = source.whole_lines()
    rest = source.data[mutant.end : end].decode()
    code = "if 1:\n" * source.indented + source.data[start : mutant.start].decode() + mutant.text + rest
    try:
        tree = syntax_tree(code)
        compile(tree, "mutant", "exec")
    except (SyntaxError, ValueError):
        return ""
    return next(ast.dump(node) for _, node in functions(tree))

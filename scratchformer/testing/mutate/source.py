"""The source of a function as text and as a syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

Place: TypeAlias = "ast.AST | tuple[int, int]"  # a node, or bytes from start to end

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# What does not compute anything: messages of errors, and imports.
LEFT_ALONE = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each function of a module and each method of its classes, by name: "layernorm_backward", "Gate.backward"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, FUNCTION):
            yield prefix + node.name, node  # type: ignore[misc]  # an async function has the same fields
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from functions(node, prefix)


class Source:
    """A function in the text of its module: its nodes in order, their parents, their texts."""

    def __init__(self, text: str, function: ast.FunctionDef) -> None:
        self.text_of_module, self.function = text, function
        self.data = text.encode()
        self.indented = function.col_offset > 0
        self.lines = [0]
        for line in self.data.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        for statement in function.body[1 if ast.get_docstring(function) is not None else 0 :]:
            self._enter(statement, function)
        self.bound = self._bindings()

    def _enter(self, node: ast.AST, parent: ast.AST) -> None:
        """Note a node and what is below it, except annotations, decorators, and the context managers of `with`."""
        self.parents[node] = parent
        if isinstance(node, LEFT_ALONE):
            return
        self.nodes.append(node)
        skipped: list[ast.AST | None] = []
        if isinstance(node, FUNCTION):
            skipped = [node.args, node.returns, *node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            skipped = [node.annotation]
        elif isinstance(node, ast.withitem):
            skipped = [node.context_expr]
        for child in ast.iter_child_nodes(node):
            if child not in skipped:
                self._enter(child, node)

    def _bindings(self) -> dict[str, int]:
        """Where each local name is bound first."""
        arguments = self.function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        bound = {a.arg: 0 for a in every if a.arg not in ("self", "cls", "ctx")}
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                statement = self.statement(node)
                loop = isinstance(statement, (ast.For, ast.With))
                if not self.in_comprehension(node):
                    bound.setdefault(node.id, self.start(node) if loop else self.end(statement))
        return bound

    def in_comprehension(self, node: ast.AST) -> bool:
        while not isinstance(node, (ast.stmt, ast.comprehension)):
            node = self.parents[node]
        return isinstance(node, ast.comprehension)

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def whole_lines(self) -> tuple[int, int]:
        """From the first line of the function, decorators included, to its last."""
        first = min([self.function.lineno, *(node.lineno for node in self.function.decorator_list)])
        return self.lines[first - 1], self.lines[self.function.end_lineno or first] - 1

    def start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def span(self, place: Place) -> tuple[int, int]:
        return place if isinstance(place, tuple) else (self.start(place), self.end(place))

    def line(self, place: int) -> int:
        return self.data.count(b"\n", 0, place) + 1

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def atom(self, node: ast.AST) -> str:
        """The text of an expression, in brackets if an operator beside it could bind more tightly."""
        simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
        return self.text(node) if simple else f"({self.text(node)})"

    def with_part(self, node: ast.AST, part: ast.AST | tuple[int, int], text: str) -> str:
        """The text of a node with another text for a part of it."""
        start, end = self.span(part)
        return (self.data[self.start(node) : start] + text.encode() + self.data[end : self.end(node)]).decode()

    def exchanged(self, node: ast.AST, a: ast.AST, b: ast.AST) -> str:
        """The text of a node with two parts of it exchanged, of which a comes first."""
        pieces = self.start(node), self.start(a), self.end(a), self.start(b), self.end(b), self.end(node)
        first, _, middle, _, last = (self.data[i:j].decode() for i, j in pairwise(pieces))
        return first + self.text(b) + middle + self.text(a) + last

    def operator(self, left: ast.AST, right: ast.AST, operator: str) -> tuple[int, int]:
        """The place of an operator between two expressions."""
        start = self.end(left)
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.data[start : self.start(right)])
        match = re.search(rb"\s+".join(re.escape(word.encode()) for word in operator.split()), gap)
        if match is None:
            raise ValueError(f"no {operator} between {self.text(left)} and {self.text(right)}")
        return start + match.start(), start + match.end()

    def dump_with(self, place: ast.expr, new: ast.expr) -> str:
        """The syntax tree of the function with `new` in this place."""
        parent = self.parents[place]
        for field, value in ast.iter_fields(parent):
            parts = value if isinstance(value, list) else [value]
            if place in parts:
                changed = [new if part is place else part for part in parts]
                setattr(parent, field, changed if isinstance(value, list) else new)
                dump = ast.dump(self.function)
                setattr(parent, field, value)
                return dump
        raise ValueError(f"not in its parent: {ast.dump(place)}")

"""Expressions of trees as text, with parentheses only where the order of operations needs them.

Each printer derives from `Expressions` and says how its language spells functions, numbers and elements of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ..notation.grammar import Node
from .plan import Plan
from .trees import COLUMN, ROW

__all__ = ["ATOM", "LEVELS", "LOWEST", "POWER", "PRODUCT", "SUM", "Expressions"]

LOWEST, SUM, PRODUCT, SIGN, POWER, ATOM = range(6)  # how tightly the parts of an expression are held together
LEVELS = {"+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT}


class Expressions:
    """The expressions of a plan in a language, and the lines that have been written with them."""

    calls: Mapping[str, str] = {}  # functions whose names differ from those of the notation
    relations: Mapping[str, str] = {"=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "<": "<", ">": ">"}
    reserved: Collection[str] = ()  # names that variables must not have
    comment, indent = "#", "    "
    columns = "columns"  # the size of the column
    infinity = "np.inf"
    rounded = ""  # how a number is rounded to the type of the arrays, if it may have more digits

    def __init__(self, plan: Plan, depth: int) -> None:
        self.plan, self.depth = plan, depth
        self.arrays = {array.name: array for array in (*plan.reads, *plan.writes)}
        self.drawn = {self.variable(array.name) for array in plan.reads if array.kind == "bits"}
        self.body: list[str] = []
        self.late: list[str] = []  # the stores of a plan that reads what is there before
        self.sized: list[str] = []  # the axes whose sizes occur

    def put(self, line: str, text: str = "") -> None:
        """Write a line, with a comment."""
        self.body.append(f"{self.indent * self.depth}{line}{text and f'  {self.comment} {text}'}")

    def store(self, line: str) -> None:
        """Write a line that stores a value, or keep it until `flush` if later lines read what is there before."""
        self.late.append(line)
        if not self.plan.in_place:
            self.flush()

    def flush(self) -> None:
        for line in self.late:
            self.put(line)
        self.late.clear()

    def size(self, axis: str) -> str:
        """The variable that holds the size of an axis."""
        self.sized.append(axis)
        return {COLUMN: self.columns, ROW: "rows"}.get(axis, axis.upper())

    def place(self, axis: str) -> str:
        """The variable that holds the place on an axis."""
        return "c" if axis == COLUMN else axis

    def variable(self, name: str) -> str:
        """The variable for a name of the equations."""
        taken = name in self.reserved or name in ("rows", "columns") or name in map(self.place, self.plan.axes)
        return f"{name}_" if taken else name

    def text(self, tree: Node, outer: int = LOWEST) -> str:
        """The expression of a tree, in parentheses unless it is held together as tightly as `outer`."""
        text, level = self.expression(tree)
        return text if level >= outer else f"({text})"

    def expression(self, tree: Node) -> tuple[str, int]:
        """The expression of a tree, and how tightly its parts are held together."""
        kind, *parts = tree
        if kind in LEVELS:
            level = LEVELS[kind]
            return f"{self.text(parts[0], level)} {kind} {self.text(parts[1], level + 1)}", level
        if kind == "num":
            x = parts[0]
            if math.isinf(x):
                return f"-{self.infinity}" if x < 0 else self.infinity, SIGN if x < 0 else ATOM
            return str(int(x)) if x.is_integer() and abs(x) < 1e15 else repr(x), SIGN if x < 0 else ATOM
        if kind == "stored":
            return (self.rounded.format(self.text(parts[0])), ATOM) if self.rounded else self.expression(parts[0])
        if kind == "neg":
            return f"-{self.text(parts[0], POWER)}", SIGN
        if kind == "^" and parts[1] in (("num", 2.0), ("num", 3.0)):
            return " * ".join([self.text(parts[0], SIGN)] * int(parts[1][1])), PRODUCT
        if kind == "^":
            return f"{self.text(parts[0], ATOM)} ** {self.text(parts[1], POWER)}", POWER
        if kind == "call":
            return f"{self.calls.get(parts[0], parts[0])}({', '.join(map(self.text, parts[1]))})", ATOM
        if kind in ("number", "size"):
            return self.size(parts[0]) if kind == "size" else self.variable(parts[0]), ATOM
        return self.leaf(kind, parts)

    def test(self, relation: str, left: Node, right: Node) -> str:
        """The expression of a condition."""
        return f"{self.text(left, SUM)} {self.relations[relation]} {self.text(right, SUM)}"

    def leaf(self, kind: str, parts: list) -> tuple[str, int]:
        """The expression of a tree of a kind that every language writes in its way."""
        raise NotImplementedError(kind)

    def is_place(self, tree: Node) -> bool:
        """Whether a tree is an integer: a place, or an integer array's element."""
        kind, *parts = tree
        if kind == "value":
            return self.is_place(self.plan.values[parts[0]].tree)
        if kind == "num":
            return float(parts[0]).is_integer()
        if kind in ("+", "-", "*", "mod"):
            return all(map(self.is_place, parts))
        return kind in ("at", "size") or (kind == "load" and self.arrays[parts[0]].kind == "integer")

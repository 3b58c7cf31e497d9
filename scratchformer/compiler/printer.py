"""The base of the printers: expressions with as few parentheses as the order of operations allows, and the lines of a
pass.

Each printer derives from `Printer` and says how its language spells functions, numbers, variables and elements of
arrays.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..notation.grammar import Node, walk
from .axes import HERE
from .plan import Pass, Plan
from .trees import COLUMN, ROW, Array

__all__ = ["ATOM", "LEVELS", "LOWEST", "POWER", "PRODUCT", "SUM", "WIDTH", "Printer", "here"]

LOWEST, SUM, PRODUCT, SIGN, POWER, ATOM = range(6)  # how tightly the parts of an expression are held together
LEVELS = {"+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT}
WIDTH = 120


def here(axes: Iterable[str]) -> tuple[Node, ...]:
    """The places of the loops on these axes."""
    return tuple(("at", axis) for axis in axes)


class Printer:
    """The expressions of a plan in a language, and the lines that have been written with them."""

    calls: Mapping[
        str, str
    ] = {}  # functions that have other names than in the notation, and operators that are functions
    relations: Mapping[str, str] = {"=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "<": "<", ">": ">"}
    integers: Mapping[str, str] = {"mod": "%", "/": "//"}  # operators of integers
    reserved: Collection[str] = ()  # names that variables must not have
    comment, indent, const, end = "#", "    ", "", ""  # const, end: around the definition of a variable
    opens, closes = ":", ""  # around the lines of a block
    choice, both = "{1} if {0} else {2}", " and "
    starts: Mapping[str, str] = {}  # the lines before a loop with a sum or maximum
    adds: Mapping[str, str] = {}  # the lines in it
    columns = "columns"  # the size of the column
    infinity = "np.inf"
    rounded = ""  # how a number is rounded to the type of the arrays, if it may have more digits
    powers: Collection[float] = (2.0, 3.0)  # those that are products

    def __init__(self, plan: Plan, depth: int) -> None:
        self.plan, self.depth = plan, depth
        self.arrays = {array.name: array for array in (*plan.reads, *plan.writes)}
        axes = {*plan.axes, *(axis for array in self.arrays.values() for axis in array.axes)}
        self.taken = {*self.reserved, "rows", "columns", *map(self.place, axes), *(axis.upper() for axis in axes)}
        self.drawn = {self.variable(array.name) for array in plan.reads if array.kind == "bits"}
        self.kept = list(dict.fromkeys(name for each in plan.passes for name in each.keep))
        self.body: list[str] = []
        self.waits = plan.in_place  # whether stores come after all lines of a loop, which read what is there before
        self.late: list[str] = []  # the values to be stored then
        self.sized: list[str] = []  # the axes whose sizes occur

    def put(self, line: str, text: str = "", at: int | None = None) -> None:
        """Write a line, with a comment, which stands above it if the line would be too long. at: before which line."""
        margin = self.indent * self.depth
        whole, mark = f"{margin}{line}  {self.comment} {text}", f"{margin}{self.comment} "
        if text and len(whole) > WIDTH:
            above = textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=mark)
            whole = "\n".join([*above, margin + line])
        self.body.insert(len(self.body) if at is None else at, whole if text else margin + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write the lines around a block, such as a loop."""
        self.put((head + self.opens).lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        if self.closes:
            self.put(self.closes)

    def passes(self) -> None:
        """Write the lines for a row."""
        for each in self.plan.passes:
            for name in each.before:
                self.step(name)
            self.loop(each)
        for name in self.plan.last:
            self.step(name)

    def loop(self, each: Pass) -> None:
        """Write the loop of a pass over the columns."""
        raise NotImplementedError

    def let(self, variable: str, held: str, text: str = "") -> None:
        """Write the definition of a variable."""
        self.put(f"{self.const}{variable} = {held}{self.end}", text)

    def step(self, name: str) -> None:
        """Write the lines that compute and store a value of the loops."""
        value = self.plan.values[name]
        self.let(self.variable(name), self.text(value.tree), value.text)
        if any(array.name == name for array in self.plan.writes):
            self.late.append(name)
            if not self.waits:
                self.store()

    def store(self) -> None:
        """Write the lines that store values."""
        for name in self.late:
            self.put(f"{self.written(name)} = {self.narrow(name)}{self.end}")
        self.late.clear()

    def start(self, names: Iterable[str]) -> None:
        """Write the lines before a loop with these sums."""
        for name in names:
            self.put(self.starts[self.plan.sums[name].function].format(name))

    def add(self, names: Iterable[str]) -> None:
        """Write the lines that add a term to each of these sums."""
        for name in names:
            each = self.plan.sums[name]
            form = self.adds[each.function] if each.at is None else f"{{}} += {{}}{self.end}"
            self.put(form.format(name if each.at is None else self.written(name), self.text(each.tree)), each.text)

    def read_kept(self, each: Pass) -> None:
        for name in each.kept:
            self.let(self.variable(name), self.in_row(name))

    def steps(self, each: Pass, names: Iterable[str]) -> None:
        """Write what a loop over columns does for each of them. names: of the sums in it."""
        for name in each.steps:
            self.step(name)
            if name in each.keep:
                self.put(f"{self.in_row(name)} = {self.variable(name)}{self.end}")
        self.add(names)
        self.store()

    def places(self, name: str) -> Sequence[Node]:
        """Where a value, or a term of a sum over rows, is written."""
        return self.plan.sums[name].at or () if name in self.plan.sums else here(self.arrays[name].axes)

    def written(self, name: str) -> str:
        """The element of an array to which a value, or a term of a sum over rows, is written."""
        raise NotImplementedError(name)

    def in_row(self, name: str) -> str:
        """The element of the row in which a value is kept for later passes."""
        raise NotImplementedError(name)

    def narrow(self, name: str) -> str:
        """A value as the array takes it."""
        return self.variable(name)

    def size(self, axis: str) -> str:
        """The variable that holds the size of an axis."""
        self.sized.append(axis)
        return {COLUMN: self.columns, ROW: "rows"}.get(axis) or self.free(axis.upper())

    def find_size(self, axis: str) -> str:
        """The line that takes the size of an axis from an array."""
        array = next(a for a in self.arrays.values() if axis in a.axes and a.kind != "bits")
        return f"    {self.size(axis)} = {self.pointer(array)}.shape[{array.axes.index(axis)}]"

    def place(self, axis: str) -> str:
        """The variable that holds the place on an axis."""
        return "c" if axis == COLUMN else self.free(axis)

    def free(self, name: str) -> str:
        """A name for an axis that is no word of the loops."""
        return f"{name}_" if name == "c" or name in self.reserved else name

    def variable(self, name: str) -> str:
        """The variable for a name of the equations; the loops have variables too."""
        return f"{name}_" if name in self.taken else name

    def pointer(self, array: Array) -> str:
        """The variable for an array."""
        return self.variable(array.name) if array in self.plan.reads else f"to_{array.name}"

    def arguments(self) -> str:
        """The arrays that are read, the numbers and the arrays that are written."""
        plan = self.plan
        return ", ".join(
            [*map(self.pointer, plan.reads), *map(self.variable, plan.numbers), *map(self.pointer, plan.writes)]
        )

    def text(self, tree: Node, outer: int = LOWEST) -> str:
        """The expression of a tree, in parentheses unless it is held together as tightly as `outer`."""
        text, level = self.expression(tree)
        return text if level >= outer else f"({text})"

    def expression(self, tree: Node) -> tuple[str, int]:
        """The expression of a tree, and how tightly its parts are held together."""
        kind, *parts = tree
        if kind == "^" and parts[1][0] == "num" and parts[1][1] in self.powers:
            return " * ".join([self.text(parts[0], SIGN)] * int(parts[1][1])), PRODUCT
        if kind in self.calls:
            kind, parts = "call", [kind, parts]
        if kind in LEVELS or kind == "mod":
            level = LEVELS.get(kind, PRODUCT)
            sign = "%" if kind == "mod" else kind
            return f"{self.text(parts[0], level)} {sign} {self.text(parts[1], level + 1)}", level
        if kind == "num":
            x = parts[0]
            if math.isinf(x):
                return f"-{self.infinity}" if x < 0 else self.infinity, SIGN if x < 0 else ATOM
            return str(int(x)) if x.is_integer() and abs(x) < 1e15 else repr(x), SIGN if x < 0 else ATOM
        if kind == "stored":
            return (self.rounded.format(self.text(parts[0])), ATOM) if self.rounded else self.expression(parts[0])
        if kind == "neg":
            return f"-{self.text(parts[0], POWER)}", SIGN
        if kind == "^":
            return f"{self.text(parts[0], ATOM)} ** {self.text(parts[1], POWER)}", POWER
        if kind == "call":
            return f"{self.calls.get(parts[0], parts[0])}({', '.join(map(self.text, parts[1]))})", ATOM
        if kind == "if":
            return self.chosen(*parts)
        if kind == "size":
            return self.size(parts[0]), ATOM
        if kind == "number":
            return self.variable(parts[0]), ATOM
        return self.computed(parts[0]) if kind in ("value", "sum") else self.leaf(kind, parts), ATOM

    def computed(self, name: str) -> str:
        """The expression of a value or sum."""
        return self.variable(name)

    def chosen(self, conditions: Sequence[tuple], a: Node, b: Node) -> tuple[str, int]:
        """The expression that is a where all conditions hold, else b."""
        tests = self.both.join(self.test(*condition) for condition in conditions)
        return self.choice.format(tests, self.text(a, SUM), self.text(b, SUM)), LOWEST

    def leaf(self, kind: str, parts: list) -> str:
        """The expression of a tree of a kind that every language writes in its way."""
        raise NotImplementedError(kind)

    def test(self, relation: str, left: Node, right: Node) -> str:
        """The expression of a condition."""
        if self.is_place(left) and self.is_place(right):
            return f"{self.index(left)} {self.relations[relation]} {self.index(right)}"
        return f"{self.text(left, SUM)} {self.relations[relation]} {self.text(right, SUM)}"

    def is_place(self, tree: Node) -> bool:
        """Whether a tree is an integer: a place, or an integer array's element."""
        kind, *parts = tree
        if kind == "value":
            return self.is_place(self.plan.values[parts[0]].tree)
        if kind == "num":
            return float(parts[0]).is_integer()
        if kind in ("+", "-", "*", "mod"):
            return all(map(self.is_place, parts))
        array = self.arrays.get(parts[0]) if kind == "load" else None  # None for one that only the head reads
        return kind in ("at", "size") or (array is not None and array.kind == "integer")

    def index(self, tree: Node) -> str:
        """The expression of a tree that is an integer."""
        kind, *parts = tree
        if kind == "load":
            return f"{self.variable(parts[0])}[{', '.join(map(self.index, parts[1]))}]"
        if kind == "value":
            return self.index(self.plan.values[parts[0]].tree)
        if kind in ("at", "size", "num"):
            return {"at": self.place, "size": self.size, "num": lambda x: str(int(x))}[kind](parts[0])
        return f"({self.index(parts[0])} {self.integers.get(kind, kind)} {self.index(parts[1])})"

    def has_column(self, trees: Any) -> bool:
        """Whether a tree, or one of several, depends on the column."""
        values = self.plan.values
        return any(x == HERE or (x[0] == "value" and self.has_column(values[x[1]].tree)) for x in walk(trees))

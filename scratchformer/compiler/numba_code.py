"""The loops of a plan as source for Numba."""

from __future__ import annotations

import keyword
from collections.abc import Iterator

from ..notation.grammar import Node
from .plan import Pass, Plan, names
from .trees import COLUMN, ROW, Array

__all__ = ["numba_source"]

INDENT = "    "
BLOCK = 1024  # random integers that are drawn before they are used
RELATIONS = {"=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "<": "<", ">": ">"}
CALLS = {"sqrt": "np.sqrt", "floor": "np.floor", "abs": "abs", "max": "max", "min": "min"}


def numba_source(plan: Plan) -> str:
    """The source of a function of the arrays that the plan reads, its numbers and the arrays that it writes.

    Numbers are of the type R in which the loops compute. The function returns 0, or NaN if a sum was not finite.
    """
    return "\n".join(Printer(plan).lines()) + "\n"


def size(axis: str) -> str:
    """The variable that holds the size of an axis."""
    return {COLUMN: "columns", ROW: "rows"}.get(axis, axis.upper())


def variable(name: str) -> str:
    """The variable for a name of the equations."""
    return f"{name}_" if keyword.iskeyword(name) or name in ("R", "np", "c") else name


class Printer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outer, self.inner = [axis for axis in plan.axes if axis != COLUMN], COLUMN in plan.axes
        self.arrays = {array.name: array for array in (*plan.reads, *plan.writes)}
        self.bits = next((array.name for array in plan.reads if array.kind == "bits"), "")
        self.block = False  # whether the loop is over a block of columns

    def lines(self) -> Iterator[str]:
        plan = self.plan
        arguments = [*(variable(a.name) for a in plan.reads), *map(variable, plan.numbers)]
        arguments += [f"to_{variable(array.name)}" for array in plan.writes]
        yield f"def {plan.name}({', '.join(arguments)}):"
        stored = [array for array in self.arrays.values() if array.kind != "bits"]
        for axis in dict.fromkeys(axis for array in stored for axis in array.axes):
            array = next(a for a in stored if axis in a.axes)
            prefix = "" if array in plan.reads else "to_"
            yield f"{INDENT}{size(axis)} = {prefix}{variable(array.name)}.shape[{array.axes.index(axis)}]"
        yield f"{INDENT}finite = R(0)"
        for name in dict.fromkeys(name for each in plan.passes for name in each.keep):
            yield f"{INDENT}row_{variable(name)} = np.empty(columns, R)"
        if self.bits:
            yield f"{INDENT}words = np.empty({BLOCK // 4 + 1}, np.uint64)"
        depth = 1
        for axis in self.outer:
            yield f"{INDENT * depth}for {axis} in range({size(axis)}):"
            depth += 1
        for each in plan.passes:
            yield from (INDENT * depth + line for line in self.row(each))
        for name in plan.last:
            yield from (INDENT * depth + line for line in self.step(name))
        yield f"{INDENT}return finite"

    def row(self, each: Pass) -> Iterator[str]:
        """The lines of a pass over a row."""
        for name in each.before:
            yield from self.step(name)
        for name in each.sums:
            if self.plan.sums[name].function == "max":
                yield (
                    f"{name} = maximum_of_row({self.whole_row(name)}, n)"
                    if self.whole_row(name)
                    else f"{name} = R(-np.inf)"
                )
            else:
                yield f"{name} = R(0)"
        sums = [name for name in each.sums if not self.whole_row(name)]
        if sums or each.totals or each.stores:
            if self.draws(each):
                yield from self.blocks(each, sums)
            else:
                yield "for c in range(columns):"
                yield from (INDENT + line for line in self.column(each, sums))
        for name in each.sums:
            if self.plan.sums[name].function == "sum":
                yield f"finite += R(0) * {name}"

    def draws(self, each: Pass) -> bool:
        """Whether a pass uses random integers."""
        return any(self.bits and self.bits in names([self.plan.values[name].tree]) for name in each.steps)

    def blocks(self, each: Pass, sums: list[str]) -> Iterator[str]:
        """A pass in blocks of columns, for each of which random integers are drawn first. It takes slices of the arrays,
        since LLVM does not make vectors of a loop over first + i.
        """
        self.block = True
        lines = [*self.column(each, sums)]
        self.block = False
        yield f"for first in range(0, columns, {BLOCK}):"
        yield f"{INDENT}place = {self.row_start()}first"
        yield f"{INDENT}draw(words, {variable(self.bits)}, place // 4)"
        yield f"{INDENT}drawn = words.view(np.uint16)[place % 4 :]"
        for array, prefix in ((array, "to_" * (array in self.plan.writes)) for array in self.arrays.values()):
            if array.axes[-1:] == (COLUMN,) and array.kind != "bits":
                places = ", ".join([*array.axes[:-1], f"first : first + {BLOCK}"])
                yield f"{INDENT}{prefix}{variable(array.name)}_part = {prefix}{variable(array.name)}[{places}]"
        yield f"{INDENT}for i in range(min({BLOCK}, columns - first)):"
        yield from (INDENT * 2 + line for line in ("c = first + i", *lines))

    def column(self, each: Pass, sums: list[str]) -> Iterator[str]:
        """What a pass does in each column."""
        for name in each.kept:
            yield f"{variable(name)} = row_{variable(name)}[c]"
        for name in each.steps:
            yield from self.step(name)
            if name in each.keep:
                yield f"row_{variable(name)}[c] = {variable(name)}"
        for name in sums:
            function = "plus" if self.plan.sums[name].function == "sum" else "max"
            yield f"{name} = {function}({name}, {self.text(self.plan.sums[name].tree)})  # {self.plan.sums[name].text}"
        for name in each.totals:
            total = self.plan.sums[name]
            places = ", ".join(self.place(place) for place in total.at or ())
            yield f"to_{name}[{places}] += {self.text(total.tree)}  # {total.text}"

    def row_start(self) -> str:
        """What is added to a column for its place among all numbers."""
        start = "0"
        for axis in self.outer:
            start = f"({start} * {size(axis)} + {axis})" if start != "0" else axis
        return f"{start} * columns + " if self.outer else ""

    def whole_row(self, name: str) -> str:
        """The array whose rows a sum takes the maximum of, or ""."""
        each = self.plan.sums[name]
        rows = (
            each.tree[0] == "load" and each.tree[2] == (("at", ROW), ("at", COLUMN)) and self.plan.axes == (ROW, COLUMN)
        )
        return variable(each.tree[1]) if each.function == "max" and rows else ""

    def step(self, name: str) -> Iterator[str]:
        value = self.plan.values[name]
        comment = f"  # {value.text}" if value.text else ""
        yield f"{variable(name)} = {self.text(value.tree)}{comment}"
        for array in self.plan.writes:
            if array.name == name:
                to = f"to_{variable(name)}" + "_part" * (self.block and array.axes[-1] == COLUMN)
                places = self.places(to, tuple(("at", axis) for axis in array.axes))
                stored = {"real": f"narrow({variable(name)}, {to})", "bool": f"{variable(name)} > R(0)"}[array.kind]
                yield f"{places} = {stored}"

    def text(self, tree: Node) -> str:
        """The expression of a tree, of type R."""
        kind, *parts = tree
        if kind == "num":
            return f"R({parts[0]!r})"
        if kind in ("number", "value"):
            return variable(parts[0])
        if kind == "sum":
            return parts[0]
        if kind == "load":
            return self.load(self.arrays[parts[0]], parts[1])
        if kind in ("at", "size"):
            return f"R({self.place(tree)})"
        if kind == "neg":
            return f"(-{self.text(parts[0])})"
        if kind == "^":
            return self.power(*parts)
        if kind == "call":
            return f"{CALLS.get(parts[0], parts[0])}({', '.join(map(self.text, parts[1]))})"
        if kind == "if":
            tests = " and ".join(self.test(*condition) for condition in parts[0])
            return f"({self.text(parts[1])} if {tests} else {self.text(parts[2])})"
        return f"({self.text(parts[0])} {'%' if kind == 'mod' else kind} {self.text(parts[1])})"

    def power(self, base: Node, exponent: Node) -> str:
        if exponent[0] == "num" and exponent[1] in (2, 3, 4):
            return f"({' * '.join([self.text(base)] * int(exponent[1]))})"
        return f"({self.text(base)} ** {self.text(exponent)})"

    def test(self, relation: str, left: Node, right: Node) -> str:
        show = self.place if self.is_place(left) and self.is_place(right) else self.text
        return f"{show(left)} {RELATIONS[relation]} {show(right)}"

    def places(self, array: str, places: tuple[Node, ...]) -> str:
        """An element of an array, or of the part of it that a block has."""
        if array.endswith("_part"):
            return f"{array}[i]"
        return f"{array}[{', '.join(map(self.place, places))}]" if places else array

    def load(self, array: Array, places: tuple[Node, ...]) -> str:
        part = self.block and array.kind != "bits" and places[-1:] == (("at", COLUMN),)
        before = "to_" * (array in self.plan.writes)
        element = self.places(f"{before}{variable(array.name)}" + "_part" * part, places)
        if array.kind == "bits":
            return "R(drawn[i])"
        return f"read({element})" if array.kind == "real" else f"R({element})"

    def is_place(self, tree: Node) -> bool:
        """Whether a tree is an integer: a place, or an integer array's element."""
        kind, *parts = tree
        if kind == "value":
            return self.is_place(self.plan.values[parts[0]].tree)
        if kind == "num":
            return float(parts[0]).is_integer()
        if kind in ("+", "-", "*", "/", "mod"):
            return all(map(self.is_place, parts))
        return kind in ("at", "size") or (kind == "load" and self.arrays[parts[0]].kind == "integer")

    def place(self, tree: Node) -> str:
        """The expression of a tree that is an index."""
        kind, *parts = tree
        if kind == "at":
            return "c" if parts[0] == COLUMN else parts[0]
        if kind == "size":
            return size(parts[0])
        if kind == "num":
            return str(int(parts[0]))
        if kind == "value":
            return self.place(self.plan.values[parts[0]].tree)
        if kind == "load":
            return f"{variable(parts[0])}[{', '.join(map(self.place, parts[1]))}]"
        return (
            f"({self.place(parts[0])} {dict(mod='%').get(kind, '//' if kind == '/' else kind)} {self.place(parts[1])})"
        )

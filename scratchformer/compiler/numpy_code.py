"""A plan as source for NumPy: each step is computed for a block of rows, which stays in the processor's cache."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator, Sequence

from ..notation.grammar import Node, walk
from .plan import Pass, Plan
from .text import ATOM, LEVELS, LOWEST, SIGN, Expressions
from .trees import COLUMN, Array

__all__ = ["numpy_source"]

INDENT = "    "
BLOCK = 1 << 15  # numbers of a block: a few arrays of this size fit in the second-level cache
UFUNCS = {"+": "np.add", "-": "np.subtract", "*": "np.multiply", "/": "np.divide", "neg": "np.negative"}
CALLS = ("exp", "log", "sqrt", "tanh", "sin", "cos", "abs", "floor")


def numpy_source(plan: Plan) -> str:
    """The source of a function of the arrays that the plan reads, its numbers and the arrays that it writes.

    It returns False if a sum was not finite. What has no column is an array with one column.
    """
    return "\n".join(Printer(plan).lines()) + "\n"


class Printer(Expressions):
    calls = {**{name: f"np.{name}" for name in CALLS}, "max": "np.maximum", "min": "np.minimum"}  # noqa: RUF012
    reserved = (*keyword.kwlist, "R", "np", "c", "first", "step", "finite", "erf", "drawn")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.body: list[str] = []
        self.integers = False  # whether places are printed as integers
        trees = [value.tree for name, value in plan.values.items() if name not in (*plan.head, *plan.tail)]
        trees += [part for each in plan.sums.values() for part in (each.tree, *(each.at or ()))]
        nodes = [node for tree in trees for node in walk(tree)]
        self.counts = Counter(node for node in nodes if node[0] in (*LEVELS, "^"))
        self.named: dict[Node, str] = {}  # trees that occur more than once
        self.loops = {name: value.tree for name, value in plan.values.items() if name not in plan.head}

    def lines(self) -> Iterator[str]:
        plan, outer = self.plan, self.plan.axes[0]
        arguments = [*(self.variable(array.name) for array in plan.reads), *map(self.variable, plan.numbers)]
        yield f"def {plan.name}({', '.join([*arguments, *(f'to_{array.name}' for array in plan.writes)])}):"
        for each in plan.passes:
            self.row(each)
        for name in plan.last:
            self.step(name)
        body = "\n".join(f"{INDENT * 2}{line}" for line in self.body)
        axes = [axis for axis in plan.axes if self.size(axis) in body or axis == outer or axis in plan.axes[1:]]
        for axis in axes:
            array = next(a for a in self.arrays.values() if axis in a.axes and a.kind != "bits")
            name = self.variable(array.name) if array in plan.reads else f"to_{array.name}"
            yield f"{INDENT}{self.size(axis)} = {name}.shape[{array.axes.index(axis)}]"
        if "R(" in body or "R)" in body:
            yield f"{INDENT}R = to_{plan.writes[0].name}.dtype.type"
        yield f"{INDENT}finite = True"
        others = " * ".join(map(self.size, plan.axes[1:]))
        yield f"{INDENT}step = {f'max(1, {BLOCK} // ({others}))' if others else BLOCK}"
        yield f"{INDENT}for first in range(0, {self.size(outer)}, step):"
        yield f"{INDENT * 2}{self.place(outer)} = slice(first, first + step)"
        yield body
        yield f"{INDENT}return finite"

    def put(self, line: str, text: str = "") -> None:
        self.body.append(f"{line}{text and f'  # {text}'}")

    def row(self, each: Pass) -> None:
        """The lines of a pass over the rows of a block. What earlier passes have computed is still there."""
        for name in (*each.before, *each.steps):
            if name not in each.kept:
                self.step(name)
        for name in each.sums:
            self.put(f"{name} = {self.reduced(self.plan.sums[name].function, self.plan.sums[name].tree)}", self.plan.sums[name].text)
            if self.plan.sums[name].function == "sum":
                self.put(f"finite &= np.isfinite({name}).all()")
        for name in each.totals:
            total = self.plan.sums[name]
            axes = [axis for axis in self.plan.axes if ("at", axis) in (total.at or ())]
            if total.at == tuple(("at", axis) for axis in total.axes) and list(total.axes) == axes:
                over = tuple(i for i, axis in enumerate(self.plan.axes) if axis not in axes)
                to = f"to_{name}[{self.place(axes[0])}]" if axes[0] == self.plan.axes[0] else f"to_{name}"
                self.put(f"{to} += np.sum({self.text(total.tree)}, axis={over if over[1:] else over[0]})", total.text)
            else:
                self.put(f"np.add.at(to_{name}, ({self.grid(total.at or ())}), {self.text(total.tree)})", total.text)

    def step(self, name: str) -> None:
        """The lines that compute a value."""
        if name in self.body_names:
            return

"""A plan as source for NumPy: each step is computed for a block of rows, which stays in the processor's cache."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator, Sequence

from ..notation.grammar import Node, walk
from .axes import HALF
from .plan import Pass, Plan
from .printer import ATOM, LEVELS, PRODUCT, Printer, here
from .trees import COLUMN

__all__ = ["numpy_source"]

BLOCK = 1 << 16  # numbers of a block: a few arrays of this size fit in the second-level cache
CALLS = ("exp", "log", "log1p", "sqrt", "tanh", "sin", "cos", "abs", "floor")
OTHER_HALF = ("-", ("num", 1.0), ("at", HALF))
PLAIN = (OTHER_HALF, ("num", 0.0))  # places that are slices
UFUNCS = {"+": "np.add", "-": "np.subtract", "*": "np.multiply", "/": "np.divide", "neg": "np.negative"}


def numpy_source(plan: Plan) -> str:
    """The source of a function of the arrays that the plan reads, its numbers and the arrays that it writes.

    Every value is an array with the axes of the loops; those on which it does not depend have size 1. The function
    returns False if a sum was not finite.
    """
    return "\n".join(NumpyPrinter(plan).lines()) + "\n"


class NumpyPrinter(Printer):
    calls = {**{name: f"np.{name}" for name in CALLS}, "max": "np.maximum", "min": "np.minimum"}  # noqa: RUF012
    reserved = (*keyword.kwlist, "R", "np", "first", "step", "finite", "ones", "erf", "drawn")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, 2)
        self.counting = False  # whether integers are being printed
        self.done: set[str] = set()
        self.named: dict[Node, str] = {}  # the variables of trees that occur more than once
        trees = [value.tree for name, value in plan.values.items() if name not in (*plan.head, *plan.tail)]
        trees += [each.tree for each in plan.sums.values()]
        self.counts = Counter(node for tree in trees for node in walk(tree) if node[0] in LEVELS)

    def lines(self) -> Iterator[str]:
        plan, (outer, *others) = self.plan, self.plan.axes
        self.passes()
        yield f"def {plan.name}({self.arguments()}):"
        yield from map(self.find_size, dict.fromkeys([*plan.axes, *self.sized]))
        source = "\n".join(self.body)
        if "R(" in source or "R)" in source or "ones[" in source:
            yield f"    R = to_{plan.writes[0].name}.dtype.type"
        width = " * ".join(map(self.size, others))
        yield f"    step = {f'max(1, {BLOCK} // ({width}))' if others else BLOCK}"
        if "ones[" in source:
            yield "    ones = np.ones(max(step, columns), R)  # a sum is a product with them"
        yield "    finite = True"
        yield f"    for first in range(0, {self.size(outer)}, step):"
        yield f"        {self.place(outer)} = slice(first, min(first + step, {self.size(outer)}))"
        yield from (*self.body, "    return finite")

    def loop(self, each: Pass) -> None:
        """The lines of a pass. The values of the passes before it are still there."""
        for name in each.steps:
            self.step(name)
        for name in each.sums:
            total = self.plan.sums[name]
            self.put(f"{name} = {self.over_columns(total.function, total.tree)}", total.text)
            if total.function == "sum":
                self.put(f"finite &= np.isfinite({name}).all()")
        for name in each.totals:
            total, at = self.plan.sums[name], self.plan.sums[name].at or ()
            left = [axis for axis in self.plan.axes if ("at", axis) in at]
            if list(at) == [("at", axis) for axis in left]:
                over = ", ".join(str(i) for i, axis in enumerate(self.plan.axes) if axis not in left)
                rows = f"ones[: {self.place(self.plan.axes[0])}.stop - first] @ {self.text(total.tree, ATOM)}"
                summed = rows if over == "0" and len(left) == 1 else f"np.sum({self.text(total.tree)}, axis=({over},))"
                to = f"to_{name}[{self.place(left[0])}]" if left[0] == self.plan.axes[0] else f"to_{name}"
                self.put(f"{to} += {summed}", total.text)
            else:
                self.put(f"np.add.at(to_{name}, ({self.index(*at)}), {self.text(total.tree)})", total.text)
        self.store()

    def over_columns(self, function: str, tree: Node) -> str:
        """The expression of a sum or maximum over the columns. That of a product is one of vectors."""
        if not self.has_column(tree):
            return self.text(("*", ("size", COLUMN), tree) if function == "sum" else tree)
        if function == "sum" and tree[0] == "^" and tree[2] == ("num", 2.0):
            tree = ("*", tree[1], tree[1])
            self.counts[tree[1]] += tree[1][0] in LEVELS
        if function == "sum" and tree[0] == "*" and all(map(self.has_column, tree[1:])):
            return f"np.vecdot({self.text(tree[1])}, {self.text(tree[2])})[..., None]"
        if function == "sum":
            return f"({self.text(tree, PRODUCT)} @ ones[:columns])[..., None]"
        return f"np.max({self.text(tree)}, axis=-1, keepdims=True)"

    def step(self, name: str) -> None:
        """The lines that compute a value, unless it is there."""
        if name in self.done:
            return
        self.done.add(name)
        value = self.plan.values[name]
        kind, *parts = value.tree
        axes = self.arrays[name].axes if name in self.arrays else None
        in_order = axes == tuple(axis for axis in self.plan.axes if axis in (axes or ()))  # so that it is a view
        if in_order and kind in UFUNCS and self.counts[value.tree] < 2 and not self.plan.in_place:
            given = ", ".join([*map(self.text, parts), f"out={self.written(name)}"])
            self.let(self.variable(name), f"{UFUNCS[kind]}({given})", value.text)
        else:
            super().step(name)

    def written(self, name: str) -> str:
        view = self.view(f"to_{name}", self.arrays[name].axes)
        return view if view.endswith("]") else f"{view}[...]"

    def expression(self, tree: Node) -> tuple[str, int]:
        if tree[0] == "/" and self.counting:
            return f"{self.text(tree[1], PRODUCT)} // {self.text(tree[2], PRODUCT + 1)}", PRODUCT
        if self.counts[tree] < 2 or self.counting:
            return super().expression(tree)
        if tree not in self.named:
            text = super().expression(tree)[0]
            self.named[tree] = f"t_{len(self.named)}"  # no name of the equations has an underscore
            self.put(f"{self.named[tree]} = {text}")
        return self.named[tree], ATOM

    def view(self, name: str, axes: Sequence[str], places: Sequence[Node] | None = None) -> str:
        """The part of an array that belongs to the block, with axes of size 1 where it lacks some."""
        loops, places = [*self.plan.axes], here(axes) if places is None else places
        parts = {}
        for axis, place in zip(axes, places, strict=True):
            axis = place[1] if place[0] == "at" else HALF if place == OTHER_HALF else axis
            part = {"at": ":", "-": "::-1"}.get(place[0], "0:1") if place in (*PLAIN, ("at", axis)) else ""
            parts[axis] = self.place(axis) if part == ":" and axis == loops[0] else part
        if "" in parts.values() or [*parts] != [axis for axis in loops if axis in parts] or len(parts) < len(axes):
            return f"{name}[{self.index(*places)}]"
        skipped = loops.index(next(iter(parts))) if parts else len(loops)
        indices = [parts.get(axis, "None") for axis in loops[skipped:]]
        while indices and indices[-1] == ":":
            indices.pop()
        return f"{name}[{', '.join(indices)}]" if indices else name

    def index(self, *trees: Node) -> str:
        before, self.counting = self.counting, True
        text = ", ".join(map(self.text, trees))
        self.counting = before
        return text

    def test(self, relation: str, left: Node, right: Node) -> str:
        return f"({super().test(relation, left, right)})"

    def chosen(self, conditions: Sequence[tuple], a: Node, b: Node) -> tuple[str, int]:
        holds = " & ".join(self.test(*condition) for condition in conditions)
        if (a, b) == (("num", 1.0), ("num", 0.0)):
            return f"np.asarray({holds}, R)", ATOM
        texts = (f"R({self.text(x)})" if x[0] in ("num", "number") else self.text(x) for x in (a, b))
        return f"np.where({', '.join([holds, *texts])})", ATOM

    def leaf(self, kind: str, parts: list) -> str:
        if kind == "at":
            index = self.plan.axes.index(parts[0])
            block = [self.place(parts[0]) if index == 0 else ":", *["None"] * (len(self.plan.axes) - index - 1)]
            places = f"np.arange({self.size(parts[0])}{'' if self.counting else ', dtype=R'})"
            return places + (f"[{', '.join(block)}]" if block != [":"] else "")
        array = self.arrays[parts[0]]
        if array.kind == "bits":
            sizes = ", ".join(map(self.size, self.plan.axes))
            return f"drawn({self.pointer(array)}, {self.place(self.plan.axes[0])}, ({sizes},))"
        view = self.view(self.pointer(array), array.axes, parts[1])
        return view if array.kind == "real" or self.counting else f"{view}.astype(R)"

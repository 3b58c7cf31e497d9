"""A plan as source in JavaScript, which computes the whole operation: head, loops and tail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..notation.grammar import Node, walk
from .axes import HALF
from .plan import Pass, Plan
from .printer import SUM, Printer, here
from .trees import COLUMN

__all__ = ["javascript_source"]

MATH = ("exp", "log", "log1p", "sqrt", "tanh", "sin", "cos", "abs", "floor", "max", "min")
HELPERS = {
    "erf": """\
  function erf(x) {  // 2/√π exp(−x²) Σ_k 2^k x^(2k+1)/(1 · 3 · ... · (2k+1)): no term is subtracted from another
    if (Math.abs(x) > 6) return Math.sign(x);
    let sum = x;
    for (let k = 1, term = x; Math.abs(term) > 1e-17 * Math.abs(sum); k++) sum += term *= 2 * x * x / (2 * k + 1);
    return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
  }""",
    "mod": "  const mod = (a, b) => a - b * Math.floor(a / b);",
    "drawn": """\
  function drawn(start, i) {  // the random integer number i, from 0 to 65535: a quarter of a word of SplitMix64
    const bits = (x) => BigInt.asUintN(64, x);
    let word = bits(start + BigInt(Math.floor(i / 4)) * 0x9e3779b97f4a7c15n);
    word = bits((word ^ (word >> 30n)) * 0xbf58476d1ce4e5b9n);
    word = bits((word ^ (word >> 27n)) * 0x94d049bb133111ebn);
    return Number((word ^ (word >> 31n)) >> BigInt(16 * (i % 4)) & 0xffffn);
  }""",
}
RESERVED = "case catch class const default do enum export for function if in let new of this try var void"


def javascript_source(plan: Plan) -> str:
    """The source of a function that takes an object with the inputs by name, and returns one with the results.

    Arrays are typed arrays, one row after the other; random bits are the BigInt where they start. Of the sizes of axes
    (rows, columns, others by their capital letters) it takes those that are not the length of an input.
    """
    return "\n".join(JavaScriptPrinter(plan).lines()) + "\n"


class JavaScriptPrinter(Printer):
    calls = {**{name: f"Math.{name}" for name in MATH}, "mod": "mod"}  # noqa: RUF012
    relations = {**Printer.relations, "=": "===", "≠": "!=="}  # noqa: RUF012
    reserved = (*RESERVED.split(), *HELPERS, "Math", "BigInt", "Number")
    comment, indent, const, end, opens, closes = "//", "  ", "const ", ";", " {", "}"
    infinity = "Infinity"
    choice, both = "{0} ? {1} : {2}", " && "
    starts = {"sum": "let {} = 0;", "max": "let {} = -Infinity;"}  # noqa: RUF012
    adds = {"sum": "{} += {};", "max": "{0} = Math.max({0}, {1});"}  # noqa: RUF012

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, 1)
        nodes = [node for tree in plan.trees for node in walk(tree)]
        read = {node[1]: node[2] if node[0] == "load" else () for node in nodes if node[0] in ("load", "number")}
        self.stored: dict[str, tuple[str, tuple[str, ...]]] = {}  # the variables of arrays and numbers, and their axes
        for name in sorted(read):
            written = name in [array.name for array in plan.writes]  # and read before, in place
            axes = self.arrays[name].axes if name in self.arrays else tuple(place[1] for place in read[name])
            if written or name not in plan.values:
                self.stored[name] = f"to_{name}" if written else self.variable(name), axes

    def lines(self) -> Iterator[str]:
        plan, inputs = self.plan, dict(self.stored)
        for name in plan.head:
            self.whole(name)
        self.columns = "columns / 2" if HALF in plan.axes else "columns"
        for array in (array for array in plan.writes if array.name not in inputs):
            self.let(f"to_{array.name}", self.new(array.axes))
        for name in self.kept:
            self.let(f"row_{name}", self.new([COLUMN]))
        with self.loops(axis for axis in plan.axes if axis != COLUMN):
            self.passes()
        self.columns = "columns"
        self.stored |= {array.name: (f"to_{array.name}", array.axes) for array in plan.writes}
        for name in plan.tail:
            self.whole(name)
        self.put(f"return {{ {', '.join(f'{name}: {self.stored[name][0]}' for name in plan.results)} }};")
        lengths = {axes: variable for name, (variable, axes) in inputs.items() if name not in self.drawn}
        sizes = {axis: self.size(axis) for axis in dict.fromkeys(self.sized)}
        names = [name if name == variable else f"{name}: {variable}" for name, (variable, _) in inputs.items()]
        names += [size for axis, size in sizes.items() if (axis,) not in lengths]
        yield f"function {plan.name}({{ {', '.join(names)} }}) {{"
        yield from (text for name, text in HELPERS.items() if any(f"{name}(" in line for line in self.body))
        yield from (f"  const {sizes[axis]} = {lengths[axis,]}.length;" for axis in sizes if (axis,) in lengths)
        yield from (*self.body, "}")

    def size(self, axis: str) -> str:
        return "2" if axis == HALF else super().size(axis)

    @contextmanager
    def loops(self, axes: Iterable[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for axis in axes:
                at = self.place(axis)
                stack.enter_context(self.block(f"for (let {at} = 0; {at} < {self.size(axis)}; {at}++)"))
            yield

    def new(self, axes: Sequence[str]) -> str:
        return f"new Float64Array({' * '.join(map(self.size, axes))})"

    def loop(self, each: Pass) -> None:
        self.start(each.sums)
        with self.loops([COLUMN] if each.sums or each.totals or each.stores else []):
            self.read_kept(each)
            self.steps(each, (*each.sums, *each.totals))

    def written(self, name: str) -> str:
        return self.element(f"to_{name}", self.arrays[name].axes, self.places(name))

    def in_row(self, name: str) -> str:
        return f"row_{name}[c]"

    def whole(self, name: str) -> None:
        """The lines that compute a value of the head or the tail, number by number."""
        value, variable = self.plan.values[name], self.variable(name)
        axes = self.arrays[name].axes if name in self.arrays else self.axes_in(value.tree)
        if value.tree[0] == "sum":
            variable = f"to_{value.tree[1]}"
        else:
            self.let(variable, self.new(axes) if axes else self.text(value.tree), value.text)
        if value.tree[0] != "sum" and axes:
            with self.loops(axes):
                self.put(f"{self.element(variable, axes)} = {self.text(value.tree)};")
        self.stored[name] = variable, axes

    def axes_in(self, tree: Any) -> tuple[str, ...]:
        """The axes of a tree of the head or the tail, which are the axes of its largest array."""
        if not isinstance(tree, tuple) or tree[:1] == ("over",):
            return ()
        if tree and tree[0] in ("value", "sum", "load"):
            return self.stored[tree[1]][1]
        return max(map(self.axes_in, tree), key=len, default=())

    def total(self, function: str, tree: Node) -> str:
        """The variable of a sum over all rows, which is computed by lines that are put here."""
        axes, name = self.axes_in(tree), f"total_{len(self.body)}"
        self.put(f"let {name} = 0;")
        with self.loops(axes):
            self.put(f"{name} += {self.text(tree)};")
        return name if function == "sum" else f"({' / '.join([name, *map(self.size, axes)])})"

    def element(self, variable: str, axes: Sequence[str], places: Sequence[Node] | None = None) -> str:
        """The element of an array at these places, by default where the loops are."""
        index: Node = ("num", 0.0)
        for axis, place in zip(axes, places or here(axes), strict=True):
            before = ("*", index, ("size", axis))
            index = place if index == ("num", 0.0) else before if place == ("num", 0.0) else ("+", before, place)
        if variable in self.drawn:
            return f"drawn({variable}, {self.text(index)})"
        return f"{variable}[{self.text(index)}]" if axes else variable

    def leaf(self, kind: str, parts: list) -> str:
        if kind == "at":
            return self.place(parts[0])
        return self.total(*parts) if kind == "over" else self.element(*self.stored[parts[0]], parts[1])

    def computed(self, name: str) -> str:
        stored = None if self.plan.in_place else self.stored.get(name)
        return self.element(*stored) if stored else self.variable(name)

    def index(self, tree: Node) -> str:
        return self.text(tree, SUM)

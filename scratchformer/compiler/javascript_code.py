"""A plan as source in JavaScript, which computes the whole operation: head, loops and tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..notation.grammar import Node, walk
from .plan import Pass, Plan
from .text import ATOM, LOWEST, Expressions
from .trees import COLUMN, Array

__all__ = ["javascript_source"]

MATH = ("exp", "log", "sqrt", "tanh", "sin", "cos", "abs", "floor", "max", "min")
WORDS = """arguments await break case catch class const continue debugger default delete do else enum eval export extends
    false finally for function if implements import in instanceof interface let new null package private protected public
    return static super switch this throw true try typeof var void while with yield""".split()
HELPERS = {
    "erf": """\
function erf(x) { // a series near 0, a continued fraction elsewhere
  const a = Math.abs(x), scale = Math.exp(-a * a) / Math.sqrt(Math.PI);
  if (a > 6) return Math.sign(x);
  let y = 0;
  if (a < 2.5) {
    for (let k = 1, term = 2 * a; term > y * 1e-17; k++) { y += term; term *= 2 * a * a / (2 * k + 1); }
    y *= scale;
  } else {
    let fraction = a;
    for (let k = 60; k > 0; k--) fraction = a + k / 2 / fraction;
    y = 1 - scale / fraction;
  }
  return x < 0 ? -y : y;
}""",
    "mod": "const mod = (a, b) => a - b * Math.floor(a / b);",
    "drawn": """\
function drawn(start, i) { // the integer number i, from 0 to 65535, of those that SplitMix64 draws from its start, a BigInt
  const word = (x) => BigInt.asUintN(64, x);
  let x = word(start + BigInt(Math.floor(i / 4)) * 0x9e3779b97f4a7c15n);
  x = word((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n);
  x = word((x ^ (x >> 27n)) * 0x94d049bb133111ebn);
  return Number(((x ^ (x >> 31n)) >> BigInt(16 * (i % 4))) & 0xffffn);
}""",
}


def javascript_source(plan: Plan) -> str:
    """The source of a function that takes an object with the inputs by name, and returns one with the results.

    Arrays are typed arrays, with one row after the other; an array that is drawn is the BigInt where its bits start. Sizes
    that follow from the lengths of the inputs may be left out.
    """
    return "\n".join(Printer(plan).lines()) + "\n"


class Printer(Expressions):
    calls = {name: f"Math.{name}" for name in MATH}  # noqa: RUF012
    relations = Expressions.relations | {"=": "===", "≠": "!=="}
    reserved = (*WORDS, *HELPERS, "Math", "BigInt", "Number")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.body: list[str] = []
        self.depth = 1
        self.sized: list[str] = []  # the axes whose sizes occur
        trees = [value.tree for value in plan.values.values()]
        trees += [part for each in plan.sums.values() for part in (each.tree, *(each.at or ()))]
        leaves = [node for tree in trees for node in walk(tree) if node[0] in ("load", "number")]
        inputs = [node for node in leaves if node[1] not in plan.values]
        self.inputs = {a.name: a for a in plan.reads if a.name not in plan.values}
        for kind, name, *places in sorted(inputs):
            axes = tuple(place[1] for place in places[0]) if kind == "load" else ()
            self.inputs.setdefault(name, Array(name, axes))
        self.stored = {name: (self.variable(name), array.axes) for name, array in self.inputs.items()}

    def lines(self) -> Iterator[str]:
        plan = self.plan
        for name in plan.head:
            self.whole(name)
        for array in plan.writes:
            self.put(f"const to_{array.name} = {self.new(array)};")
        for name in dict.fromkeys(name for each in plan.passes for name in each.keep):
            self.put(f"const row_{name} = new Float64Array({self.size(COLUMN)});")
        with self.loop(axis for axis in plan.axes if axis != COLUMN):
            for each in plan.passes:
                self.row(each)
            for name in plan.last:
                self.step(name)
        self.stored |= {array.name: (f"to_{array.name}", array.axes) for array in plan.writes}
        for name in plan.tail:
            self.whole(name)
        results = (f"{name}: {self.stored[name][0]}" for name in plan.results)
        self.put(f"return {{ {', '.join(results)} }};")
        asked, sizes = self.find_sizes()
        names = [name if name == self.variable(name) else f"{name}: {self.variable(name)}" for name in self.inputs]
        yield f"function {plan.name}({{ {', '.join([*names, *asked])} }}) {{"
        source = "\n".join(self.body)
        for name in HELPERS:
            if f"{name}(" in source:
                yield from (f"  {line}" for line in HELPERS[name].splitlines())
        yield from (*sizes, source, "}")

    def find_sizes(self) -> tuple[list[str], list[str]]:
        """The sizes that have to be given, and lines with those that follow from the lengths of inputs."""
        asked, lines, known = [], [], set()
        arrays = [array for array in self.inputs.values() if array.axes and array.kind != "bits"]
        while open_ones := sorted({*self.sized} - known, key=lambda axis: (axis != COLUMN, axis)):
            for array in arrays:
                others = [axis for axis in array.axes if axis in known]
                (axis, *more) = [axis for axis in array.axes if axis not in known] or [""]
                if axis in open_ones and not more:
                    length = " / ".join([f"{self.variable(array.name)}.length", *map(self.size, others)])
                    lines.append(f"  const {self.size(axis)} = {length};")
                    break
            else:
                axis = open_ones[0]
                asked.append(self.size(axis))
            known.add(axis)
        return asked, lines

    def put(self, line: str, text: str = "") -> None:
        self.body.append(f"{'  ' * self.depth}{line}{text and f' // {text}'}")

    @contextmanager
    def loop(self, axes: Iterator[str] | Sequence[str]) -> Iterator[None]:
        """Loops over axes, around the lines that are put inside."""
        depth = self.depth
        for axis in axes:
            at = self.place(axis)
            self.put(f"for (let {at} = 0; {at} < {self.counted(axis)}; {at}++) {{")
            self.depth += 1
        yield
        while self.depth > depth:
            self.depth -= 1
            self.put("}")

    def counted(self, axis: str) -> str:
        self.sized.append(axis)
        return self.size(axis)

    def new(self, array: Array) -> str:
        kind = "Uint8Array" if array.kind == "bool" else "Float64Array"
        return f"new {kind}({' * '.join(map(self.counted, array.axes))})"

    def row(self, each: Pass) -> None:
        """The lines of a pass over a row."""
        sums = self.plan.sums
        for name in each.before:
            self.step(name)
        for name in each.sums:
            self.put(f"let {name} = {'-Infinity' if sums[name].function == 'max' else '0'};")
        if not (each.sums or each.totals or each.stores):
            return
        with self.loop([COLUMN]):
            for name in each.kept:
                self.put(f"const {self.variable(name)} = row_{name}[c];")
            for name in each.steps:
                self.step(name)
                if name in each.keep:
                    self.put(f"row_{name}[c] = {self.variable(name)};")
            for name in each.sums:
                term = self.text(sums[name].tree)
                more = f"= Math.max({name}, {term})" if sums[name].function == "max" else f"+= {term}"
                self.put(f"{name} {more};", sums[name].text)
            for name in each.totals:
                to = self.element(f"to_{name}", sums[name].axes, sums[name].at or ())
                self.put(f"{to} += {self.text(sums[name].tree)};", sums[name].text)

    def step(self, name: str) -> None:
        """The lines that compute a value of the loops."""
        value = self.plan.values[name]
        self.put(f"const {self.variable(name)} = {self.text(value.tree)};", value.text)
        for array in self.plan.writes:
            if array.name == name:
                self.put(f"{self.element(f'to_{name}', array.axes)} = {self.variable(name)};")

    def whole(self, name: str) -> None:
        """The lines that compute a value of the head or the tail, number by number."""
        value, variable = self.plan.values[name], self.variable(name)
        axes = max(self.axes_in(value.tree), key=len, default=())
        if value.tree[0] == "sum":
            self.put(f"const {variable} = to_{value.tree[1]};", value.text)
        elif not axes:
            self.put(f"const {variable} = {self.text(value.tree)};", value.text)
        else:
            axes = self.arrays[name].axes if name in self.arrays else axes
            self.put(f"const {variable} = {self.new(Array(name, axes))};", value.text)
            with self.loop(axes):
                self.put(f"{self.element(variable, axes)} = {self.text(value.tree)};")
        self.stored[name] = variable, axes

    def axes_in(self, tree: Node) -> list[tuple[str, ...]]:
        """The axes of the arrays in a tree of the head or the tail, apart from those in sums over all rows."""
        if tree[0] in ("value", "sum", "load"):
            return [self.stored[tree[1]][1]]
        parts = [part for part in tree if isinstance(part, tuple)] if tree[0] != "over" else []
        return [axes for part in parts for axes in (self.axes_in(part) if part else [])]

    def total(self, function: str, tree: Node) -> str:
        """The variable of a sum over all rows, computed by lines that are put here."""
        axes = max(self.axes_in(tree), key=len, default=())
        name = f"total{len(self.body)}"
        self.put(f"let {name} = 0;")
        with self.loop(axes):
            self.put(f"{name} += {self.text(tree)};")
        if function == "mean":
            self.put(f"{name} /= {' * '.join(map(self.counted, axes))};")
        return name

    def element(self, variable: str, axes: Sequence[str], places: Sequence[Node] | None = None) -> str:
        """The element of an array at these places, by default at those of the loops."""
        return f"{variable}[{self.text(self.index(axes, places))}]" if axes else variable

    def index(self, axes: Sequence[str], places: Sequence[Node] | None = None) -> Node:
        """The place in a typed array, whose rows follow each other."""
        index: Node = ("num", 0.0)
        for axis, place in zip(axes, places or [("at", axis) for axis in axes], strict=True):
            before = ("*", index, ("size", axis))
            index = place if index == ("num", 0.0) else before if place == ("num", 0.0) else ("+", before, place)
        return index

    def leaf(self, kind: str, parts: list) -> tuple[str, int]:
        if kind == "at":
            return self.place(parts[0]), ATOM
        if kind == "mod":
            return f"mod({self.text(parts[0])}, {self.text(parts[1])})", ATOM
        if kind == "over":
            return self.total(*parts), ATOM
        if kind == "if":
            tests = " && ".join(self.test(*condition) for condition in parts[0])
            return f"{tests} ? {self.text(parts[1])} : {self.text(parts[2])}", LOWEST
        name, places = parts[0], parts[1] if kind == "load" else None
        if name not in self.stored:
            return self.variable(name), ATOM
        variable, axes = self.stored[name]
        if name in self.arrays and self.arrays[name].kind == "bits":
            return f"drawn({variable}, {self.text(self.index(axes, places))})", ATOM
        return self.element(variable, axes, places), ATOM

    def expression(self, tree: Node) -> tuple[str, int]:
        if tree[0] == "size":
            self.sized.append(tree[1])
        return super().expression(tree)

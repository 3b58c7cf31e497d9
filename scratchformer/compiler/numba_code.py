"""The loops of a plan as source for Numba."""

from __future__ import annotations

import keyword
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from ..notation.grammar import Node, walk
from .axes import HALF
from .plan import Pass, Plan
from .trees import COLUMN, ROW, Array

__all__ = ["numba_source"]

INDENT, WIDTH = "    ", 120
BLOCK = 1024  # random integers that are drawn before they are used
RELATIONS = {"=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "<": "<", ">": ">"}
CALLS = {"sqrt": "np.sqrt", "floor": "np.floor", "abs": "abs", "max": "max", "min": "min"}
RESERVED = {"R", "np", "c", "rows", "columns", "finite", "read", "narrow", "plus", "column_of", "maximum_of_row"}
RESERVED |= {"words", "place", "first", "drawn", "draw", "i"}
RESERVED |= {*CALLS, "exp", "log", "tanh", "erf", "sin", "cos", "range"}
EITHER, SUM, PRODUCT, MINUS, POWER, ATOM = range(6)  # how strongly parts of an expression hold together
SIGNS = {"+": ("+", SUM), "-": ("-", SUM), "*": ("*", PRODUCT), "/": ("/", PRODUCT), "mod": ("%", PRODUCT)}


def numba_source(plan: Plan) -> str:
    """The source of a function of the arrays that the plan reads, its numbers and the arrays that it writes.

    Numbers are of the type R in which the loops compute. The function returns 0, or NaN if a sum was not finite.
    """
    return "\n".join(Printer(plan).lines()) + "\n"


def size(axis: str) -> str:
    """The variable that holds the size of an axis."""
    return {COLUMN: "columns", ROW: "rows", HALF: "2"}.get(axis, axis.upper())


def with_comment(code: str, text: str, depth: int) -> Iterator[str]:
    """A line of code and its equation, which stands above it if the line would become too long."""
    line = INDENT * depth + code
    if text and len(f"{line}  # {text}") <= WIDTH:
        yield f"{line}  # {text}"
        return
    for part in textwrap.wrap(text, WIDTH - len(INDENT * depth) - 2):
        yield f"{INDENT * depth}# {part}"
    yield line


class Printer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outer = [axis for axis in plan.axes if axis != COLUMN]
        self.arrays = {array.name: array for array in (*plan.reads, *plan.writes)}
        self.axes = {*plan.axes, *(axis for array in self.arrays.values() for axis in array.axes), ROW, "t"}
        self.of_row: dict[str, str] = {}  # variables that are the same for all columns of a row, and what they hold
        self.shared: dict[Node, str] = {}  # elements that a loop uses more than once, and their variables
        self.bits = next((array.name for array in plan.reads if array.kind == "bits"), "")
        self.parts: dict[str, str] | None = (
            None  # of a loop over a block of columns, the parts of arrays that it is over
        )

    def lines(self) -> Iterator[str]:
        plan, depth = self.plan, 1 + len(self.outer)
        arguments = [*(self.variable(a.name) for a in plan.reads), *map(self.variable, plan.numbers)]
        arguments += [f"to_{self.variable(array.name)}" for array in plan.writes]
        body = [line for each in plan.passes for line in self.row(each, depth)]
        body += [line for name in plan.last for line in self.step(name, depth)]
        yield f"def {plan.name}({', '.join(arguments)}):"
        stored = [array for array in self.arrays.values() if array.kind != "bits"]
        for axis in dict.fromkeys(axis for array in stored for axis in array.axes if axis != HALF):
            array = next(a for a in stored if axis in a.axes)
            prefix = "" if array in plan.reads else "to_"
            yield f"{INDENT}{size(axis)} = {prefix}{self.variable(array.name)}.shape[{array.axes.index(axis)}]"
        yield f"{INDENT}finite = R(0)"
        for name in dict.fromkeys(name for each in plan.passes for name in each.keep):
            yield f"{INDENT}row_{self.variable(name)} = np.empty(columns, R)"
        if self.bits:
            yield f"{INDENT}words = np.empty({BLOCK // 4 + bool(self.outer)}, np.uint64)"
        for i, axis in enumerate(self.outer):
            yield f"{INDENT * (i + 1)}for {axis} in range({size(axis)}):"
        yield from (f"{INDENT * depth}{name} = {held}" for name, held in self.of_row.items())
        yield from body
        yield f"{INDENT}return finite"

    def row(self, each: Pass, depth: int) -> Iterator[str]:
        """The lines of a pass over a row."""
        sums = self.plan.sums
        for name in each.before:
            yield from self.step(name, depth)
        whole = {name: array for name in each.sums if (array := self.whole_row(name))}
        for name, array in whole.items():
            yield from with_comment(f"{name} = maximum_of_row({array}, n)", sums[name].text, depth)
        looped = [name for name in each.sums if name not in whole]
        for name in looped:
            yield f"{INDENT * depth}{name} = R({'0' if sums[name].function == 'sum' else '-np.inf'})"
        if looped or each.totals or each.stores:
            yield from self.loop(each, looped, depth)
        for name in each.sums:
            if sums[name].function == "sum":
                yield f"{INDENT * depth}finite += R(0) * {name}"

    def loop(self, each: Pass, looped: list[str], depth: int) -> Iterator[str]:
        """The loop of a pass over the columns."""
        sums, values = self.plan.sums, self.plan.values
        trees = [values[name].tree for name in each.steps]
        trees += [part for name in (*looped, *each.totals) for part in (sums[name].tree, *(sums[name].at or ()))]
        uses = Counter(node for tree in trees for node in walk(tree) if node[0] == "load")
        what = [sums[name].text for name in (*looped, *each.totals)] or [values[name].text for name in each.stores]
        title = textwrap.shorten("   ".join(what), WIDTH - 10 - len(INDENT * depth), placeholder=" ...")
        yield f"{INDENT * depth}# {title}"
        if any(node[1] == self.bits for node in uses):
            yield from self.in_blocks(each, looped, uses, depth)
            return
        yield f"{INDENT * depth}for c in range(columns):"
        yield from self.columns(each, looped, uses, depth + 1)

    def in_blocks(self, each: Pass, looped: list[str], uses: Counter, depth: int) -> Iterator[str]:
        """A loop in blocks of columns, for each of which random integers are drawn first. It goes over parts of the
        arrays, since LLVM does not make vectors of a loop over first + i.
        """
        self.parts = {}
        lines = [*self.columns(each, looped, uses, depth + 2)]
        indent, place = INDENT * (depth + 1), self.row_number()
        yield f"{INDENT * depth}for first in range(0, columns, {BLOCK}):"
        yield f"{indent}place = {f'{place} * columns + first' if self.outer else 'first'}"
        yield f"{indent}draw(words[: (columns - first) // 4 + 2], {self.variable(self.bits)}, place // 4)"
        yield f"{indent}drawn = words.view(np.uint16){'[place % 4 :]' if self.outer else ''}"
        yield from (f"{indent}{part} = {array}[first : first + {BLOCK}]" for array, part in self.parts.items())
        yield f"{indent}for i in range(min({BLOCK}, columns - first)):"
        if any("[c]" in line or "(c)" in line for line in lines):
            yield f"{indent}{INDENT}c = first + i"
        yield from lines
        self.parts = None

    def row_number(self) -> str:
        """The number of the row among all rows, as code."""
        number = "0"
        for axis in self.outer:
            number = f"({number} * {size(axis)} + {axis})" if number != "0" else axis
        return number

    def columns(self, each: Pass, looped: list[str], uses: Counter, depth: int) -> Iterator[str]:
        """What a loop does for each column."""
        sums = self.plan.sums
        for name in each.kept:
            yield f"{INDENT * depth}{self.variable(name)} = {self.in_row(f'row_{self.variable(name)}')}"
        for node in uses:
            array = self.arrays[node[1]]
            if uses[node] > 1 and node[2][-1:] == (("at", COLUMN),):
                element = self.load(array, node[2])
                self.shared[node] = f"{self.variable(array.name)}_c" + "_" * sum(n[1] == node[1] for n in self.shared)
                yield f"{INDENT * depth}{self.shared[node]} = {element}"
        for name in each.steps:
            yield from self.step(name, depth, store=False)
            if name in each.keep:
                yield f"{INDENT * depth}{self.in_row(f'row_{self.variable(name)}')} = {self.variable(name)}"
        for name in looped:
            function, term = "plus" if sums[name].function == "sum" else "max", self.text(sums[name].tree)
            yield from with_comment(f"{name} = {function}({name}, {term})", sums[name].text, depth)
        for name in each.totals:
            to = self.element(f"to_{name}", sums[name].at or ())
            yield from with_comment(f"{to} += {self.text(sums[name].tree)}", sums[name].text, depth)
        for name in each.stores:
            yield from (INDENT * depth + line for line in self.store(name))
        self.shared = {}

    def whole_row(self, name: str) -> str:
        """The array whose rows a sum takes the maximum of, or ""."""
        each, rows = self.plan.sums[name], (("at", ROW), ("at", COLUMN))
        whole = each.tree[0] == "load" and each.tree[2] == rows and self.plan.axes == (ROW, COLUMN)
        return self.variable(each.tree[1]) if each.function == "max" and whole else ""

    def step(self, name: str, depth: int, store: bool = True) -> Iterator[str]:
        """A value under its name, and its store."""
        value = self.plan.values[name]
        yield from with_comment(f"{self.variable(name)} = {self.text(value.tree)}", value.text, depth)
        if store:
            yield from (INDENT * depth + line for line in self.store(name))

    def store(self, name: str) -> Iterator[str]:
        """The line that writes a value to its array, if it has one."""
        for array in self.plan.writes:
            if array.name == name:
                value, to = self.variable(name), f"to_{self.variable(name)}"
                stored = f"{value} > R(0)" if array.kind == "bool" else f"narrow({value}, {to})"
                yield f"{self.element(to, [('at', axis) for axis in array.axes])} = {stored}"

    def variable(self, name: str) -> str:
        """The variable for a name of the equations; the loops have variables too."""
        taken = keyword.iskeyword(name) or name in RESERVED or name in self.axes or name in map(size, self.axes)
        return f"{name}_" if taken else name

    def text(self, tree: Node) -> str:
        """The expression of a tree, of type R."""
        return self.expression(tree)[0]

    def within(self, tree: Node, strength: int) -> str:
        """The expression of a tree as a part of one of this strength, in parentheses if it needs them."""
        text, own = self.expression(tree)
        return text if own >= strength else f"({text})"

    def expression(self, tree: Node) -> tuple[str, int]:
        """The expression of a tree, of type R, and how strongly it holds together."""
        kind, *parts = tree
        if tree in self.shared:
            return self.shared[tree], ATOM
        if kind == "num":
            return f"R({self.number(parts[0])})", ATOM
        if kind in ("number", "value"):
            return self.variable(parts[0]), ATOM
        if kind == "sum":
            return parts[0], ATOM
        if kind == "load":
            return self.load(self.arrays[parts[0]], parts[1]), ATOM
        if kind in ("at", "size"):
            return f"R({self.place(tree)})", ATOM
        if kind == "stored":
            like = next(a.name for a in self.plan.writes if a.kind == "real" and COLUMN in a.axes)
            return f"read(narrow({self.text(parts[0])}, to_{self.variable(like)}))", ATOM
        if kind == "neg":
            return f"-{self.within(parts[0], MINUS)}", MINUS
        if kind == "^" and parts[1][0] == "num" and parts[1][1] in (2, 3, 4):
            base = self.within(parts[0], ATOM)
            return " * ".join([base] * int(parts[1][1])), PRODUCT
        if kind == "^":
            return f"{self.within(parts[0], ATOM)} ** {self.within(parts[1], POWER)}", POWER
        if kind == "call":
            return f"{CALLS.get(parts[0], parts[0])}({', '.join(map(self.text, parts[1]))})", ATOM
        if kind == "if":
            tests = " and ".join(self.test(*condition) for condition in parts[0])
            return f"{self.within(parts[1], SUM)} if {tests} else {self.within(parts[2], SUM)}", EITHER
        sign, strength = SIGNS[kind]
        return f"{self.within(parts[0], strength)} {sign} {self.within(parts[1], strength + 1)}", strength

    def number(self, x: float) -> str:
        return str(int(x)) if float(x).is_integer() and abs(x) < 2**24 else repr(x).replace("inf", "np.inf")

    def test(self, relation: str, left: Node, right: Node) -> str:
        """A condition. A place that a column is compared with is first narrowed to 32 bits, as wide as float32."""
        if not (self.is_place(left) and self.is_place(right)):
            return f"{self.within(left, SUM)} {RELATIONS[relation]} {self.within(right, SUM)}"
        if left == ("at", COLUMN):
            left, right = right, left
            relation = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}.get(relation, relation)
        if relation in ("=", "≠") and right == ("at", COLUMN) and not self.has_column([left]):
            column = self.keep(f"column_{len(self.of_row)}", f"column_of({self.place(left)}, columns)")
            return f"np.int32(c) {RELATIONS[relation]} {column}"
        return f"{self.place(left)} {RELATIONS[relation]} {self.place(right)}"

    def keep(self, name: str, held: str) -> str:
        """The variable that holds an expression for the whole row; a new one of this name, if there is none."""
        for known, other in self.of_row.items():
            if other == held:
                return known
        while name in self.of_row or name in self.arrays or name in self.plan.values:
            name += "_"
        self.of_row[name] = held
        return name

    def element(self, array: str, places: Iterable[Node]) -> str:
        """An element of an array. A loop over columns goes over a view of the row."""
        *lead, last = places
        if last == ("at", COLUMN) and not self.has_column(lead):
            where = ", ".join(map(self.place, lead))
            return self.in_row(self.keep(f"{array}_{axes(lead)}", f"{array}[{where}]") if lead else array)
        return f"{array}[{', '.join(map(self.place, (*lead, last)))}]"

    def in_row(self, row: str) -> str:
        """The element of a row in the column of the loop."""
        return f"{row}[c]" if self.parts is None else f"{self.parts.setdefault(row, f'{row}_part')}[i]"

    def load(self, array: Array, places: tuple[Node, ...]) -> str:
        """An element as a number of type R. What has no column is read once for each row."""
        if not places:
            return self.variable(array.name)
        if array.kind == "bits" and places[-1] != ("at", COLUMN):
            at = f"{self.row_number()} * columns + {self.place(places[-1])}"
            return self.keep(
                f"{self.variable(array.name)}_{axes(places)}", f"R(drawn_at({self.variable(array.name)}, {at}))"
            )
        if array.kind == "bits":
            return "R(drawn[i])"
        element = self.element("to_" * (array in self.plan.writes) + self.variable(array.name), places)
        number = f"read({element})" if array.kind == "real" else f"R({element})"
        return number if self.has_column(places) else self.keep(f"{self.variable(array.name)}_{axes(places)}", number)

    def has_column(self, places: Iterable[Node]) -> bool:
        """Whether places depend on the column."""
        nodes = [node for place in places for node in walk(place)]
        return ("at", COLUMN) in nodes or any(
            node[0] == "value" and COLUMN in self.plan.values[node[1]].axes for node in nodes
        )

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
            return f"{self.variable(parts[0])}[{', '.join(map(self.place, parts[1]))}]"
        sign = {"mod": "%", "/": "//"}.get(kind, kind)
        return f"({self.place(parts[0])} {sign} {self.place(parts[1])})"


def axes(places: Iterable[Node]) -> str:
    """What the variable of an element, or of a row, is called after its places."""
    return "".join(place[1] if place[0] == "at" else "at" for place in places)

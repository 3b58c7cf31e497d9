"""The loops of a plan as source for Numba."""

from __future__ import annotations

import keyword
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..notation.grammar import Node, walk
from .axes import HALF, HERE
from .plan import Pass, Plan
from .printer import ATOM, WIDTH, Printer
from .trees import COLUMN, ROW, Array

__all__ = ["numba_source"]

BLOCK = 1024  # random integers that are drawn before they are used
RESERVED = """R np c rows columns read narrow plus column_of maximum_of_row greater lesser
    words place first drawn draw i sqrt floor abs max min exp log log1p tanh erf sin cos range""".split()


def numba_source(plan: Plan) -> str:
    """The source of a function of the arrays that the plan reads, its numbers and the arrays that it writes.

    Numbers are of the type R in which the loops compute.
    """
    return "\n".join(NumbaPrinter(plan).lines()) + "\n"


class NumbaPrinter(Printer):
    calls = {"sqrt": "np.sqrt", "floor": "np.floor", "max": "greater", "min": "lesser"}  # noqa: RUF012
    starts = {"sum": "{} = R(0)", "max": "{} = R(-np.inf)"}  # noqa: RUF012
    adds = {"sum": "{0} = plus({0}, {1})", "max": "{0} = greater({0}, {1})"}  # noqa: RUF012
    powers = (2.0, 3.0, 4.0)
    reserved = (*keyword.kwlist, *RESERVED)

    def __init__(self, plan: Plan) -> None:
        self.outer = [axis for axis in plan.axes if axis != COLUMN]
        super().__init__(plan, 1 + len(self.outer))
        self.of_row: dict[str, str] = {}  # variables that are the same for all columns of a row, and what they hold
        self.shared: dict[Node, str] = {}  # elements that a loop uses more than once, and their variables
        self.bits = next((array.name for array in plan.reads if array.kind == "bits"), "")
        self.parts: dict[str, str] | None = None  # in a loop over a block of columns: the parts of arrays in it
        like = next((a for a in plan.writes if a.kind == "real" and COLUMN in a.axes), None)
        self.rounded = f"read(narrow({{}}, {self.pointer(like)}))" if like else ""

    def lines(self) -> Iterator[str]:
        plan = self.plan
        self.passes()
        yield f"def {plan.name}({self.arguments()}):"
        axes = (axis for array in self.arrays.values() if array.kind != "bits" for axis in array.axes)
        yield from (self.find_size(axis) for axis in dict.fromkeys(axes) if axis != HALF)
        yield from (f"    row_{self.variable(name)} = np.empty(columns, R)" for name in self.kept)
        if self.bits:
            yield f"    words = np.empty({BLOCK // 4 + bool(self.outer)}, np.uint64)"
        for i, axis in enumerate(self.outer):
            yield f"{self.indent * (i + 1)}for {self.place(axis)} in range({self.size(axis)}):"
        yield from (f"{self.indent * self.depth}{name} = {held}" for name, held in self.of_row.items())
        yield from self.body

    def loop(self, each: Pass) -> None:
        sums, values = self.plan.sums, self.plan.values
        whole = {name: array for name in each.sums if (array := self.whole_row(name))}
        for name, array in whole.items():
            self.put(f"{name} = maximum_of_row({array}, n)", sums[name].text)
        looped = [name for name in each.sums if name not in whole]
        self.start(looped)
        looped += each.totals
        if looped or each.stores:
            trees = [values[name].tree for name in each.steps] + [part for name in looped for part in sums[name].trees]
            uses = Counter(node for tree in trees for node in walk(tree) if node[0] == "load")
            what = [sums[name].text for name in looped] or [values[name].text for name in each.stores]
            room = WIDTH - 10 - len(self.indent * self.depth)
            self.put(f"# {textwrap.shorten('   '.join(what), room, placeholder=' ...')}")
            drawn = any(node[1] == self.bits for node in uses)
            with self.blocks() if drawn else self.block("for c in range(columns)"):
                self.read_kept(each)
                self.share(uses)
                self.waits = True
                self.steps(each, looped)
                self.waits, self.shared = False, {}

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """A loop in blocks of columns, for each of which random integers are drawn first. It goes over parts of the
        arrays, since LLVM does not make vectors of a loop over first + i.
        """
        self.parts = {}
        with self.block(f"for first in range(0, columns, {BLOCK})"):
            self.put(f"place = {f'{self.row_number()} * columns + first' if self.outer else 'first'}")
            self.put(f"draw(words[: (columns - first) // 4 + 2], {self.variable(self.bits)}, place // 4)")
            self.put(f"drawn = words.view(np.uint16){'[place % 4 :]' if self.outer else ''}")
            at = len(self.body)
            with self.block(f"for i in range(min({BLOCK}, columns - first))"):
                yield
                if any("[c]" in line or "(c)" in line for line in self.body[at + 1 :]):
                    self.put("c = first + i", at=at + 1)
            for array, part in reversed(self.parts.items()):
                self.put(f"{part} = {array}[first : first + {BLOCK}]", at=at)
        self.parts = None

    def row_number(self) -> str:
        """The number of the row among all rows, as code."""
        number = self.place(self.outer[0]) if self.outer else "0"
        for axis in self.outer[1:]:
            number = f"({number} * {self.size(axis)} + {self.place(axis)})"
        return number

    def share(self, uses: Counter) -> None:
        """Read those elements of a column that the loop uses more than once."""
        for node in uses:
            if uses[node] > 1 and node[2][-1:] == (HERE,):
                element = self.text(node)
                others = sum(known[1] == node[1] for known in self.shared)
                self.shared[node] = f"{self.variable(node[1])}_c{others or ''}"
                self.let(self.shared[node], element)

    def whole_row(self, name: str) -> str:
        """The array whose rows a sum takes the maximum of, or ""."""
        each = self.plan.sums[name]
        whole = each.tree[0] == "load" and each.tree[2] == (("at", ROW), HERE) and self.plan.axes == (ROW, COLUMN)
        return self.variable(each.tree[1]) if each.function == "max" and whole else ""

    def written(self, name: str) -> str:
        return self.element(f"to_{name}", self.places(name))

    def narrow(self, name: str) -> str:
        value = self.variable(name)
        return f"{value} > R(0)" if self.arrays[name].kind == "bool" else f"narrow({value}, to_{name})"

    def in_row(self, name: str) -> str:
        return self.column_of(f"row_{self.variable(name)}")

    def column_of(self, row: str) -> str:
        """The element of a row in the column of the loop."""
        return f"{row}[c]" if self.parts is None else f"{self.parts.setdefault(row, f'{row}_part')}[i]"

    def size(self, axis: str) -> str:
        return "2" if axis == HALF else super().size(axis)

    def expression(self, tree: Node) -> tuple[str, int]:
        if tree in self.shared:
            return self.shared[tree], ATOM
        if tree[0] in ("num", "size"):
            return f"R({super().expression(tree)[0]})", ATOM
        return super().expression(tree)

    def leaf(self, kind: str, parts: list) -> str:
        return f"R({self.place(parts[0])})" if kind == "at" else self.load(self.arrays[parts[0]], parts[1])

    def test(self, relation: str, left: Node, right: Node) -> str:
        """A condition. A place that a column is compared with is first narrowed to 32 bits, as wide as float32."""
        if left == HERE and self.is_place(right):
            left, right = right, left
            relation = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}.get(relation, relation)
        if relation in ("=", "≠") and right == HERE and self.is_place(left) and not self.has_column(left):
            column = self.keep(f"column_{len(self.of_row)}", f"column_of({self.index(left)}, columns)")
            return f"np.int32(c) {self.relations[relation]} {column}"
        return super().test(relation, left, right)

    def keep(self, name: str, held: str) -> str:
        """The variable that holds an expression for the whole row; a new one of this name, if there is none."""
        for known, other in self.of_row.items():
            if other == held:
                return known
        while name in self.of_row or name in self.arrays or name in self.plan.values:
            name += "_"
        self.of_row[name] = held
        return name

    def element(self, array: str, places: Sequence[Node]) -> str:
        """An element of an array. A loop over columns goes over a view of the row."""
        *lead, last = places
        if last == HERE and not self.has_column(tuple(lead)):
            where = ", ".join(map(self.index, lead))
            return self.column_of(self.keep(f"{array}_{self.named(lead)}", f"{array}[{where}]") if lead else array)
        return f"{array}[{', '.join(map(self.index, places))}]"

    def load(self, array: Array, places: tuple[Node, ...]) -> str:
        """An element as a number of type R. What has no column is read once for each row."""
        variable = self.variable(array.name)
        if not places:
            return variable
        if array.kind == "bits" and places[-1] != HERE:
            at = f"{self.row_number()} * columns + {self.index(places[-1])}"
            return self.keep(f"{variable}_{self.named(places)}", f"R(drawn_at({variable}, {at}))")
        if array.kind == "bits":
            return "R(drawn[i])"
        element = self.element(self.pointer(array), places)
        number = f"read({element})" if array.kind == "real" else f"R({element})"
        return number if self.has_column(places) else self.keep(f"{variable}_{self.named(places)}", number)

    def named(self, places: Iterable[Node]) -> str:
        """What the variable of an element, or of a row, is called after its places."""
        return "".join(self.place(place[1]) if place[0] == "at" else "at" for place in places)

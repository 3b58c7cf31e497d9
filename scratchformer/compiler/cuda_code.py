"""The loops of a plan as source for CUDA: a kernel whose threads share the columns of a row.

T is the type of the arrays, REAL that of sums, V how many neighbouring numbers a thread reads at once. A row has THREADS
threads, and a block ROWS rows at a time; where all numbers are one row, all blocks share it. A sum over rows that has a
column is kept by each thread for the PER vectors that it has in every row: each row of threads writes it to a row of
the array, and these are to be added up. What Numba's loops keep in memory for a later pass is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..notation.grammar import Node, walk
from .equations import CompileError
from .numba_code import INDENT, RELATIONS
from .plan import Pass, Plan, reach
from .trees import COLUMN, ROW, Array

__all__ = ["cuda_source"]

CALLS = {"abs": "fabs"}
RESERVED = (
    "T",
    "V",
    "R",
    "REAL",
    "PER",
    "THREADS",
    "ROWS",
    "c",
    "i",
    "j",
    "first",
    "row",
    "int",
    "double",
    "float",
    "new",
)
HERE = ("at", COLUMN)
TEAM = "(Index)blockIdx.x * ROWS + threadIdx.y"


def cuda_source(plan: Plan, wide: frozenset[str] | None = None) -> str:
    """The source of a kernel of the arrays that the plan reads, its numbers, the arrays that it writes, and the sizes of
    the axes. After an array of rows comes how far its rows are apart.

    wide: the arrays of REAL numbers; without it, those that have no column.
    """
    if wide is None:
        wide = frozenset(array.name for array in (*plan.reads, *plan.writes) if COLUMN not in array.axes)
    return "\n".join(Printer(plan, wide | plan.sums.keys()).lines()) + "\n"


def has_step(array: Array, plan: Plan) -> bool:
    """Whether an array has rows, which may be apart."""
    return len(array.axes) > 1 and array.axes[-1] == COLUMN and array.name not in plan.sums and array.kind != "bits"


def is_flat(plan: Plan) -> bool:
    """Whether the columns are shared by all threads of all blocks."""
    return plan.axes == (COLUMN,) and not plan.sums


def axes_of(plan: Plan) -> list[str]:
    """The axes whose sizes a kernel takes, the column last."""
    axes = dict.fromkeys([*plan.axes, *(axis for array in (*plan.reads, *plan.writes) for axis in array.axes)])
    return sorted(axes, key=lambda axis: axis == COLUMN)


def size(axis: str) -> str:
    """The variable that holds the size of an axis."""
    return {COLUMN: "columns", ROW: "rows"}.get(axis, f"size_{axis}")


class Printer:
    def __init__(self, plan: Plan, wide: frozenset[str]) -> None:
        self.plan, self.outer = plan, [axis for axis in plan.axes if axis != COLUMN]
        self.arrays = {array.name: array for array in (*plan.reads, *plan.writes)}
        types = {"real": "T", "integer": "Index", "bool": "bool", "bits": ""}
        self.types = {
            a.name: "REAL" if a.kind == "real" and a.name in wide else types[a.kind] for a in self.arrays.values()
        }
        self.given = {array.name for array in plan.reads}
        self.totals = [name for name, each in plan.sums.items() if each.at is not None]
        self.flat = is_flat(plan)
        self.again = any(each.sums for each in plan.passes) and not self.totals
        self.columns = {name for each in plan.passes for name in each.steps}  # the values that have a column
        self.vectors: dict[Node, str] = {}  # what the pass that is printed loads, and its variables
        for name in self.totals:
            if plan.sums[name].at != (HERE,) or not self.outer:
                raise CompileError(f"{plan.name}: {plan.sums[name].text} is not a sum over all rows")

    def lines(self) -> Iterator[str]:
        plan, parameters = self.plan, []
        for array in self.arrays.values():
            kind, name = self.types[array.name], self.variable(array.name)
            to = "to_" if array in plan.writes else ""
            parameters.append(f"{'' if to else 'const '}{kind}* {to}{name}" if kind else f"unsigned long long {name}")
            parameters += [f"Index {to}{name}_step"] * has_step(array, plan)
        parameters += [f"REAL {self.variable(name)}" for name in plan.numbers]
        parameters += [f"Index {size(axis)}" for axis in axes_of(plan)]
        head, call = ", ".join(parameters), ", ".join(each.split()[-1].lstrip("*") for each in parameters)
        if self.again:
            places = "".join(f", Index {axis}" for axis in self.outer)
            yield f"template <class R> __device__ bool row_of_{plan.name}({head}{places}) {{"
            yield f"{INDENT}bool finite = true;"
            yield from (INDENT + line for line in self.body())
            yield f"{INDENT}return finite;"
            yield "}\n"
        yield f'extern "C" __global__ void {plan.name}_loops({head}) {{'
        yield from (f"{INDENT}REAL {name}[PER * V] = {{0}};" for name in self.totals)
        depth = INDENT if self.flat else INDENT * 2
        if not self.flat:
            rows = " * ".join(map(size, self.outer)) or "1"
            yield f"{INDENT}for (Index row = {TEAM}; row < {rows}; row += (Index)gridDim.x * ROWS) {{"
            for i, axis in enumerate(self.outer):
                inner = " * ".join(map(size, self.outer[i + 1 :]))
                yield f"{depth}Index {axis} = row{f' / ({inner})' * bool(inner)}{f' % {size(axis)}' * bool(i)};"
        if self.again:
            call = ", ".join([call, *self.outer])
            yield f"{depth}if (!row_of_{plan.name}<REAL>({call}) && sizeof(REAL) < 8)  // a sum overflowed"
            yield f"{depth}{INDENT}row_of_{plan.name}<double>({call});"
        else:
            yield f"{depth}typedef REAL R;"
            yield from (depth + line for line in self.body())
        if not self.flat:
            yield f"{INDENT}}}"
        if self.totals:
            yield f"{INDENT}for (int i = 0; i < PER; ++i)"
            yield f"{INDENT * 2}for (int j = 0, c = (i * THREADS + threadIdx.x) * V; j < V && c < columns; ++j, ++c) {{"
            yield from (f"{INDENT * 3}to_{name}[({TEAM}) * columns + c] = {name}[i * V + j];" for name in self.totals)
            yield f"{INDENT * 2}}}"
        yield "}"

    def body(self) -> Iterator[str]:
        """What is computed for a row."""
        for each in self.plan.passes:
            yield from (line for name in each.before for line in self.step(name))
            yield from self.loop(each)
        yield from (line for name in self.plan.last for line in self.step(name))

    def loop(self, each: Pass) -> Iterator[str]:
        """A pass over the columns."""
        plan, sums = self.plan, self.plan.sums
        trees = [sums[name].tree for name in (*each.sums, *each.totals)] + [("value", name) for name in each.stores]
        if not trees:
            return
        reached = reach(trees, plan.values, {}, self.columns)
        steps = [name for name in plan.values if name in reached]
        for name in each.sums:
            yield f"R {name} = {'0' if sums[name].function == 'sum' else '-infinity()'};"
        if self.flat:
            start = "((Index)blockIdx.x * THREADS + threadIdx.x) * V"
            yield f"for (Index first = {start}; first < columns; first += (Index)gridDim.x * THREADS * V) {{"
        elif each.totals:
            yield "for (int i = 0, first; i < PER && (first = (i * THREADS + threadIdx.x) * V) < columns; ++i) {"
        else:
            yield "for (int first = threadIdx.x * V; first < columns; first += THREADS * V) {"
        self.vectors = {}
        inside = []
        for node in self.whole_vectors([*trees, *(plan.values[name].tree for name in steps)]):
            name = self.variable(node[1]) + "_" * [each[1] for each in self.vectors].count(node[1])
            yield f"{INDENT}Vector<{self.types[node[1]]}, V> {name}_v = load<V>({self.row(node)} + first, columns - first);"
            element = f"wide({name}_v.at[j])" if self.types[node[1]] == "T" else f"{name}_v.at[j]"
            inside.append(f"{'Index' if self.arrays[node[1]].kind == 'integer' else 'R'} {name}_c = {element};")
            self.vectors[node] = f"{name}_c"
        inside += [line for name in steps for line in self.step(name)]
        for name in each.sums:
            new = self.text(sums[name].tree)
            add = f"{name} += {new};" if sums[name].function == "sum" else f"{name} = max({name}, {new});"
            inside.append(f"{add}  // {sums[name].text}")
        inside += [f"{name}[i * V + j] += {self.text(sums[name].tree)};  // {sums[name].text}" for name in each.totals]
        for name in each.stores:
            yield f"{INDENT}Vector<{self.types[name]}, V> {self.variable(name)}_to;"
            inside.append(f"{self.variable(name)}_to.at[j] = {self.narrow(name)};")
        column = "Index c = first, j = 0" if self.flat else "int c = first, j = 0"
        yield f"{INDENT}for ({column}; j < V && c < columns; ++c, ++j) {{"
        yield from (INDENT * 2 + line for line in inside)
        yield f"{INDENT}}}"
        self.vectors = {}
        for name in each.stores:
            node = ("load", name, tuple(("at", axis) for axis in self.arrays[name].axes))
            yield f"{INDENT}store<V>({self.variable(name)}_to, {self.row(node, 'to_')} + first, columns - first);"
        yield "}"
        for name in each.sums:
            yield f"{name} = block_{sums[name].function}<THREADS>({name});"
            if self.again and sums[name].function == "sum":
                yield f"finite = finite && {name} - {name} == 0;"

    def whole_vectors(self, trees: list[Node]) -> list[Node]:
        """The loads of trees for which neighbouring threads read neighbouring numbers: not one that a condition guards,
        if its place is computed.
        """
        nodes = [node for tree in trees for node in walk(tree)]
        guarded = {inner for node in nodes if node[0] == "if" for part in node[2:] for inner in walk(part)}
        return [
            node
            for node in dict.fromkeys(node for node in nodes if node[0] == "load")
            if node[2][-1:] == (HERE,)
            and self.types[node[1]]
            and not any(leaf == HERE or leaf[:1] == ("value",) for place in node[2][:-1] for leaf in walk(place))
            and (node not in guarded or all(place[0] == "at" for place in node[2]))
        ]

    def variable(self, name: str) -> str:
        return f"{name}_" if name in RESERVED or name in self.plan.axes else name

    def step(self, name: str) -> Iterator[str]:
        value = self.plan.values[name]
        yield f"R {self.variable(name)} = {self.text(value.tree)};{f'  // {value.text}' * bool(value.text)}"
        if name in self.types and name not in self.columns:
            place = self.horner(self.arrays[name].axes, tuple(("at", axis) for axis in self.arrays[name].axes))
            yield f"if (threadIdx.x == 0) to_{self.variable(name)}[{place}] = {self.narrow(name)};"

    def narrow(self, name: str) -> str:
        """A value as a number of the array that keeps it."""
        return {"T": "narrow({})", "REAL": "{}", "bool": "{} != 0"}[self.types[name]].format(self.variable(name))

    def row(self, node: Node, to: str = "") -> str:
        """The address at which the columns of a load start."""
        name = to + self.variable(node[1])
        axes = self.arrays[node[1]].axes
        return f"{name} + {self.horner(axes[:-1], node[2][:-1])} * {name}_step" if len(axes) > 1 else name

    def horner(self, axes: tuple[str, ...], places: tuple[Node, ...]) -> str:
        """The place in an array without gaps."""
        text = self.place(places[0]) if places else "0"
        for axis, place in zip(axes[1:], places[1:], strict=True):
            text = f"({text} * {size(axis)} + {self.place(place)})"
        return text

    def load(self, node: Node) -> str:
        if node in self.vectors:
            return self.vectors[node]
        array, places = self.arrays[node[1]], node[2]
        if array.kind == "bits":
            return f"random_16({self.horner(array.axes, places)}, {self.variable(array.name)})"
        if has_step(array, self.plan):
            return f"({self.row(node)})[{self.place(places[-1])}]"
        return f"{self.variable(array.name)}[{self.horner(array.axes, places)}]"

    def text(self, tree: Node) -> str:
        """The expression of a tree, of type R."""
        kind, *parts = tree
        if kind == "num":
            return f"R({parts[0]!r})"
        if kind == "number":
            return f"R({self.variable(parts[0])})"
        if kind == "value" and parts[0] in self.given:
            return self.text(("load", parts[0], tuple(("at", axis) for axis in self.arrays[parts[0]].axes)))
        if kind in ("value", "sum"):
            return self.variable(parts[0]) if parts[0] not in self.plan.numbers else f"R({self.variable(parts[0])})"
        if kind == "load":
            element = self.load(tree)
            if tree in self.vectors and self.types[parts[0]] != "Index":
                return element
            return f"R(wide({element}))" if self.types[parts[0]] == "T" else f"R({element})"
        if kind in ("at", "size"):
            return f"R({self.place(tree)})"
        if kind == "neg":
            return f"(-{self.text(parts[0])})"
        if kind == "^":
            if parts[1][0] == "num" and parts[1][1] in (2, 3, 4):
                return f"({' * '.join([self.text(parts[0])] * int(parts[1][1]))})"
            return f"pow({self.text(parts[0])}, {self.text(parts[1])})"
        if kind == "mod":
            return f"fmod({self.text(parts[0])}, {self.text(parts[1])})"
        if kind == "call":
            return f"{CALLS.get(parts[0], parts[0])}({', '.join(map(self.text, parts[1]))})"
        if kind == "if":
            return f"({' && '.join(self.test(*each) for each in parts[0])} ? {self.text(parts[1])} : {self.text(parts[2])})"
        return f"({self.text(parts[0])} {kind} {self.text(parts[1])})"

    def test(self, relation: str, left: Node, right: Node) -> str:
        show = self.place if self.is_place(left) and self.is_place(right) else self.text
        return f"{show(left)} {RELATIONS[relation]} {show(right)}"

    def is_place(self, tree: Node) -> bool:
        """Whether a tree is an integer: a place, or an integer array's element."""
        kind, *parts = tree
        if kind == "value":
            return self.is_place(self.plan.values[parts[0]].tree)
        if kind == "num":
            return float(parts[0]).is_integer()
        if kind in ("+", "-", "*", "/", "mod"):
            return all(map(self.is_place, parts))
        return kind in ("at", "size") or (kind == "load" and self.arrays[parts[0]].kind in ("integer", "bits"))

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
            return self.load(tree)
        return f"({self.place(parts[0])} {'%' if kind == 'mod' else kind} {self.place(parts[1])})"

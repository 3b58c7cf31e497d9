"""The loops of a plan as source for CUDA: a kernel whose threads share the columns of a row.

T is the type of the arrays, REAL that of sums, V how many neighbouring numbers a thread reads at once. It computes with
all V, which needs no branches; those beyond the end of a row are neither added up nor written. WHOLE: whether no row
has any of these, and all vectors are aligned. THREADS threads share a row, and a block has ROWS rows at a time; where
all numbers are one row, all blocks share it. Of a sum over rows a thread keeps the PER vectors of its columns. Each
block writes a row of its sums, one sum beside another, and these rows are then added up; where rows are added by place,
a row of threads adds up all rows of a place.

What Numba's loops keep in memory for a later pass is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill

from ..notation.grammar import Node, walk
from .axes import HERE
from .errors import CompileError
from .plan import Pass, Plan, reach
from .printer import ATOM, Printer, here
from .trees import COLUMN, Array

__all__ = ["BITS", "BITS_AT", "cuda_source"]

BITS = "unsigned long long"  # the number at which random bits start
BITS_AT = "const unsigned long long* __restrict__"  # the address of that number, in a recorded step
TEAM = "(Index)blockIdx.x * ROWS + threadIdx.y"  # which row of threads, of those in all blocks
TEAMS = "(Index)gridDim.x * ROWS"
WORDS = """T V REAL PER THREADS ROWS WHOLE Index Vector all auto bool c char const double first float found
    int i j k left long new part row short signed this to unsigned void""".split()


def cuda_source(plan: Plan, types: Sequence[str] | None = None, pieces: bool = False) -> str:
    """The source of a kernel of the arrays that the plan reads, those that it writes, its numbers, and the sizes
    of axes. After an array of rows comes how far its rows are apart.

    types: of the numbers of all arrays; without it, REAL for those that have no column. pieces: for a plan whose
    numbers are one row, a kernel of pieces of the arrays. First it takes a table, with a row for each piece: its size,
    and where it starts in each array. Each row of blocks has a piece. It is called NAME_pieces, any other NAME_loops.
    """
    arrays = (*plan.reads, *plan.writes)
    real = {array.name for array in arrays if COLUMN not in array.axes or array.name in plan.sums}
    kinds = {"real": "T", "integer": "Index", "bool": "bool", "bits": BITS}
    types = types or ["REAL" if array.kind == "real" and array.name in real else kinds[array.kind] for array in arrays]
    printer = CudaPrinter(plan, types)
    return "\n".join(printer.lines_of_pieces() if pieces else printer.lines()) + "\n"


def has_step(array: Array, plan: Plan) -> bool:
    """Whether an array has rows, which may be apart."""
    return len(array.axes) > 1 and array.axes[-1] == COLUMN and array.name not in plan.sums and array.kind != "bits"


def is_flat(plan: Plan) -> bool:
    """Whether all numbers are one row, which all blocks share."""
    return plan.axes == (COLUMN,) and not plan.sums


def rows_of_sums(plan: Plan) -> tuple[str, ...]:
    """The axes of the rows to which rows are added; () if all rows are added to one."""
    return next((each.axes[:-1] for each in plan.sums.values() if each.at is not None), ())


def axes_of(plan: Plan) -> list[str]:
    """The axes whose sizes a kernel takes."""
    return [*dict.fromkeys([*plan.axes, *(axis for array in (*plan.reads, *plan.writes) for axis in array.axes)])]


def listed(parts: Sequence[str], margin: str = "        ") -> str:
    """Parameters or arguments, on several lines if there are many."""
    text = ", ".join(part.replace(" ", "\0") for part in parts)
    lines = fill(text, 112, initial_indent=margin, subsequent_indent=margin, break_long_words=False)
    return (text if len(text) < 60 else f"\n{lines}").replace("\0", " ")


class CudaPrinter(Printer):
    calls = {"abs": "fabs", "max": "greater", "min": "lesser", "mod": "modulo", "^": "pow"}  # noqa: RUF012
    comment, const, end, opens, closes, reserved = "//", "REAL ", ";", " {", "}", WORDS
    choice, both = "{0} ? {1} : {2}", " && "
    integers = {}  # noqa: RUF012
    starts = {"sum": "REAL {} = 0;", "max": "REAL {} = -infinity();"}  # noqa: RUF012
    adds = {"sum": "{} += {};", "max": "{0} = greater({0}, {1});"}  # noqa: RUF012
    rounded, infinity = "wide(narrow({}))", "infinity()"

    def __init__(self, plan: Plan, types: Sequence[str]) -> None:
        super().__init__(plan, 1)
        self.rows, self.flat = [axis for axis in plan.axes if axis != COLUMN], is_flat(plan)
        self.kind = "Index" if self.flat else "int"  # of the place in a row
        self.types = dict(zip(self.arrays, types, strict=True))
        self.totals = [name for name, each in plan.sums.items() if each.at is not None]
        self.stepped = {name for each in plan.passes for name in each.steps}  # the values that have a column
        self.vectors: dict[Node, str] = {}  # the loads of a pass, and their variables
        places = {each.at for each in plan.sums.values() if each.at is not None}
        self.at = next(iter(places), (HERE,))[:-1]  # the row of the sums to which a row is added
        if len(places) > 1 or any(at[-1] != HERE or not self.rows for at in places) or HERE in walk(self.at):
            raise CompileError(f"{plan.name}: its sums over rows cannot be taken row by row")

    def given(self) -> list[str]:
        """The parameters of the kernel."""
        plan, given = self.plan, []
        for array in self.arrays.values():
            name, kind = self.pointer(array), self.types[array.name]
            alone = "" if self.flat else "__restrict__ "  # what is changed in place is written where it is read
            pointer = f"{'const ' * (array in plan.reads)}{kind}* {alone}{name}"
            given.append(f"{kind} {name}" if array.kind == "bits" else pointer)
            given += [f"Index {name}_step"] * has_step(array, plan)
        given += [f"REAL {self.variable(name)}" for name in plan.numbers]
        return given + [f"Index {self.size(axis)}" for axis in axes_of(plan)]

    def lines_of_pieces(self) -> list[str]:
        given, self.depth = self.given(), 0
        with self.block(f"__device__ void piece_of_{self.plan.name}({listed(given)})"):
            self.passes()
        self.put("")
        arrays = [array for array in self.arrays.values() if array.axes]
        places = {self.pointer(array): f" + here[{i}]" for i, array in enumerate(arrays, 1)}
        names = [each.split()[-1] for each in given[:-1]]
        parameters = ["const Index* table", *given[:-1]]
        with self.block(f'extern "C" __global__ void {self.plan.name}_pieces({listed(parameters)})'):
            self.put(f"const Index* here = table + (Index)blockIdx.y * {len(arrays) + 1};")
            moved = [name + places.get(name, "") for name in names]
            self.put(f"piece_of_{self.plan.name}({listed([*moved, 'here[0]'], ' ' * 12)});")
        return self.body

    def lines(self) -> list[str]:
        plan, given, self.depth = self.plan, self.given(), 0
        bounds = "__launch_bounds__(THREADS * ROWS, 1024 / (THREADS * ROWS)) " * (not self.totals)
        with self.block(f'extern "C" __global__ void {bounds}{plan.name}_loops({listed(given)})'):
            if self.flat:
                self.passes()
            elif self.at:
                self.by_places()
            else:
                head = f"for (Index row = {TEAM}; row < {self.count(self.rows)}; row += {TEAMS})"
                with self.sums_of(), self.block(head):
                    self.row_places()
                    self.passes()
        return self.body

    def row_places(self) -> None:
        """Where a row is along each of its axes."""
        for i, axis in enumerate(self.rows):
            inner = "".join(f" / {self.size(each)}" for each in self.rows[i + 1 :])
            self.put(f"Index {self.place(axis)} = row{inner}{f' % {self.size(axis)}' * bool(i)};")

    def by_places(self) -> None:
        """For each row of the sums: the rows that are added to it, one after another."""
        axes, count = rows_of_sums(self.plan), self.count(self.rows)
        with (
            self.block(f"for (Index to = {TEAM}; to < {self.count(axes)}; to += {TEAMS})"),
            self.sums_of("to"),
            self.block(f"for (Index part = 0; part < {count}; part += 32)"),
        ):
            self.put("unsigned found;  // bits of the rows part ... part + 31")
            with self.block(""):
                self.put("Index row = part + threadIdx.x % 32;")
                self.row_places()
                self.put(f"found = which(row < {count} && {self.among(axes, self.at)} == to);")
            with self.block("for (int k = 0; k < 32 && found >> k; ++k)"):
                self.put("if (!(found >> k & 1)) continue;")
                self.put("Index row = part + k;")
                self.row_places()
                self.passes()

    def count(self, axes: Sequence[str]) -> str:
        return " * ".join(map(self.size, axes)) or "1"

    @contextmanager
    def sums_of(self, row: str = "") -> Iterator[None]:
        """Around what adds to the sums of a row; or to those of a block."""
        vectors = "for (int i = 0, first = threadIdx.x * V; i < PER; ++i, first += THREADS * V)"
        for name in self.totals:
            self.put(f"Vector<REAL, V> {name}[PER] = {{}};")
            if row:
                self.put(f"{vectors} {name}[i] = load<V>(to_{name} + {row} * columns + first, columns - first);")
        yield
        for name in self.totals:
            with self.block(vectors):
                if row:
                    self.put(f"store<V>({name}[i], to_{name} + {row} * columns + first, columns - first);")
                    continue
                self.put(f"Vector<REAL, V> all = rows_sum<ROWS, THREADS>({name}[i]);")
                to = f"to_{name} + (Index)blockIdx.x * {len(self.totals)} * columns + first"
                self.put(f"if (threadIdx.y == 0) store<V>(all, {to}, columns - first);")

    def loop(self, each: Pass) -> None:
        if not (each.sums or each.totals or each.stores):
            return
        sums, values = self.plan.sums, self.plan.values
        trees = [sums[name].tree for name in (*each.sums, *each.totals)] + [("value", name) for name in each.stores]
        needed = reach(trees, values, {}, self.stepped)
        steps = [name for name in values if name in needed]
        self.start(each.sums)
        with self.block(self.head(each)):
            for node in self.neighbours([*trees, *(values[name].tree for name in steps)]):
                others = [known[1] for known in self.vectors].count(node[1])
                name = self.variable(node[1]) + (f"_{others + 1}" if others else "")
                vector = f"Vector<{self.types[node[1]]}, V> {name}_v"
                self.put(f"{vector} = load<V, WHOLE>({self.row_start(node)} + first, columns - first);")
                self.vectors[node] = f"{name}_c"
            for name in each.stores:
                self.put(f"Vector<{self.types[name]}, V> {self.variable(name)}_to;")
            last = f"min({self.kind}(first + j), {self.kind}(columns) - 1)"
            self.put("int left = WHOLE ? V : min(Index(V), columns - first);")
            with self.block("for (int j = 0; j < V; ++j)"):
                self.put(f"{self.kind} c = WHOLE ? first + j : {last};")
                self.column(each, steps)
            self.vectors = {}
            for name in each.stores:
                node = ("load", name, self.places(name))
                self.put(f"store<V, WHOLE>({self.variable(name)}_to, {self.row_start(node)} + first, columns - first);")
        for name in each.sums:
            self.put(f"{name} = block_{sums[name].function}<THREADS>({name});")

    def head(self, each: Pass) -> str:
        """The head of a loop over the vectors of a row."""
        start, step = "threadIdx.x * V", "THREADS * V"
        if each.totals:
            return f"for (int i = 0, first = {start}; i < PER; ++i, first += {step})"
        if self.flat:
            start, step = "((Index)blockIdx.x * THREADS + threadIdx.x) * V", f"(Index)gridDim.x * {step}"
        return f"for ({self.kind} first = {start}; first < columns; first += {step})"

    def column(self, each: Pass, steps: Sequence[str]) -> None:
        """What a thread does for a number of its vectors."""
        for node, name in self.vectors.items():
            integer, element = self.types[node[1]] == "Index", f"{name[:-1]}v.at[j]"
            self.put(f"{'Index' if integer else 'REAL'} {name} = {self.read(node[1], element)};")
        for name in steps:
            self.step(name)
        if added := (*each.sums, *each.totals):
            with self.block("if (j < left)"):
                self.add(added)
        for name in each.stores:
            self.put(f"{self.variable(name)}_to.at[j] = {self.narrow(name)};")

    def step(self, name: str) -> None:
        value, variable = self.plan.values[name], self.variable(name)
        self.let(variable, self.text(value.tree), value.text)
        if name in self.types and name not in self.stepped:
            place = self.among(self.arrays[name].axes, self.places(name))
            self.put(f"if (threadIdx.x == 0) to_{variable}[{place}] = {self.narrow(name)};")

    def written(self, name: str) -> str:
        return f"{name}[i].at[j]"

    def neighbours(self, trees: list[Node]) -> list[Node]:
        """The loads of trees for which neighbouring threads read neighbouring numbers; not one that a condition
        guards, if its row is computed.
        """
        nodes = dict.fromkeys(node for tree in trees for node in walk(tree) if node[0] in ("load", "if"))
        guarded = {inner for node in nodes if node[0] == "if" for part in node[2:] for inner in walk(part)}
        return [
            node
            for node in nodes
            if node[0] == "load" and node[2][-1:] == (HERE,) and self.arrays[node[1]].kind != "bits"
            if not any(leaf == HERE for place in node[2][:-1] for leaf in walk(place))
            if node not in guarded or all(place[0] == "at" for place in node[2])
        ]

    def row_start(self, node: Node) -> str:
        """Where the columns of a load start."""
        array, name = self.arrays[node[1]], self.pointer(self.arrays[node[1]])
        if len(array.axes) == 1:
            return name
        step = f"{name}_step" if has_step(array, self.plan) else self.size(array.axes[-1])
        return f"{name} + {self.among(array.axes[:-1], node[2][:-1])} * {step}"

    def among(self, axes: tuple[str, ...], places: Sequence[Node]) -> str:
        """The place in an array without gaps."""
        text = self.index(places[0]) if places else "0"
        for axis, place in zip(axes[1:], places[1:], strict=True):
            text = f"({text} * {self.size(axis)} + {self.index(place)})"
        return text

    def size(self, axis: str) -> str:
        return super().size(axis) if axis in (COLUMN, "n") else f"size_{axis}"

    def read(self, name: str, element: str) -> str:
        """A number of an array; halves have no type in which all numbers could be computed."""
        return f"REAL({element})" if self.arrays[name].kind == "real" and self.types[name] != "REAL" else element

    def narrow(self, name: str) -> str:
        """A value as a number of the array that keeps it."""
        kind = self.types[name]
        return f"{self.variable(name)} != 0" if kind == "bool" else f"{kind}({self.variable(name)})"

    def load(self, node: Node) -> str:
        array, places = self.arrays[node[1]], node[2]
        if node in self.vectors:
            return self.vectors[node]
        if array.kind == "bits":
            return f"random_16({self.among(array.axes, places)}, {self.variable(array.name)})"
        if has_step(array, self.plan):
            return self.read(array.name, f"*({self.row_start(node)} + {self.index(places[-1])})")
        return self.read(array.name, f"{self.pointer(array)}[{self.among(array.axes, places)}]")

    def expression(self, tree: Node) -> tuple[str, int]:
        if tree[0] in ("num", "number", "size"):
            return f"REAL({super().expression(tree)[0]})", ATOM
        return super().expression(tree)

    def computed(self, name: str) -> str:
        if self.arrays.get(name) in self.plan.reads:
            return self.text(("load", name, here(self.arrays[name].axes)))
        return f"REAL({self.variable(name)})" if name in self.plan.numbers else self.variable(name)

    def leaf(self, kind: str, parts: list) -> str:
        node = (kind, *parts)
        if node in self.vectors and self.types[parts[0]] != "Index":
            return self.load(node)
        return f"REAL({self.index(node)})"

    def index(self, tree: Node) -> str:
        if tree[0] == "mod":
            return f"modulo({', '.join(map(self.index, tree[1:]))})"
        return self.load(tree) if tree[0] == "load" else super().index(tree)

"""Trees that a loop can compute, element by element, made from the trees of equations.

The last axis of the arrays of an operation is the column; all axes before it are rows. An index letter that is followed
by another somewhere is an axis of rows, and so is n, which stands for all leading axes together; every other letter is
the column, whatever it is called.

The trees are tuples as in `notation.grammar`, with these nodes in place of names, sums and conditions:

- `("number", name)`: an argument that is a number; `("size", axis)`: the size of an axis
- `("at", axis)`: the place on an axis; `("load", array, places)`: an element of an array
- `("value", name)`: what was computed under that name; `("sum", name)`: a sum or maximum, see `Sum`
- `("over", function, tree)`: a sum or mean over all rows
- `("stored", a)`: a, rounded to the type of the arrays
- `("if", conditions, a, b)`: a where all conditions `(relation, left, right)` hold, else b
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..notation.grammar import Node, rebuilt, walk
from ..notation.spelling import spelled
from .equations import Definition, Definitions, is_product
from .errors import CompileError

COLUMN, ROW = "column", "n"
SLOW = ("exp", "log", "log1p", "tanh", "erf", "sin", "cos")
OPERATORS: Mapping[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
    "mod": operator.mod,
    "neg": operator.neg,
    "=": operator.eq,
    "≠": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "≤": operator.le,
    "≥": operator.ge,
}
CONSTANT = {
    **OPERATORS,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log1p": math.log1p,
}  # what is computed with constants
HEAD, LOOPS, TAIL = range(3)  # the stages of a plan: before the loops, in them, after them; see `plan`


class Array(NamedTuple):
    """An array that the loops read or write. kind: "real", "integer", "bool", or "bits" for random bits."""

    name: str
    axes: tuple[str, ...]
    kind: str = "real"


class Value(NamedTuple):
    """A tree, and what it depends on."""

    tree: Node
    stage: int = HEAD
    level: int = 0  # how many passes over a row come before it
    axes: frozenset[str] = frozenset()
    letters: frozenset[str] = frozenset()  # index letters of the column that no sum binds
    text: str = ""  # the equation


class Sum(NamedTuple):
    """A sum or maximum over the column; or, with `at`, a sum over rows, whose terms are added to an array at these
    places.
    """

    function: str
    tree: Node
    level: int
    at: tuple[Node, ...] | None
    axes: tuple[str, ...]  # of the array
    text: str

    @property
    def trees(self) -> tuple[Node, ...]:
        """The tree of its terms, and those of its places."""
        return (self.tree, *(self.at or ()))


def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def row_letters(definitions: Definitions) -> frozenset[str]:
    """The index letters of rows: n, and those that are followed by another."""
    letters = {ROW}
    for _, tree in definitions.sides:
        for node in walk(tree):
            if node[0] == "name":
                letters.update(index[1].rstrip("'") for index in node[2][:-1] if index[0] == "idx")
    return frozenset(letters)


class Lowering:
    """The values and sums of the names given to `value`, and of all names that these depend on.

    given: the arrays that are known. numbers: the names of arguments that are numbers. options: the values of the other
    arguments, which decide cases. kept: the names that the cache will keep. Values that depend on these are computed
    from the rounded numbers in the cache, so that forward and backward agree.
    """

    def __init__(
        self,
        definitions: Definitions,
        given: Iterable[Array],
        numbers: Iterable[str],
        options: Mapping[str, Any],
        kept: Iterable[str],
    ) -> None:
        self.definitions, self.options = definitions, options
        self.given, self.numbers = {array.name: array for array in given}, frozenset(numbers)
        self.kept = frozenset(kept)
        self.rows = row_letters(definitions)
        self.values: dict[str, Value] = {}  # each after those that it depends on
        self.sums: dict[str, Sum] = {}
        self.open: list[str] = []  # names that are being lowered
        self.exact = False  # whether a quotient must be rounded once
        self.definition: Definition | None = None

    def fail(self, message: str) -> CompileError:
        return self.definitions.error(message, self.definition)

    def axis(self, letter: str) -> str:
        base = letter.rstrip("'")
        return base if base in self.rows else COLUMN

    def value(self, name: str) -> Value:
        """The value of a name that an equation defines."""
        if name in self.values:
            return self.values[name]
        definition = self.definitions.known.get(name)
        if definition is None:
            raise self.definitions.undefined(name, self.definition)
        if name in self.open:
            raise self.fail(f"{name} depends on itself: {' → '.join([*self.open, name])}")
        outer, self.definition = self.definition, definition
        self.open.append(name)
        places: dict[str, Node] = {letter: ("at", self.axis(letter)) for letter in definition.letters}
        value = self.sum_over_rows(definition, self.bound(definition, places))
        value = value or self.defined(definition, places)
        left = self.left(definition, value.axes)
        if extra := (value.letters - {*definition.letters}) | (value.axes - {*left, COLUMN}):
            raise self.fail(f"the index {', '.join(sorted(extra))} is on the right only")
        same = value.stage != LOOPS and self.layout(value.tree) == left
        if value.stage == TAIL and not same:
            raise self.fail(
                "a sum over all rows is known only after the loops, and cannot be given other indices there"
            )
        if not same:
            value = self.under_a_name(value, "k")._replace(stage=LOOPS, axes=frozenset(left))
        self.open.pop()
        self.definition = outer
        self.values[name] = value = value._replace(text=definition.spelled())
        return value

    def defined(self, definition: Definition, places: dict[str, Node]) -> Value:
        """The value of a definition at these places."""
        value = self.lower(definition.node, self.bound(definition, places))
        stored = definition.name in self.kept and value.stage == LOOPS and not is_bracket(value.tree)
        stored = stored and COLUMN in map(self.axis, definition.letters)
        return value._replace(tree=("stored", value.tree)) if stored else value

    def left(self, definition: Definition, axes: frozenset[str]) -> tuple[str, ...]:
        """The axes on the left of a definition, with n, even if it is not written, where the right side has `axes`."""
        written = len(definition.left[2]) > len(definition.letters)
        of_argument = self.definitions.gradients.get(definition.name)
        rows = written or ROW in axes or ROW in (of_argument or ())
        left = (*((ROW,) if rows else ()), *map(self.axis, definition.letters))
        if of_argument not in (None, left):
            raise self.fail(f"{definition.name} needs the indices of {definition.name[1:]}, in the same order")
        if len({*left}) < len(left) or {*definition.letters} & dict(definition.bindings).keys():
            raise self.fail("on the left each index must stand once, n first, and none that a with clause defines")
        return left

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The axes of a value; if an equation defines it, in the order of the indices on its left."""
        value, definition = self.value(name), self.definitions.known.get(name)
        return self.left(definition, value.axes) if definition else tuple(value.axes)

    def layout(self, tree: Any) -> tuple[str, ...]:
        """The axes, in order, of a tree that the head or the tail computes with whole arrays."""
        if not isinstance(tree, tuple) or tree[:1] == ("over",):
            return ()
        if tree[:1] == ("load",):
            return tuple(place[1] for place in tree[2])
        if tree[:1] == ("sum",):
            return self.sums[tree[1]].axes
        parts = self.values[tree[1]].tree if tree[:1] == ("value",) else tree
        return next(filter(None, map(self.layout, parts)), ())

    def bound(self, definition: Definition, places: dict[str, Node]) -> dict[str, Node]:
        """The place that each letter stands for, also those of the "with" clause."""
        for letter, node in definition.bindings:
            places = {**places, letter: self.lower(node, places).tree}
        return places

    def lower(self, node: Node, places: dict[str, Node]) -> Value:
        """The value of a node of an equation."""
        return self.value_of(node, places)._replace(text=spelled(node))

    def value_of(self, node: Node, places: dict[str, Node]) -> Value:
        kind = node[0]
        if kind == "num":
            return Value(("num", float(node[1])))
        if kind == "group":
            return self.lower(node[1], places)
        if kind == "idx":
            return self.place(node[1], places)
        if kind == "name":
            return self.named(self.definitions.resolve(node[1]), node[2], places)
        if kind == "over":
            return self.over(node, places)
        if kind == "cases":
            return self.choose(node[1], node[2], places)
        if kind in ("bracket", "delta"):
            conditions = node[1] if kind == "bracket" else (("=", node[1], node[2]),)
            return self.choose(((("num", 1.0, "1"), conditions),), ("num", 0.0, "0"), places)
        if kind == "call":
            value = self.join([self.lower(part, places) for part in node[2]], lambda *trees: ("call", node[1], trees))
            value = value._replace(text=spelled(node))
            return self.under_a_name(value, node[1]) if node[1] in SLOW and COLUMN in value.axes else value
        if kind == "abs":
            return self.join([self.lower(node[1], places)], lambda *trees: ("call", kind, trees))
        if kind == "floor":
            return self.join([self.exactly(node[1], places)], lambda *trees: ("call", kind, trees))
        if kind == "/":
            return self.quotient(*(self.lower(part, places) for part in node[1:]))
        if kind == "mod":
            return self.join([self.exactly(part, places) for part in node[1:]], lambda *trees: (kind, *trees))
        if kind in ("+", "-", "*", "^", "neg"):
            return self.join([self.lower(part, places) for part in node[1:]], lambda *trees: (kind, *trees))
        raise self.fail(f"{spelled(node)} has no value that a loop can compute")

    def exactly(self, node: Node, places: dict[str, Node]) -> Value:
        """The value of a node whose last bit counts: 49 (1/49) is less than 49/49."""
        before, self.exact = self.exact, True
        value = self.lower(node, places)
        self.exact = before
        return value

    def place(self, letter: str, places: dict[str, Node]) -> Value:
        """The value of an index letter that stands in an equation as a number."""
        if letter not in places and self.axis(letter) != ROW:
            raise self.fail(f"the index {letter} stands for nothing here")
        at = places.get(letter, ("at", ROW))
        axes = frozenset(leaf[1] for leaf in walk(at) if leaf[0] == "at")
        return Value(at, LOOPS, 0, axes, frozenset({letter}) if at == ("at", COLUMN) else frozenset())

    def named(self, name: str, indices: Sequence[Node], places: dict[str, Node]) -> Value:
        if name in self.numbers:
            return Value(("number", name))
        at = [self.lower(index, places) for index in indices]
        if name in self.given:
            return self.load(self.given[name], at)
        if not indices and name not in self.definitions.known and len(name) == 1 and name.isupper():
            return Value(("size", self.axis(name.lower())))
        value = self.value(name)
        definition = self.definitions.known[name]
        if at and at[0].tree == ("at", ROW):
            at = at[1:]
        if len(definition.letters) != len(at):
            raise self.fail(f"{name} has {len(definition.letters)} indices elsewhere, and {len(at)} here")
        letters = union(part.letters for part in at)
        inside = dict(zip(definition.letters, (part.tree for part in at), strict=True))
        if all(inside[letter] == ("at", self.axis(letter)) for letter in inside):
            return value._replace(tree=value.tree if value.tree[0] == "sum" else ("value", name), letters=letters)
        value = self.defined(definition, inside)  # the equation at another place
        return value._replace(axes=value.axes | union(part.axes for part in at), letters=letters)

    def load(self, array: Array, at: Sequence[Value]) -> Value:
        lead = array.axes[: len(array.axes) - len(at)]
        if len(at) > len(array.axes):
            raise self.fail(
                f"{array.name} has {len(array.axes)} axes, and {len(at)} indices here: if some of the axes before the "
                "last have letters, write all of them in every equation, n too"
            )
        places = (*(("at", axis) for axis in lead), *(self.spread(part.tree) for part in at))
        for axis, place in zip(array.axes, places, strict=True):  # the sizes may differ
            if place[0] == "at" and place[1] != axis and axis in (*self.rows, COLUMN):
                raise self.fail(f"{array.name} has other indices here than where it is defined")
        whole = COLUMN not in array.axes and places == tuple(("at", axis) for axis in array.axes)
        axes, letters = union(part.axes for part in at) | set(lead), union(part.letters for part in at)
        level = max((part.level for part in at), default=0)
        return Value(("load", array.name, places), HEAD if whole else LOOPS, level, axes, letters)

    def spread(self, place: Node) -> Node:
        """A place with the trees of the values that it refers to, in place of their names."""
        return rebuilt(place, lambda node: self.spread(self.values[node[1]].tree) if node[0] == "value" else node)

    def join(self, parts: Sequence[Value], build: Callable[..., Node]) -> Value:
        """The value of an expression, from the values of its parts."""
        stage = max(part.stage for part in parts)
        mixed = len({self.layout(part.tree) for part in parts if part.stage != LOOPS} - {()}) > 1
        if stage == HEAD and mixed:  # only the loops can tell the axes of one array from those of another
            stage = LOOPS
        if stage == LOOPS:
            parts = [self.under_a_name(part, "k") for part in parts]
        if stage == TAIL and (mixed or any(part.stage == LOOPS for part in parts)):
            raise self.fail(
                "a sum over all rows is known only after the loop over the rows, so no row can use it: make what uses "
                "it a second operation, with the sum as an argument"
            )
        if stage == LOOPS and any(COLUMN in part.axes for part in parts):
            parts = [part if COLUMN in part.axes else self.under_a_name(part, "r") for part in parts]
        tree = build(*(part.tree for part in parts))
        axes, letters = union(part.axes for part in parts), union(part.letters for part in parts)
        return Value(folded(tree), stage, max(part.level for part in parts), axes, letters)

    def quotient(self, a: Value, b: Value) -> Value:
        """a/b. What has no column is inverted once, and each column multiplied by it, unless the last bit counts."""
        exact = self.exact and not (b.tree[0] == "num" and math.frexp(b.tree[1])[0] == 0.5)  # a power of 2
        if COLUMN in a.axes and COLUMN not in b.axes and not exact:
            inverse = self.join([Value(("num", 1.0)), b], lambda *trees: ("/", *trees))
            inverse = inverse._replace(text=f"1/({b.text})" if " " in b.text else f"1/{b.text}")
            return self.join([a, inverse], lambda *trees: ("*", *trees))
        return self.join([a, b], lambda *trees: ("/", *trees))

    def under_a_name(self, value: Value, prefix: str) -> Value:
        """The value with a name in place of its tree. prefix: of the name; with "k" only values of the head get one."""
        if prefix == "k" and value.stage != HEAD:
            return value
        if value.tree in (("size", COLUMN), ("size", ROW)):
            return value
        if prefix == "k" and value.tree[0] == "value" and value.axes:  # an array that the head computes
            return value._replace(tree=("load", value.tree[1], tuple(("at", axis) for axis in self.layout(value.tree))))
        if value.tree[0] == "value" or (prefix != "row" and value.tree[0] in ("num", "number", "load", "sum", "at")):
            return value
        same = (name for name, known in self.values.items() if known.tree == value.tree)
        name = next(same, None) or self.unused(f"{prefix}{len(self.values)}")
        self.values.setdefault(name, value)
        if value.stage == HEAD and value.axes:
            return value._replace(tree=("load", name, tuple(("at", axis) for axis in self.layout(value.tree))))
        return value._replace(tree=("value", name))

    def unused(self, name: str) -> str:
        """The name, with as many x added as it takes to differ from the names of the equations."""
        while name in self.definitions.known or name in self.given or name in self.numbers:
            name += "x"
        return name

    def choose(self, cases: Sequence, otherwise: Node, places: dict[str, Node]) -> Value:
        """The first of the cases whose conditions hold, or else `otherwise`. Conditions on options are decided here."""
        if not cases:
            return self.lower(otherwise, places)
        (node, conditions), *others = cases
        undecided = [condition for condition in conditions if not self.on_option(condition)]
        if not all(self.holds(condition) for condition in conditions if self.on_option(condition)):
            return self.choose(others, otherwise, places)
        if not undecided:
            return self.lower(node, places)
        sides = [self.exactly(side, places) for _, left, right in undecided for side in (left, right)]

        def build(*trees: Node) -> Node:
            relations = [relation for relation, _, _ in undecided]
            return ("if", tuple(zip(relations, trees[:-2:2], trees[1:-2:2], strict=True)), *trees[-2:])

        return self.join([*sides, self.lower(node, places), self.choose(others, otherwise, places)], build)

    def on_option(self, condition: tuple) -> bool:
        return condition[1][0] == "name" and condition[1][1] in self.options

    def holds(self, condition: tuple) -> bool:
        relation, left, right = condition
        option = self.options[left[1]]
        if not isinstance(option, str | bool | None) and spelled(right).lower() != "none":  # such as NumPy's True
            raise self.fail(f"{left[1]} is neither True, False, None nor a string")
        return (str(self.options[left[1]]).lower() == spelled(right).lower()) == (relation == "=")

    def over(self, node: Node, places: dict[str, Node]) -> Value:
        """A sum, mean or maximum within an expression. (For totals with a column see `sum_over_rows`.)"""
        _, function, letters, body, conditions = node
        if is_product(node):
            raise self.definitions.product(node, self.definition)
        axes = {self.axis(letter) for letter in letters}
        if conditions or function not in ("sum", "mean", "max") or len(axes) > 1:
            raise self.fail(f"{spelled(node)}: only a sum, mean or maximum over one whole axis can be compiled")
        value = self.lower(body, {**places, **{letter: ("at", self.axis(letter)) for letter in letters}})
        if COLUMN not in axes:
            return self.of_rows(node, value, axes)
        if COLUMN not in value.axes:  # it is the same in all columns
            return self.join([value, Value(("size", COLUMN))], product) if function == "sum" else value
        if others := value.letters - set(letters):
            one, all_ = ", ".join(sorted(others)), ", ".join(letters)
            raise self.fail(f"{spelled(node)}: for each {one} a sum over every {all_} cannot be compiled")
        value = self.under_a_name(value, "k")
        entry = Sum("max" if function == "max" else "sum", value.tree, value.level, None, (), spelled(node))
        total = Value(("sum", self.register(entry)), LOOPS, value.level + 1, value.axes - axes)
        size = Value(("size", COLUMN), text="columns")
        return self.quotient(total, size) if function == "mean" else total

    def of_rows(self, node: Node, value: Value, axes: set[str]) -> Value:
        """A sum or mean over rows of a value without a column. axes: the one axis that it is over."""
        if COLUMN in value.axes or node[1] == "max":
            raise self.fail(
                f"{spelled(node)}: a sum over rows must stand alone on the right, as in a_c = Σ_n ..., and only the "
                "results of the operation may use it, since it is known after the loop over the rows"
            )
        if not value.axes:  # it is the same in all rows
            size = Value(("size", *axes))
            return value if node[1] == "mean" else self.join([value, size], lambda *trees: ("*", *trees))
        if value.axes != axes:
            raise self.fail(
                f"{spelled(node)}: this is not over all axes of what has no column, and only such a sum can be compiled"
            )
        stage = TAIL if value.stage else HEAD
        if value.stage == LOOPS:
            value = self.under_a_name(value, "row")
        tree: Node = ("over", node[1], value.tree)
        return Value(tree, stage)

    def sum_over_rows(self, definition: Definition, places: dict[str, Node]) -> Value | None:
        """The value of `a_c = Σ_n ...`, or of `a_vc = Σ_n [ids_n = v] ...`; None for another definition."""
        node = definition.node
        axes = self.left(definition, frozenset())
        if node[:2] != ("over", "sum") or node[4] or COLUMN in map(self.axis, node[2]) or axes[-1:] != (COLUMN,):
            return None
        if is_product(node):
            raise self.definitions.product(node, definition)
        places = {**places, **{letter: ("at", self.axis(letter)) for letter in node[2]}}
        body: list[Node] = []
        for factor in factors(node[3]):
            others = []
            for condition in factor[1] if factor[0] == "bracket" else ():
                relation, left, right = condition
                if relation == "=" and right[:1] == ("idx",) and right[1] in definition.letters:
                    places[right[1]] = self.lower(left, places).tree
                else:
                    others.append(condition)
            if factor[0] != "bracket" or others:
                body.append(("bracket", tuple(others)) if others else factor)
        value = self.join([self.lower(factor, places) for factor in body or [("num", 1.0, "1")]], product)
        at = (
            *((("at", ROW),) * (len(axes) - len(definition.letters))),
            *(places[letter] for letter in definition.letters),
        )
        if at[-1] != ("at", COLUMN):
            return None
        for letter in node[2]:
            if ("at", self.axis(letter)) in at:
                raise self.fail(
                    f"{spelled(node)}: for each {self.axis(letter)} a sum over every {letter} cannot be compiled"
                )
            if self.axis(letter) not in value.axes:
                times = letter.rstrip("'").upper()
                raise self.fail(
                    f"{spelled(node)}: what is added up is the same for each {letter}: write {times} times it"
                )
        if (
            same := {axis for axis, place in zip(axes, at, strict=True) if place == ("at", axis)}
            - value.axes
            - {COLUMN}
        ):
            raise self.fail(f"{spelled(node)}: a sum over rows that is the same for each {', '.join(sorted(same))}")
        entry = Sum("sum", value.tree, value.level, at, axes, spelled(node))
        return Value(("sum", self.register(entry)), TAIL, 0, frozenset(axes), frozenset(definition.letters))

    def register(self, entry: Sum) -> str:
        """The name of a sum. Equal sums have one name, whatever the letters of their indices."""
        same = (name for name, known in self.sums.items() if known._replace(text=entry.text) == entry)
        name = next(same, None) or self.unused(f"{entry.function}{len(self.sums)}")
        self.sums.setdefault(name, entry)
        return name


def is_bracket(tree: Node) -> bool:
    """Whether a tree is 1 where conditions hold, and else 0. An array of such values holds booleans."""
    return tree[0] == "if" and tree[2:] == (("num", 1.0), ("num", 0.0))


def factors(node: Node) -> list[Node]:
    """The factors of a product."""
    if node[0] == "group":
        return factors(node[1])
    return [*factors(node[1]), *factors(node[2])] if node[0] == "*" else [node]


def product(*trees: Node) -> Node:
    first, *others = trees
    for tree in others:
        first = ("*", first, tree)
    return first


def folded(tree: Node) -> Node:
    """A tree of constants as one constant; any other tree as it is."""
    parts = tree[2] if tree[0] == "call" else tree[1:]
    function = CONSTANT.get(tree[1] if tree[0] == "call" else tree[0])
    if function and all(part[:1] == ("num",) for part in parts):
        try:
            x = function(*(part[1] for part in parts))
        except (ArithmeticError, ValueError):  # as 1/0 and log 0: left to the loops
            return tree
        return ("num", x) if isinstance(x, float) else tree
    return tree

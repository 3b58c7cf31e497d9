"""A derivation as plans: what of an operation's arguments are arrays, and what its backward needs from its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..dispatch import cache_type
from ..notation.grammar import canonical, walk
from .equations import Definitions, definitions_of
from .plan import Plan, kind, make_plan
from .trees import COLUMN, ROW, Array, Lowering, row_letters

__all__ = ["Derivation", "Pair"]


class Pair(NamedTuple):
    """The plans of a forward and a backward. kept: what the forward hands over to the backward, by name."""

    forward: Plan
    backward: Plan | None
    kept: tuple[str, ...]


class Derivation:
    """The equations of an operation, and its plans for each set of options."""

    def __init__(self, op: Callable, op_backward: Callable | None) -> None:
        self.op, self.signature = op, inspect.signature(op)
        self.arguments = {canonical(name): name for name in self.signature.parameters}
        self.fields: tuple[str, ...] = ()
        if op_backward is not None:
            gradient, parameter, *_ = inspect.signature(op_backward).parameters
            annotated = cache_type(op_backward, parameter)
            self.fields = tuple(map(canonical, getattr(annotated, "_fields", (parameter,))))
            self.gradient, self.output = canonical(gradient), canonical(gradient.removeprefix("d"))
        self.has_backward = op_backward is not None
        names = [*self.arguments, *(self.fields if self.has_backward else map(before, self.arguments))]
        self.definitions = definitions_of(op, op_backward, names)
        self.arrays = {array.name: array for array in arrays_of(self.definitions, names)}
        sides = [node for _, side in self.definitions.sides for node in walk(side) if node[0] in ("cases", "bracket")]
        self.deciding = {leaf[1] for node in sides for leaf in walk(node) if leaf[0] == "name" and not leaf[2]}
        self.pair = cache(self.make_pair)

    def compile(self) -> Pair:
        """The plans with the defaults of the arguments. Raises CompileError if there are none."""
        defaults = {name: self.signature.parameters[self.arguments[name]].default for name in self.arguments}
        others = {name: value for name, value in defaults.items() if name not in self.arrays}
        options = {name: value for name, value in others.items() if value is None or isinstance(value, str | bool)}
        numbers = tuple(name for name in others if name not in options)
        return self.pair(numbers, tuple((name, options[name]) for name in options if name in self.deciding))

    def make_pair(self, numbers: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Pair:
        """The plans, if these arguments are numbers, and those have these values."""
        name, chosen, known = self.definitions.operation, dict(options), self.definitions.known
        given = [array for array in self.arrays.values() if array.name not in known]
        there = [array for array in given if array.name not in numbers]
        if not self.has_backward:
            results = [argument for argument in self.arguments if argument in known]
            plan = make_plan(self.definitions, there, numbers, chosen, results, name)
            return Pair(in_place(plan, self.definitions), None, ())
        lowering = Lowering(self.definitions, there, numbers, chosen)
        output = lowering.value(self.output)
        dy = Array(self.gradient, tuple(sorted(output.axes, key=lambda axis: (axis == COLUMN, axis != ROW))))
        fields = [self.definitions.resolve(field) for field in self.fields]
        kept = {field: there_or_computed(field, lowering, self.arrays) for field in fields}
        arrays = [array for array in kept.values() if array is not None]
        gradients = [f"d{argument}" for argument in self.arguments if f"d{argument}" in known]
        backward = make_plan(self.definitions, [dy, *arrays], numbers, chosen, gradients, f"{name}_backward")
        trees = [value.tree for value in backward.values.values()] + [each.tree for each in backward.sums.values()]
        used = {leaf[1] for tree in trees for leaf in walk(tree) if leaf[0] == "load"}
        needed = [field for field in fields if field in used]
        computed = [field for field in needed if field in known and field not in self.arguments]
        results = list(dict.fromkeys([self.output, *computed]))
        forward = make_plan(self.definitions, there, numbers, chosen, results, name)
        return Pair(forward, backward, tuple(dict.fromkeys(needed)))


def before(name: str) -> str:
    """What equations call an argument before an operation that changes it in place: m0 is m before."""
    return f"{name}0"


def in_place(plan: Plan, definitions: Definitions) -> Plan:
    """The plan that reads what is there before from the array that it writes. That is safe only if every number depends
    on others at the same place alone.
    """
    if plan.axes != (COLUMN,):
        raise definitions.error("in place only what is at the same place can be read: not sums, nor other indices")
    old = {before(name): name for name in plan.results}

    def renamed(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return tree
        return ("load", old.get(tree[1], tree[1]), tree[2]) if tree[:1] == ("load",) else tuple(map(renamed, tree))

    values = {key: value._replace(tree=renamed(value.tree)) for key, value in plan.values.items()}
    reads = tuple(array for array in plan.reads if array.name not in old)
    return plan._replace(reads=reads, values=values, in_place=True)


def there_or_computed(name: str, lowering: Lowering, arrays: Mapping[str, Array]) -> Array | None:
    """A field of the cache as an array: an argument, or a value of the forward; None for anything else."""
    if name in lowering.given:
        return lowering.given[name]
    if name not in lowering.definitions.known:
        return None
    value = lowering.value(name)
    return Array(name, tuple(sorted(value.axes, key=lambda axis: (axis == COLUMN, axis != ROW))), kind(value.tree))


def arrays_of(definitions: Definitions, names: Sequence[str]) -> list[Array]:
    """Those of the names that equations use as arrays, with their axes.

    Equations may leave out n, the rows. An array without it has rows all the same, unless the gradient of the array is a
    sum over rows: then all rows share it.
    """
    rows = row_letters(definitions)
    found: dict[str, Array] = {}
    for clear in (True, False):  # first from indices that are plain letters
        for bound, side in definitions.sides:
            for node in walk(side):
                if node[0] != "name" or not node[2]:
                    continue
                name, indices = definitions.resolve(node[1]), [i[1] if i[0] == "idx" else "" for i in node[2]]
                if name not in names or name in found or "" in indices or (clear and {*indices} & {*bound}):
                    continue
                axes = [axis_of(letter, bound, rows) for letter in indices]
                gradient = definitions.known.get(f"d{name}")
                shared = gradient is not None and gradient.node[0] == "over" and "n" not in gradient.letters
                if ROW not in axes and not (shared and COLUMN not in [axis_of(i, (), rows) for i in gradient.node[2]]):
                    axes = [ROW, *axes]
                found[name] = Array(name, tuple(axes), "integer" if name in places_in(definitions) else "real")
    return list(found.values())


def axis_of(letter: str, bound: Sequence[str], rows: frozenset[str]) -> str:
    base = letter.rstrip("'")
    return base if base in rows or base in bound else COLUMN


def places_in(definitions: Definitions) -> set[str]:
    """The names of arrays of places: those that a "with" clause, an index, or an equality with an index uses."""
    found = set()
    for _, side in definitions.sides:
        for node in walk(side):
            if node[0] == "name":
                found |= {part[1] for index in node[2] for part in walk(index) if part[0] == "name"}
            if node[0] == "bracket":
                for relation, a, b in node[1]:
                    found |= {x[1] for x, y in ((a, b), (b, a)) if relation == "=" and x[0] == "name" and y[0] == "idx"}
    for definition in definitions.known.values():
        found |= {part[1] for _, node in definition.bindings for part in walk(node) if part[0] == "name"}
    return {definitions.resolve(name) for name in found}

"""The plans of a derivation: which arguments are arrays, and what the backward needs from the forward."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..dispatch import cache_type
from ..notation.grammar import Node, canonical, walk
from ..notation.run import source_tree
from .axes import arranged, replaced
from .equations import Definitions, definitions_of
from .plan import Plan, kind, make_plan, names, with_term
from .trees import COLUMN, ROW, Array, Lowering, row_letters

__all__ = ["PLUS", "Derivation", "Plans"]

PLUS = "plus"  # the gradient that an argument has by another path, see `dispatch.Operation.add_twin`


class Plans(NamedTuple):
    """The plans of a forward and a backward. kept: the names of what the forward keeps for the backward. plus: the plan
    of a backward with an array PLUS that is added to its first result; None if that is computed after the loops.
    """

    forward: Plan
    backward: Plan | None
    kept: tuple[str, ...]
    plus: Plan | None = None


class Derivation:
    """The equations of an operation, and its plans for each set of options.

    gives: names that the equations take as given besides the arguments, see `dispatch.operation`.
    """

    def __init__(self, op: Callable, op_backward: Callable | None, gives: Sequence[str] = ()) -> None:
        self.op, self.signature, self.gives = op, inspect.signature(op), gives
        self.arguments = {canonical(name): name for name in self.signature.parameters}
        self.fields: tuple[str, ...] = ()
        bits: set[str] = set()  # the fields that hold random bits, which the loops draw where they use them
        if op_backward is not None:
            gradient, parameter, *_ = inspect.signature(op_backward).parameters
            self.fields = tuple(map(canonical, fields_of(op_backward, parameter)))
            kinds = getattr(cache_type(op_backward, parameter), "__annotations__", {}).items()
            bits = {canonical(name) for name, kind in kinds if getattr(kind, "__forward_arg__", kind) == "Bits"}
            self.gradient, self.output = canonical(gradient), canonical(gradient.removeprefix("d"))
        self.has_backward = op_backward is not None
        wanted = [*self.arguments, *(self.fields if self.has_backward else map(before, self.arguments))]
        self.definitions = definitions_of(op, op_backward, wanted)
        arrays = arrays_of(self.definitions, wanted)
        self.arrays = {a.name: a._replace(kind="bits") if a.name in bits else a for a in arrays}
        self.definitions = self.definitions._replace(gradients={f"d{a.name}": a.axes for a in arrays})
        sides = [node for _, side in self.definitions.sides for node in walk(side) if node[0] in ("cases", "bracket")]
        self.deciding = {leaf[1] for node in sides for leaf in walk(node) if leaf[0] == "name" and not leaf[2]}
        self.pair = cache(self.make_pair)

    def compile(self) -> Plans:
        """The plans with the defaults of the arguments. Raises CompileError if there are none."""
        defaults = {name: self.signature.parameters[self.arguments[name]].default for name in self.arguments}
        arrays = {*self.arrays, *self.definitions.known}
        others = {name: value for name, value in defaults.items() if name not in arrays}
        options = {name: value for name, value in others.items() if value is None or isinstance(value, str | bool)}
        numbers = tuple(name for name in others if name not in options)
        return self.pair(numbers, tuple((name, options[name]) for name in options if name in self.deciding))

    def make_pair(self, numbers: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Plans:
        """The plans for calls in which the arguments `numbers` are numbers, and `options` have these values."""
        name, chosen, known = self.definitions.operation, dict(options), self.definitions.known
        given = [array for array in self.arrays.values() if array.name in self.gives or array.name not in known]
        there = [array for array in given if array.name not in numbers]
        if not self.has_backward:
            results = [argument for argument in self.arguments if argument in known]
            if not results:
                raise self.definitions.error("it has no backward, and no equation computes one of its arguments")
            others = (x for x in self.arguments if x not in (*self.arrays, *numbers, *chosen, *known))
            there += [Array(x, ()) for x in others]  # a number that is in an array, on a GPU
            plan = arranged(make_plan(self.definitions, there, numbers, chosen, results, name))
            return Plans(in_place(plan, self.definitions), None, ())
        lowering = Lowering(self.definitions, there, numbers, chosen, ())
        dy = Array(self.gradient, lowering.axes_of(self.output))
        fields = [self.definitions.resolve(field) for field in self.fields]
        kept = {field: there_or_computed(field, lowering, self.arrays) for field in fields}
        arrays = [array for array in kept.values() if array is not None]
        named = [f"d{argument}" for argument in self.arguments]
        gradients = [gradient for gradient in named if gradient in known or gradient in self.definitions.partial]
        if not gradients:
            raise self.definitions.error(f"no equation computes a gradient: {' or '.join(named)}")
        lost = frozenset(self.arguments) - {array.name for array in arrays}
        definitions = self.definitions._replace(lost=lost)
        backward = make_plan(definitions, [dy, *arrays], numbers, chosen, gradients, f"{name}_backward")
        used = names(backward.trees)
        needed = [field for field in fields if field in used]
        computed = [field for field in needed if field in known and field not in (*self.arguments, *self.gives)]
        results = list(dict.fromkeys([self.output, *computed]))
        forward = make_plan(self.definitions, there, numbers, chosen, results, name, computed)
        sizes = {axis for array in there for axis in array.axes if array.name in self.arguments}
        for plan in (forward, backward):
            asked = {node[1] for tree in plan.trees for node in walk(tree) if node[0] == "size"}
            if unknown := ", ".join(sorted({*plan.axes, *asked} - sizes)):
                raise self.definitions.error(
                    f"the size of the axis {unknown} is not known: no argument is an array that has it",
                    known[plan.results[0]],
                )
        arranged_backward = arranged(backward)
        plus = with_term(arranged_backward, gradients[0], PLUS)
        return Plans(arranged(forward), arranged_backward, tuple(dict.fromkeys(needed)), plus)


def fields_of(op_backward: Callable, parameter: str) -> tuple[str, ...]:
    """The names of what the cache keeps: the fields of its NamedTuple; or those that the backward unpacks it into, as
    in `x, s = cache`; or the name of the parameter, if the cache is one array.
    """
    fields = getattr(cache_type(op_backward, parameter), "_fields", ())
    parsed = source_tree(op_backward)
    for node in ast.walk(parsed[1]) if parsed and not fields else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == parameter:
            into = tuple(name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name))
            fields = into if isinstance(node.targets[0], ast.Tuple) else fields
    return fields or (parameter,)


def before(name: str) -> str:
    """The name that equations have for an argument before the operation changes it in place: m0 for m."""
    return f"{name}0"


def in_place(plan: Plan, definitions: Definitions) -> Plan:
    """The plan with earlier values, such as m0, read from the array to which the new ones, m, are written. That is safe
    only if each number depends only on numbers at the same place.
    """
    if not plan.flat:
        raise definitions.error("in place only what is at the same place can be read: not sums, nor other indices")
    old = {before(name): name for name in plan.results}

    def renamed(node: Node) -> Node:
        return ("load", old.get(node[1], node[1]), node[2]) if node[0] == "load" else node

    reads = tuple(array for array in plan.reads if array.name not in old)
    return replaced(plan, renamed, tuple)._replace(reads=reads, in_place=True)


def there_or_computed(name: str, lowering: Lowering, arrays: Mapping[str, Array]) -> Array | None:
    """A field of the cache as an array: an argument, or a value of the forward; None for anything else."""
    if name in lowering.given:
        return lowering.given[name]
    if name not in lowering.definitions.known:
        return None
    return Array(name, lowering.axes_of(name), kind(lowering.value(name).tree))


def arrays_of(definitions: Definitions, wanted: Sequence[str]) -> list[Array]:
    """The arrays among the wanted names, with their axes: the names that equations use with indices.

    Equations may leave out n, the rows. An array without it has rows all the same, unless the gradient of the array is
    a sum over rows: then all rows share it. (Where rows have other letters, none is left out.)
    """
    rows = row_letters(definitions)
    arrays: dict[str, Array] = {}
    gradients = ((name, definitions.known.get(f"d{name}")) for name in wanted)
    sides = [*definitions.sides, *(((), ("name", name, each.left[2])) for name, each in gradients if each)]
    for clear in (True, False):  # first from indices that no "with" clause defines
        for bound, side in sides:
            for node in walk(side):
                if node[0] != "name" or not node[2]:
                    continue
                name, indices = definitions.resolve(node[1]), [i[1] if i[0] == "idx" else "" for i in node[2]]
                if node is side and name in definitions.known:  # the left side of an equation
                    continue
                if name not in wanted or name in arrays or "" in indices or (clear and {*indices} & {*bound}):
                    continue
                axes = [axis_of(letter, bound, rows) for letter in indices]
                gradient = definitions.known.get(f"d{name}")
                shared = gradient is not None and gradient.node[0] == "over" and ROW in gradient.node[2]
                if rows == {ROW} and ROW not in axes and not shared:
                    axes = [ROW, *axes]
                arrays[name] = Array(name, tuple(axes), "integer" if name in places_in(definitions) else "real")
    return list(arrays.values())


def axis_of(letter: str, bound: Sequence[str], rows: frozenset[str]) -> str:
    base = letter.rstrip("'")
    return base if base in rows or base in bound else COLUMN


def places_in(definitions: Definitions) -> set[str]:
    """The names of integer arrays: those in a "with" clause or an index, or compared with an index."""
    used = set()
    for _, side in definitions.sides:
        for node in walk(side):
            if node[0] == "name":
                used |= {part[1] for index in node[2] for part in walk(index) if part[0] == "name"}
            if node[0] == "bracket":
                for relation, a, b in node[1]:
                    used |= {x[1] for x, y in ((a, b), (b, a)) if relation == "=" and x[0] == "name" and y[0] == "idx"}
    for definition in definitions.known.values():
        used |= {part[1] for _, node in definition.bindings for part in walk(node) if part[0] == "name"}
    return {definitions.resolve(name) for name in used}

"""Plans: the order in which loops compute the values of an operation, and which of them are stored.

A *plan* says how the results of a forward or of a backward are computed, for any target. It has three parts:

- The *head* is what depends on no array with a column, such as 1/(1 − p) in dropout. The array library computes it
  before the loops.
- The *loops* go over all rows, and within each row over its columns. A row depends on no other row.
- The *tail* is what depends on a sum over all rows. The array library computes it after the loops.

A *pass* is one loop over the columns of a row. A sum or maximum over a row is complete only after a pass, so what uses
it belongs to a later pass; sums that depend on the same earlier sums share one. For example, softmax takes three
passes: one for the maximum, one for the sum of the exponentials, and one for the results.

What has a column is computed again in each pass that uses it, since that is faster than reading it from memory. The
exceptions are the *kept values*: if more than one pass uses a result, or a value with an exponential or another slow
function, the first of them writes it to a row of memory, and the later ones read it there.

A *total* is a sum over rows, such as the gradient of γ in layer norm. Each row adds its terms to an array, which is 0
at the beginning. No row can use a total; only results and the tail do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..notation.grammar import Node, walk
from .equations import Definitions
from .trees import COLUMN, HEAD, LOOPS, ROW, SLOW, TAIL, Array, Lowering, Sum, Value, is_bracket, union


class Pass(NamedTuple):
    """One loop over the columns of a row; the values in it are names of the plan's `values` and `sums`."""

    before: tuple[str, ...]  # what is computed once for the row, before this loop
    steps: tuple[str, ...]  # what is computed for each column, in order
    sums: tuple[str, ...]  # sums and maxima over the column
    totals: tuple[str, ...]  # sums over rows
    stores: tuple[str, ...]  # the steps that are written to arrays
    keep: tuple[str, ...]  # the steps that are written to a row of memory for later passes
    kept: tuple[str, ...]  # the values that an earlier pass has written there


class Plan(NamedTuple):
    """The loops for some results of an operation.

    axes: of the loops, the column last. reads: the arrays that the loops read. numbers: what else the loops read:
    arguments that are numbers, and numbers of the head. writes: the arrays that they write; those of totals must be 0
    before.
    """

    name: str
    axes: tuple[str, ...]
    reads: tuple[Array, ...]
    numbers: tuple[str, ...]
    head: tuple[str, ...]
    passes: tuple[Pass, ...]
    last: tuple[str, ...]  # what is computed once for the row, after its last pass
    writes: tuple[Array, ...]
    tail: tuple[str, ...]
    results: tuple[str, ...]
    places: tuple[tuple[str, str], ...]  # integer arrays that are indices, each with the axis that it is an index of
    values: Mapping[str, Value]
    sums: Mapping[str, Sum]
    flat: bool = False  # whether each number depends only on numbers at the same place; then all axes are one column
    in_place: bool = False  # whether the loops also read the arrays that they write, as they were before

    @property
    def trees(self) -> list[Node]:
        """The trees of all values and sums."""
        return [
            *(value.tree for value in self.values.values()),
            *(t for each in self.sums.values() for t in each.trees),
        ]


def make_plan(
    definitions: Definitions,
    given: Iterable[Array],
    numbers: Iterable[str],
    options: Mapping[str, Any],
    results: Sequence[str],
    name: str,
    kept: Iterable[str] = (),
) -> Plan:
    """The plan for the names in `results`; for the other arguments see `Lowering`.

    Raises CompileError for what cannot be compiled.
    """
    lowering = Lowering(definitions, given, numbers, options, kept)
    for result in results:
        lowering.value(result)
    values, sums = lowering.values, lowering.sums
    needed = reach([("value", result) for result in results], values, sums)
    values = {key: value for key, value in values.items() if key in needed}
    loops = [key for key, value in values.items() if value.stage == LOOPS]
    head = [key for key, value in values.items() if value.stage == HEAD]
    tail = [key for key, value in values.items() if value.stage == TAIL]
    columns = {key for key in loops if COLUMN in values[key].axes}
    in_tail = names(values[key].tree for key in tail)
    written = [key for key in loops if key in results or key in in_tail]
    sums = {key: each for key, each in sums.items() if key in needed}

    levels = sorted({each.level for each in sums.values()} | {values[key].level for key in columns & {*written}})
    bodies = []
    for level in levels:
        here = [key for key, each in sums.items() if each.level == level]
        stores = [key for key in written if key in columns and values[key].level == level]
        trees = [part for key in here for part in sums[key].trees]
        trees += [("value", key) for key in stores]
        bodies.append((here, stores, trees))
    uses = [reach(trees, values, {}, columns) for _, _, trees in bodies]
    often = {key for key in columns if sum(key in use for use in uses) > 1}
    kept = {key for key in often if is_slow(values[key].tree) or key in written}
    passes: list[Pass] = []
    done: set[str] = set()
    for level, (here, stores, trees) in zip(levels, bodies, strict=True):
        steps = reach(trees, values, {}, columns, stop=kept & done)
        passes.append(
            Pass(
                tuple(key for key in loops if key not in columns | done and values[key].level <= level),
                tuple(key for key in loops if key in steps - (kept & done)),
                tuple(key for key in here if sums[key].at is None),
                tuple(key for key in here if sums[key].at is not None),
                tuple(stores),
                tuple(key for key in loops if key in (steps & kept) - done),
                tuple(key for key in loops if key in steps & kept & done),
            )
        )
        done |= {*passes[-1].before, *passes[-1].keep}
    last = tuple(key for key in loops if key not in columns | done)

    trees = [values[key].tree for key in loops] + [part for each in sums.values() for part in each.trees]
    used = names(trees)
    arrays = [array for array in lowering.given.values() if array.name in used]
    of_head = {key: lowering.layout(values[key].tree) for key in head if key in used}
    in_arrays = {key for key in of_head if of_head[key] or names_of_arrays(values[key].tree, values)}
    reads = [*arrays, *(Array(key, of_head[key]) for key in of_head if key in in_arrays)]
    of_call = [key for key in lowering.numbers if key in used]
    writes = [Array(key, lowering.axes_of(key), kind(values[key].tree)) for key in written]
    trees += [("at", axis) for array in writes for axis in array.axes]
    axes = loop_axes([*(lowering.axes_of(result) for result in results), *(array.axes for array in reads)], trees)
    if any(each.at is None for each in sums.values()) and axes == (COLUMN,):
        raise definitions.error(
            "a sum over the only axis of the arrays cannot be compiled: give them the index n too",
            definitions.known[results[0]],
        )
    totals = {key: each for key, each in sums.items() if each.at is not None}
    for key, each in totals.items():
        there = union(values[key].axes for key in reach(each.trees, values, sums) if key in values)
        if again := {*axes} - there - {leaf[1] for part in each.trees for leaf in walk(part) if leaf[0] == "at"}:
            letters = ", ".join(sorted(again))
            raise definitions.error(
                f"it would be added up again for each {letters}, over which the same loops go: make it an operation",
                next(definitions.known[result] for result in results if values[result].tree == ("sum", key)),
            )
    writes += [Array(key, each.axes) for key, each in totals.items()]
    return Plan(
        name,
        axes,
        tuple(reads),
        (*sorted(of_call), *(key for key in of_head if key not in in_arrays)),
        tuple(head),
        tuple(passes),
        last,
        tuple(writes),
        tuple(tail),
        tuple(results),
        tuple(sorted(places(trees, sums.values(), lowering.given))),
        values,
        sums,
    )


def with_term(plan: Plan, result: str, term: str) -> Plan | None:
    """The plan with an array `term`, like that of a result, which is added to the result. None if the loops do not
    write the result, or use it further.
    """
    array = next((array for array in plan.writes if array.name == result and result not in plan.sums), None)
    if array is None or {result, term} & names(plan.trees):
        return None
    value = plan.values[result]
    tree = ("+", value.tree, ("load", term, tuple(("at", axis) for axis in array.axes)))
    values = {**plan.values, result: value._replace(tree=tree, text=f"{value.text} + {term}")}
    return plan._replace(name=f"{plan.name}_{term}", reads=(*plan.reads, array._replace(name=term)), values=values)


def names(trees: Iterable[Node]) -> set[str]:
    """What trees refer to: values, sums, arrays and numbers."""
    return {leaf[1] for tree in trees for leaf in walk(tree) if leaf[0] in ("value", "sum", "load", "number")}


def reach(
    trees: Iterable[Node],
    values: Mapping[str, Value],
    sums: Mapping[str, Sum],
    among: Collection[str] | None = None,
    stop: Collection[str] = (),
) -> set[str]:
    """The names of values and sums that trees need, directly or through others; only those in `among`, if given. The
    search does not go on from the values in `stop`.
    """
    reached: set[str] = set()
    pending = [*trees]
    while pending:
        for name in names([pending.pop()]):
            if name in reached or (among is not None and name not in among):
                continue
            if name in values or name in sums:
                reached.add(name)
                if name not in stop:
                    pending += [values[name].tree] if name in values else sums[name].trees
    return reached


def places(trees: Iterable[Node], sums: Iterable[Sum], arrays: Mapping[str, Array]) -> set[tuple[str, str]]:
    """The integer arrays that are indices of other arrays or of sums, each with the axis that it is an index of."""
    pairs = [(arrays[n[1]].axes, n[2]) for tree in trees for n in walk(tree) if n[0] == "load" and n[1] in arrays]
    pairs += [(each.axes, each.at) for each in sums if each.at]
    return {(p[1], axis) for axes, at in pairs for axis, p in zip(axes, at, strict=True) if p[0] == "load"}


def names_of_arrays(tree: Node, values: Mapping[str, Value]) -> set[str]:
    """The arrays that a tree of the head depends on."""
    trees = [tree, *(values[name].tree for name in reach([tree], values, {}))]
    return {leaf[1] for each in trees for leaf in walk(each) if leaf[0] == "load"}


def is_slow(tree: Node) -> bool:
    return any(node[0] == "call" and node[1] in SLOW for node in walk(tree))


def kind(tree: Node) -> str:
    """The kind of an array that holds the values of a tree: booleans for a bracket."""
    return "bool" if is_bracket(tree) else "real"


def loop_axes(arrays: Iterable[tuple[str, ...]], trees: Iterable[Node]) -> tuple[str, ...]:
    """The axes of the loops, in the order in which these arrays have them, the column last."""
    looped = {leaf[1] for tree in trees for leaf in walk(tree) if leaf[0] == "at"}
    order = dict.fromkeys(axis for axes in arrays for axis in axes if axis in looped and axis != COLUMN)
    return (*sorted(order, key=lambda axis: axis != ROW), *((COLUMN,) if COLUMN in looped else ()))

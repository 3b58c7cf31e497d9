"""Plans with other axes: all axes as one, the column in two halves, rows in another order.

- If each number depends only on numbers at the same place, as in ReLU, all axes of the arrays are taken as one.
- If a place in the column is taken modulo its size or half of it, as in rotary positions, the column is cut into two
  *halves*: an axis of size 2, and a column of half the size. Then no loop has to divide.
- If arrays lie in memory with their axes of rows in another order, the loops take that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..notation.grammar import Node, rebuilt, walk
from .plan import Plan, names, reach
from .trees import COLUMN, LOOPS, ROW, Array

__all__ = ["HALF", "HERE", "arranged", "halved", "reordered", "replaced"]

HALF = "half"  # the axis of the two halves of a column
HERE = ("at", COLUMN)


def arranged(plan: Plan) -> Plan:
    """The plan with one axis, or with the column in halves, where the heading of this module says so."""
    if is_flat(plan):
        return replaced(
            plan,
            lambda node: ("load", node[1], (HERE,)) if node[0] == "load" and node[2] else node,
            lambda _: (COLUMN,),
        )._replace(flat=True)
    indices = {place for tree in plan.trees for node in walk(tree) if node[0] == "load" for place in node[2]}
    if any(node[0] == "mod" for place in indices for node in walk(place)):
        return halved(plan)
    return plan


def is_flat(plan: Plan) -> bool:
    """Whether each number depends only on numbers at the same place."""
    whole = all(array.axes in ((ROW, COLUMN), ()) for array in (*plan.reads, *plan.writes))
    places = {node[2] for tree in plan.trees for node in walk(tree) if node[0] == "load"}
    at = any(node[0] in ("at", "size") for tree in plan.trees for node in leaves(tree))
    return whole and not plan.sums and not at and places <= {(("at", ROW), HERE), ()}


def leaves(tree: Any) -> Iterator[Node]:
    """The nodes of a tree that are not in an index."""
    if isinstance(tree, tuple):
        if tree and isinstance(tree[0], str):
            yield tree
        if tree[:1] != ("load",):
            yield from (node for part in tree for node in leaves(part))


def replaced(plan: Plan, node: Callable[[Node], Node], axes: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plan:
    """The plan with other nodes in its trees, and other axes of its loops and arrays."""

    def arrays(given: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(array._replace(axes=axes(array.axes) if array.axes else ()) for array in given)

    values = {name: value._replace(tree=rebuilt(value.tree, node)) for name, value in plan.values.items()}
    sums = {
        name: each._replace(tree=rebuilt(each.tree, node), at=rebuilt(each.at, node))
        for name, each in plan.sums.items()
    }
    return plan._replace(
        axes=axes(plan.axes), reads=arrays(plan.reads), writes=arrays(plan.writes), values=values, sums=sums
    )


def halved(plan: Plan) -> Plan:
    """The plan with the column as two axes: which half, and the column within the half.

    In half h the column is c + h C/2 for 0 ≤ c < C/2. So a place is c + m C/2, or m C/2, with an m for each half.
    """
    columns = {array.name for array in (*plan.reads, *plan.writes) if array.axes[-1:] == (COLUMN,)}

    def halves(tree: Node) -> tuple[int, int, int] | None:
        """1 if c is part of a place, else 0; then m for each half. None for a place of another form."""
        kind, *parts = tree
        if tree == HERE:
            return 1, 0, 1
        if tree == ("size", COLUMN):
            return 0, 2, 2
        if kind == "value":
            return halves(plan.values[parts[0]].tree)
        if kind == "/" and parts == [("size", COLUMN), ("num", 2.0)]:
            return 0, 1, 1
        if kind not in ("+", "-", "mod"):
            return None
        a, b = map(halves, parts)
        if a is None or b is None or (kind != "+" and b[0]) or a[0] + b[0] > 1:
            return None
        combine: Mapping[str, Callable] = {"+": int.__add__, "-": int.__sub__, "mod": int.__mod__}
        return (a[0] + b[0], *(combine[kind](m, n) for m, n in zip(a[1:], b[1:], strict=True)))

    def which(m: tuple[int, ...]) -> Node:
        """A number that is m[0] in the first half and m[1] in the second, 0 or 1."""
        if m[0] == m[1]:
            return ("num", float(m[0]))
        return ("at", HALF) if m[1] else ("-", ("num", 1.0), ("at", HALF))

    def node(part: Node) -> Node:
        if part[0] == "load" and part[2] and (place := halves(part[2][-1])):
            _, *m = place
            return ("load", part[1], (*part[2][:-1], *((which(tuple(m)),) if part[1] in columns else ()), HERE))
        if part[0] == "if" and len(part[1]) == 1:
            (relation, left, right) = part[1][0]
            a, b = halves(left), halves(right)
            if relation == "<" and a and b and a[0] and not b[0]:
                below = tuple(int(m < n) for m, n in zip(a[1:], b[1:], strict=True))
                if below[0] == below[1]:
                    return part[3 - below[0]]
                return ("if", (("=", ("at", HALF), ("num", float(below[1]))),), *part[2:])
        return part

    whole, plan = plan, replaced(plan, node, lambda axes: (*axes[:-1], HALF, COLUMN) if axes[-1] == COLUMN else axes)
    trees = [("value", name) for name in plan.results]
    trees += [plan.values[name].tree for name in reach(trees, plan.values, plan.sums) if name in plan.values]
    left = {each for tree in trees for each in leaves(tree)}
    loads = [each for each in left if each[0] == "load" and each[1] in columns]
    if plan.sums or {HERE, ("size", COLUMN)} & left or any(len(each[2]) < 2 or each[2][-1] != HERE for each in loads):
        return whole  # a place in it does not lie in a known half
    used = names(value.tree for value in plan.values.values() if value.stage == LOOPS)
    head = tuple(name for name in plan.head if name in used or plan.values[name].axes)
    return plan._replace(numbers=tuple(name for name in plan.numbers if name in used), head=head)


def reordered(plan: Plan, order: tuple[str, ...]) -> Plan:
    """The plan with its loops, and the axes of its arrays, in this order."""

    def sorted_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=order.index)) if {*axes} <= {*order} else axes

    axes_of = {array.name: array.axes for array in (*plan.reads, *plan.writes)}

    def node(part: Node) -> Node:
        if part[0] != "load" or len(part[2]) < 2 or part[1] not in axes_of:  # what only the head reads is whole
            return part
        places = dict(zip(axes_of[part[1]], part[2], strict=True))
        return ("load", part[1], tuple(places[axis] for axis in sorted_axes(axes_of[part[1]])))

    plan = replaced(plan, node, sorted_axes)
    sums = {}
    for name, each in plan.sums.items():
        places, axes = dict(zip(each.axes, each.at or (), strict=False)), sorted_axes(each.axes)
        sums[name] = each._replace(axes=axes, at=each.at and tuple(places[axis] for axis in axes))
    return plan._replace(sums=sums)

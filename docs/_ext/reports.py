"""The checked derivations. A derivation that is not true stops the build."""

from __future__ import annotations

from functools import cache

from scratchformer.notation import Item, Report, Row
from scratchformer.notation.grammar import walk
from scratchformer.notation.layout import normal
from scratchformer.testing.derivations import CASES, check, variants


@cache
def reports(name: str) -> tuple[Report, ...]:
    """The checked derivation of this name, in all its cases: each may leave out what concerns another."""
    return tuple(check(case) for case in variants(name))


@cache
def items(name: str) -> tuple[tuple[Item, Row | None], ...]:
    """The items of a derivation from top to bottom, each with its row of the largest error, if it has one."""
    found: dict[tuple[int, int], tuple[Item, Row | None]] = {}
    for report in reports(name):
        for item in report.derivation.items:
            place = item.line, item.column
            rows = [row for row in report.rows if row.line == item.line and normal(row.text) == normal(item.text)]
            if place in found and (before := found[place][1]):
                rows.append(before)
            found[place] = item, max(rows, key=lambda row: row.error or 0, default=None)
    return tuple(found[place] for place in sorted(found))


@cache
def names(name: str) -> frozenset[str]:
    """The names that occur in the derivation of this name, in ASCII."""
    equations = (item.equation for item, _ in items(name) if item.equation)
    nodes = (node for equation in equations for part in equation.parts for node in walk(part))
    known = (known for report in reports(name) for known in report.values)
    return frozenset(known) | {node[1] for node in nodes if node[0] == "name"}


@cache
def compound() -> frozenset[str]:
    """The names with an underscore in any derivation; elsewhere an underscore begins the indices."""
    return frozenset(name for case in CASES for name in names(case) if "_" in name or "." in name)

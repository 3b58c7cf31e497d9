"""The checked derivations. A derivation that is not true stops the build."""

from __future__ import annotations

from functools import cache

from scratchformer.notation import Report
from scratchformer.notation.grammar import walk
from scratchformer.testing.derivations import CASES, check


@cache
def report(name: str) -> Report | None:
    """The checked derivation of this name, if it has one."""
    return check(name) if name in CASES else None


@cache
def names(name: str) -> frozenset[str]:
    """The names that occur in the derivation of this name, in ASCII."""
    checked = report(name)
    if checked is None:
        return frozenset()
    nodes = (node for item in checked.derivation.equations for part in item.equation.parts for node in walk(part))
    return frozenset(checked.values) | {node[1] for node in nodes if node[0] == "name"}


@cache
def compound() -> frozenset[str]:
    """The names with an underscore in any derivation; elsewhere an underscore begins the indices."""
    return frozenset(name for case in CASES for name in names(case) if "_" in name or "." in name)

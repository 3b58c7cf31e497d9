"""Equations as lists and strings, for a page that computes with them."""

from __future__ import annotations

import math
from typing import Any

from .grammar import Equation


def equation_as_json(equation: Equation) -> dict[str, Any]:
    """The equation as lists, dictionaries, strings and numbers. Infinity is null."""
    return {
        "parts": as_lists(equation.parts),
        "relations": list(equation.relations),
        "with": as_lists(equation.bindings),
        "for": as_lists(equation.conditions),
    }


def as_lists(tree: Any) -> Any:
    """The tree with lists in place of tuples."""
    if isinstance(tree, tuple):
        return [as_lists(part) for part in tree]
    return None if isinstance(tree, float) and math.isinf(tree) else tree

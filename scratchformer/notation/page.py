"""Derivations as JSON, for a page that computes with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .grammar import Equation
from .latex import lines
from .layout import DerivationText, Item


def as_json(derivation: DerivationText) -> dict[str, Any]:
    """The derivation as lists, dictionaries, strings and numbers. Infinity is null."""
    return {"name": derivation.name, "items": [item_as_json(item) for item in derivation.items]}


def item_as_json(item: Item) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": item.kind, "text": item.text, "line": item.line, "column": item.column}
    if item.equation is not None:
        data |= {"equation": equation_as_json(item.equation), "latex": lines(item.equation)}
    return data


def equation_as_json(equation: Equation) -> dict[str, Any]:
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


def array_as_json(array: np.ndarray) -> dict[str, Any]:
    """shape, and data in row-major order."""
    return {"shape": list(array.shape), "data": np.asarray(array, dtype=float).ravel().tolist()}

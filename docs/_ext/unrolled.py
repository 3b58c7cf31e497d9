"""A recursion in a derivation, written out step by step: X_kij for k = 0, 1, ... is X0_ij, X1_ij, ..."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from levels import truth

from scratchformer.compiler.equations import Definition, Definitions
from scratchformer.notation import Equation
from scratchformer.notation.grammar import Node, rebuilt
from scratchformer.notation.layout import normal, read


def unrolled(op: Callable, names: Iterable[str], letter: str, steps: int) -> Definitions:
    """The first form of each name in the docstring of `op`, for each value of the letter, from 0 to `steps`."""
    known: dict[str, Definition] = {}
    for item in read(inspect.getdoc(op) or "", names).equations:
        for value in range(steps + 1):
            equation = Equation(*rebuilt(tuple(item.equation), lambda node, k=value: with_value(node, letter, k)))
            left, node, *_ = equation.parts
            holds = all(truth(clause) is not False for clause in equation.conditions)
            if left[0] == "name" and holds and left[1] not in known:
                letters = tuple(index[1] for index in left[2])
                known[left[1]] = Definition(left[1], letters, node, (), item.line, normal(item.text), left)
    return Definitions(op.__name__, known, {}, {}, ())


def with_value(node: Node, letter: str, value: int) -> Node:
    """A node, whose parts are changed already, where the letter has a value. A number as an index joins the name."""
    kind, *parts = node
    if node == ("idx", letter):
        return "num", float(value), str(value)
    if kind == "-" and parts[0][0] == parts[1][0] == "num":
        number = parts[0][1] - parts[1][1]
        return "num", number, f"{number:g}"
    if kind == "name" and parts[1] and parts[1][0][0] == "num":
        first, *others = parts[1]
        return "name", f"{parts[0]}{first[1]:g}", tuple(others)
    return node

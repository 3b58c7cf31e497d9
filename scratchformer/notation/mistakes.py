"""Mistakes, generated from the equations of a derivation and planted one at a time: the check must find them.

A check that passes proves little unless it fails when it should. Each mistake changes one place on a right side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .check import read_and_run
from .grammar import Condition, Equation, Node, NotationError, letters_in
from .layout import Item
from .spelling import condition, spelled
from .walk import DerivationError, Walk, is_whole

LOOSER = {"≤": "<", "≥": ">", "<": "≤", ">": "≥"}


class PlantedMistake(NamedTuple):
    """A planted mistake. what: the kind of mistake. wrong: the equation with it. caught: whether the check failed."""

    line: int
    text: str
    what: str
    wrong: str
    caught: bool


def mistakes(equation: Equation) -> Iterator[tuple[str, Equation]]:
    """The equation with one mistake on a right side, in all ways, each with the name of the mistake."""
    if equation.relations == (":=",) and all(is_whole(part) for part in equation.parts):
        return  # a short name
    letters = list(dict.fromkeys(letters_in((equation.parts, equation.bindings))))
    for number, part in enumerate(equation.parts[1:], 1):
        for what, wrong in variants(part, letters):
            parts = (*equation.parts[:number], wrong, *equation.parts[number + 1 :])
            yield what, equation._replace(parts=parts)
    for number, (letter, node) in enumerate(equation.bindings):
        for what, wrong in variants(node, letters):
            bindings = (*equation.bindings[:number], (letter, wrong), *equation.bindings[number + 1 :])
            yield what, equation._replace(bindings=bindings)


def variants(node: Node, letters: list[str]) -> Iterator[tuple[str, Node]]:
    """The node with one mistake, at its top or anywhere below."""
    yield from at_top(node, letters)
    kind = node[0]
    if kind in ("name", "num", "idx", "delta"):
        return
    for place, part in enumerate(node[1:], 1):
        for what, wrong in within(part, letters):
            yield what, (*node[:place], wrong, *node[place + 1 :])


def within(part: Any, letters: list[str]) -> Iterator[tuple[str, Any]]:
    """A part of a node with one mistake in it: a node, a condition, or a tuple of them."""
    if not isinstance(part, tuple) or not part:
        return
    if is_condition(part):
        yield from of_condition(part, letters)
    elif isinstance(part[0], str) and part[0] not in letters:
        yield from variants(part, letters)
    elif not isinstance(part[0], str):
        for place, inner in enumerate(part):
            for what, wrong in within(inner, letters):
                yield what, (*part[:place], wrong, *part[place + 1 :])


def is_condition(part: tuple) -> bool:
    return len(part) == 3 and part[0] in ("=", "≠", "<", ">", "≤", "≥")


def of_condition(part: Condition, letters: list[str]) -> Iterator[tuple[str, Condition]]:
    relation, a, b = part
    if relation in LOOSER:
        yield "a condition off by one", (LOOSER[relation], a, b)
    else:
        yield "a condition off by one", (relation, a, ("+", b, ("num", 1.0, "1")))
    for what, wrong in variants(a, letters):
        yield what, (relation, wrong, b)
    for what, wrong in variants(b, letters):
        yield what, (relation, a, wrong)


def at_top(node: Node, letters: list[str]) -> Iterator[tuple[str, Node]]:
    kind = node[0]
    if kind in ("+", "-"):
        yield "a term dropped", node[1]
        yield "a term dropped", node[2] if kind == "+" else ("neg", node[2])
        yield "a sign turned", ("-" if kind == "+" else "+", node[1], node[2])
    elif kind == "neg":
        yield "a sign turned", node[1]
    elif kind in ("*", "/"):
        yield "a factor lost", node[1]
        if kind == "*":
            yield "a factor lost", node[2]
    elif kind == "^":
        yield "a power lost", node[1]
    elif kind == "call" and len(node[2]) == 1:
        yield "a function lost", ("group", node[2][0])
    elif kind == "over":
        yield from of_sum(node, letters)
    elif kind == "name" and node[2]:
        yield from of_indices(node, letters)


def of_sum(node: Node, letters: list[str]) -> Iterator[tuple[str, Node]]:
    _, function, over, body, conditions = node
    if len(over) == 1 and not conditions:
        for letter in letters:
            if letter.rstrip("'") != over[0].rstrip("'"):
                yield "a sum over another index", ("over", function, (letter,), body, conditions)
    if function == "sum":
        yield "a sum lost", body
        yield "a mean for a sum", ("over", "mean", over, ("group", body), conditions)
    if function == "mean":
        yield "a sum for a mean", ("over", "sum", over, body, conditions)
    for place in range(len(conditions)):
        yield "a condition lost", ("over", function, over, body, conditions[:place] + conditions[place + 1 :])


def of_indices(node: Node, letters: list[str]) -> Iterator[tuple[str, Node]]:
    kind, name, indices = node
    for place in range(len(indices) - 1):
        swapped = (*indices[:place], indices[place + 1], indices[place], *indices[place + 2 :])
        yield "indices exchanged", (kind, name, swapped)
    for place, index in enumerate(indices):
        for letter in letters:
            if index[0] == "idx" and letter != index[1]:
                yield "another index", (kind, name, (*indices[:place], ("idx", letter), *indices[place + 1 :]))


def plant_mistakes(
    op: Callable,
    op_backward: Callable | None,
    *args: Any,
    names: Mapping[str, Any] | None = None,
    docstring: str | None = None,
    seed: int = 0,
    every: int = 1,
    among: Collection[tuple[int, str, str]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[PlantedMistake]:
    """Plant mistakes in the derivation of an operation, one at a time, and check the rest of it with each.

    Arguments as for `check_derivation`, but options are a mapping. every: plant one in this many mistakes.
    among: plant only these, as (line, what, wrong). Raises DerivationError if the derivation is wrong as it stands.
    """
    ran, derivation = read_and_run(op, op_backward, *args, names=names, docstring=docstring, seed=seed, **options or {})
    walk, count = Walk(ran), 0
    walk.prepare(derivation)
    for place, item in enumerate(derivation.items):
        for what, wrong in mistakes(item.equation) if item.equation else ():
            text, skipped = spelled(wrong), count % every > 0
            count += 1
            if skipped if among is None else (item.line, what, text) not in among:
                continue
            planted = (item._replace(equation=wrong, text=text), *derivation.items[place + 1 :])
            yield PlantedMistake(item.line, item.text, what, text, fails(walk.copy(), derivation.name, planted))
        walk.items(derivation.name, [item])


def fails(walk: Walk, name: str, items: tuple[Item, ...]) -> bool:
    try:
        with np.errstate(all="ignore"):
            walk.items(name, items)
    except (DerivationError, NotationError):
        return True
    return False


def in_words(what: str, right: Equation, wrong: Equation) -> str:
    """A mistake of `mistakes` in words: "mean_c(g_c) is left out"."""
    before, after = difference((right.parts, right.bindings), (wrong.parts, wrong.bindings))
    if is_condition(before):
        return f"{condition(after)} is written instead of {condition(before)}"
    kind, *parts = before
    if what == "a term dropped":
        lost = parts[0] if after != parts[0] else parts[1]
        return f"{spelled(lost)} is left out"
    if what == "a sign turned":
        return f"the sign of {spelled(parts[1] if len(parts) > 1 else parts[0])} is flipped"
    if what == "a factor lost":
        lost = parts[0] if after != parts[0] else parts[1]
        return (
            f"the division by {spelled(lost)} is left out" if kind == "/" else f"the factor {spelled(lost)} is left out"
        )
    if what in ("a power lost", "a function lost"):
        return f"{spelled(after)} is written instead of {spelled(before)}"
    if what == "terms dropped":
        return f"all terms but {spelled(after)} are left out"
    if what == "a sum over another index":
        return f"the {parts[0]} is over {after[2][0]}, not over {parts[1][0]}"
    if what == "a sum lost":
        return f"the sum over {' and '.join(parts[1])} is left out"
    if what in ("a mean for a sum", "a sum for a mean"):
        return f"the {after[1]} over {' and '.join(parts[1])} is taken instead of the {parts[0]}"
    if what == "a condition lost":
        lost = next(clause for clause in parts[3] if clause not in after[4])
        return f"the condition {condition(lost)} is left out"
    return f"{spelled(after)} is written instead of {spelled(before)}"


def difference(right: Any, wrong: Any) -> tuple[Any, Any]:
    """The smallest parts in which two trees differ: nodes, or conditions."""
    while right[0] != "name" and len(right) == len(wrong):
        differing = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        if len(differing) != 1 or not isinstance(right[differing[0]], tuple):
            break
        inner = right[differing[0]], wrong[differing[0]]
        if right[0] == "over" and (differing[0] < 3 or (differing[0] == 4 and len(inner[0]) > len(inner[1]))):
            break  # another index, another function, or a condition that is lost
        right, wrong = inner
    return right, wrong

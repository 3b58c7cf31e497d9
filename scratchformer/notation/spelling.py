"""Syntax trees written out again as text, for messages."""

from __future__ import annotations

from collections.abc import Sequence

from .grammar import GREEK, POWERS, Condition, Equation, Node

GREEK_LETTERS = {name: letter for letter, name in GREEK.items()}
SIGNS = {"+": " + ", "-": " − ", "*": " ", "/": "/", "mod": " mod "}


def spelled(tree: Node | Equation) -> str:
    """The text of a syntax tree, in the notation that it was read from."""
    if isinstance(tree, Equation):
        text = "".join(
            f"{f' {relation} ' if relation else ''}{spelled(part)}"
            for relation, part in zip(("", *tree.relations), tree.parts, strict=True)
        )
        text += "".join(
            f"{', ' if i else ' with '}{letter} = {spelled(node)}" for i, (letter, node) in enumerate(tree.bindings)
        )
        return text + (f" for {conditions(tree.conditions)}" if tree.conditions else "")
    kind, *parts = tree
    if kind == "num":
        return str(parts[1])
    if kind == "idx":
        return parts[0]
    if kind == "name":
        return name(parts[0]) + (f"_{indices(parts[1])}" if parts[1] else "")
    if kind in SIGNS:
        return f"{spelled(parts[0])}{SIGNS[kind]}{spelled(parts[1])}"
    if kind == "^":
        exponent = spelled(parts[1])
        return spelled(parts[0]) + (exponent if exponent in POWERS else f"^{exponent}")
    if kind == "call":
        arguments = ", ".join(map(spelled, parts[1]))
        return f"√({arguments})" if parts[0] == "sqrt" else f"{parts[0]}({arguments})"
    if kind == "over":
        function, letters, body, clauses = parts
        below = ", ".join(dict.fromkeys([*letters, *(f"{condition(c)}" for c in clauses)]))
        below = below if len(letters) == 1 and not clauses else f"{{{below}}}"
        return f"Σ_{below} {spelled(body)}" if function == "sum" else f"{function}_{below}({spelled(body)})"
    if kind == "cases":
        rows = [f"{spelled(value)} where {conditions(clauses, ' and ')}" for value, clauses in parts[0]]
        return ", ".join([*rows, f"{spelled(parts[1])} elsewhere"])
    if kind == "partial":
        return f"∂{spelled(parts[0])}/∂{spelled(parts[1])}"
    if kind == "bracket":
        return f"[{conditions(parts[0])}]"
    if kind == "delta":
        return f"δ_{indices(parts)}"
    around = {"neg": "−{}", "group": "({})", "floor": "⌊{}⌋", "abs": "|{}|"}[kind]
    return around.format(spelled(parts[0]))


def name(ascii: str) -> str:
    """A name with its Greek letter, d before it or a hat on it."""
    if ascii.endswith("hat") and len(ascii) > 3:
        return name(ascii[:-3]) + "\u0302"
    if ascii in GREEK_LETTERS:
        return GREEK_LETTERS[ascii]
    gradient = ascii.startswith("d") and (ascii[1:] in GREEK_LETTERS or ascii.endswith("hat"))
    return "d" + name(ascii[1:]) if gradient else ascii


def indices(nodes: Sequence[Node]) -> str:
    if all(node[0] == "idx" for node in nodes):
        return "".join(node[1] for node in nodes)
    return "{" + ", ".join(map(spelled, nodes)) + "}"


def condition(clause: Condition) -> str:
    relation, a, b = clause
    return f"{spelled(a)} {relation} {spelled(b)}"


def conditions(clauses: Sequence[Condition], separator: str = ", ") -> str:
    return separator.join(map(condition, clauses))

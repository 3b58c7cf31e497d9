"""Joined derivations of operations that change arrays in place, so that one loop computes them all.

What one operation computes and another takes has one name in both. Then their equations, one after the other, are a
derivation like any other, which can be checked and compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..notation.grammar import Node, rebuilt
from ..notation.spelling import name as spelled_name
from .derivation import Derivation
from .equations import Definition, Definitions

__all__ = ["Part", "joined"]

Part = tuple[Any, Mapping[str, str]]  # an operation without backward, and new names for some of those in its equations


def joined(heading: str, parts: Sequence[Part]) -> str:
    """A docstring with the equations that the operations compute.

    Raises CompileError if two of them define the same name: then one of these needs a new name.
    """
    lines: list[str] = []
    of: dict[str, Definitions] = {}  # by name: the operation that defines it
    for op, names in parts:
        definitions = Derivation(op.reference, None).definitions
        for definition in in_order(definitions):
            name = names.get(definition.name, definition.name)
            if name in of:
                raise definitions.error(f"{of[name].operation} defines {name} too: rename one of them", definition)
            of[name] = definitions
            lines.append(equation(definition, definitions, names))
    return "\n".join([heading, "", "For each number i, as its parts say:", "", *(f"    {line}" for line in lines)])


def in_order(definitions: Definitions) -> list[Definition]:
    """Each definition after those that it needs."""
    ordered: dict[str, Definition] = {}
    for definition in definitions.known.values():
        needed = [each for each in definitions.needed_by(definition) if each.name not in ordered]
        ordered |= {each.name: each for each in reversed(needed)}
    return [*ordered.values()]


def equation(definition: Definition, definitions: Definitions, names: Mapping[str, str]) -> str:
    """The equation of a definition with new names."""

    def change(node: Node) -> Node:
        if node[0] != "name":
            return node
        name = definitions.resolve(node[1])
        return ("name", spelled_name(names.get(name, name)), node[2])

    left: Node = ("name", definition.name, tuple(("idx", letter) for letter in definition.letters))
    new = definition._replace(name=change(left)[1], node=rebuilt(definition.node, change))
    new = new._replace(bindings=tuple((letter, rebuilt(node, change)) for letter, node in definition.bindings))
    return new.spelled() if definition.letters else new.spelled().replace(" = ", " := ", 1)

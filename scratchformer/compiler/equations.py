"""The definitions in a docstring: for each name, the form in which it is computed.

A derivation may give a quantity in several equal forms. These rules say which of them is computed:

- The last form is computed. A chain `a = b = c` ends on its last form, and a later equation for the same name replaces
  an earlier one.
- A form with a partial derivative is never computed, nor is one that holds only under a condition ("for").
- `z := logits` makes z another name of the argument `logits`, and dz one of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from ..notation.grammar import Node, NotationError, canonical, walk
from ..notation.layout import normal, read
from ..notation.run import docstring_of, source_of, statements
from ..notation.spelling import spelled
from .errors import CompileError

__all__ = ["Definition", "Definitions", "definitions_of"]


class Definition(NamedTuple):
    """The equation name_letters = node, in the form that is computed. letters: the indices, without n for the rows."""

    name: str
    letters: tuple[str, ...]
    node: Node
    bindings: tuple[tuple[str, Node], ...]  # of its "with" clause
    line: int  # of the docstring
    text: str  # of the whole equation
    left: Node  # as it is written, with n and a short name

    def spelled(self) -> str:
        """The text of the equation in the form that is computed."""
        left = spelled(("name", self.name, tuple(("idx", letter) for letter in self.letters)))
        with_ = "".join(f", {letter} = {spelled(node)}" for letter, node in self.bindings)
        return f"{left} = {spelled(self.node)}{with_ and ' with ' + with_[2:]}"


class Definitions(NamedTuple):
    """What the docstring of an operation defines."""

    operation: str
    known: dict[str, Definition]
    partial: dict[str, Definition]  # of names that have no form without a partial derivative
    aliases: dict[str, str]
    sides: tuple[tuple[tuple[str, ...], Node], ...]  # each side of each equation, after its "with" letters
    lost: frozenset[str] = frozenset()  # the arguments that the backward does not have
    gradients: Mapping[str, tuple[str, ...]] = {}  # the axes of each gradient: those of its argument

    def resolve(self, name: str) -> str:
        """The name that an alias stands for; the gradient du of an alias u is the gradient of what u stands for."""
        if name[:1] == "d" and name[1:] in self.aliases:
            return f"d{self.aliases[name[1:]]}"
        return self.aliases.get(name, name)

    def undefined(self, name: str, user: Definition | None) -> CompileError:
        """The error for a name that the definition `user` needs, and that no equation says how to compute."""
        if name in self.partial:
            derivative = next(node for node in walk(self.partial[name].node) if node[0] == "partial")
            return self.error(
                f"every form of {name} has a derivative; end the equation on a form without ∂, or name the derivative: "
                f"w_i := {spelled(derivative)} = ...",
                self.partial[name],
            )
        if name in self.lost:
            return self.error(
                f"the backward uses {name}, which the cache does not keep: make it a field of the cache's NamedTuple, "
                "or a name that the backward unpacks the cache into",
                user,
            )
        for definition in self.needed_by(user):
            if products := [node for node in walk(definition.node) if is_product(node)]:
                return self.product(products[0], definition)
        return self.error(
            f"nothing defines {name}: it is no argument and no field of the cache, and no equation computes it", user
        )

    def needed_by(self, user: Definition | None) -> Iterator[Definition]:
        """A definition, and all that it needs."""
        names = [user.name] if user else []
        for name in names:  # `names` grows in the loop
            if name in self.known:
                yield self.known[name]
                used = [self.resolve(node[1]) for node in walk(self.known[name].node) if node[0] == "name"]
                names += dict.fromkeys(other for other in used if other not in names)

    def product(self, node: Node, definition: Definition | None) -> CompileError:
        return self.error(
            f"{spelled(node)} is a product of matrices, which stays a call of a library: make it a separate operation, "
            "and compile what comes before and after it",
            definition,
        )

    def error(self, message: str, definition: Definition | None = None) -> CompileError:
        """An error, with the line of the docstring that it is about."""
        place = f"line {definition.line}: {definition.text}\n    " if definition else ""
        return CompileError(f"{self.operation}: {place}{message}")


def is_product(node: Node) -> bool:
    """Whether a node is a sum over an axis that two arrays share, each of which has an axis that the other lacks."""
    if node[0] != "over" or node[1] != "sum":
        return False
    indices = [{index[1] for index in part[2]} for part in walk(node[3]) if part[0] == "name"]
    indices = [letters for letters in indices if letters & {*node[2]}]
    return any(a - b and b - a for a in indices for b in indices)


def definitions_of(
    op: Callable, op_backward: Callable | None, names: Iterable[str], docstring: str | None = None
) -> Definitions:
    """What a docstring defines, by default that of `op`. names: arguments, and fields of the cache.

    Raises CompileError, with the line, for a docstring that is missing or cannot be read.
    """
    called = getattr(source_of(op), "__name__", "operation")
    docstring, margin = docstring_of(op) if docstring is None else (docstring, None)
    code = frozenset(statement.text for f in (op, op_backward) if f for statement in statements(f))
    try:
        items = read(docstring, names, code, called, margin).equations
    except NotationError as error:
        raise CompileError(f"{called}: {error}") from error
    if not items:
        raise CompileError(f"{called}: its docstring has no equations (they are indented deeper than its text)")
    arguments = {canonical(name) for name in names}
    known: dict[str, Definition] = {}
    partial: dict[str, Definition] = {}
    aliases: dict[str, str] = {}
    trees = []
    for item in items:
        equation = item.equation
        assert equation is not None
        trees += [(tuple(letter for letter, _ in equation.bindings), part) for part in equation.parts]
        left = equation.parts[0]
        if left[0] != "name":
            continue
        name, indices = left[1], left[2]
        equal = takewhile(lambda pair: pair[1] in ("=", ":="), zip(equation.parts[1:], equation.relations, strict=True))
        forms = [part for part, _ in equal]
        right = [part for part in forms if not any(node[0] == "partial" for node in walk(part))]
        if not forms or equation.conditions or any(index[0] != "idx" for index in indices):
            continue
        node = (right or forms)[-1]
        if equation.relations[0] == ":=" and node[0] == "name" and not node[2] and canonical(node[1]) in arguments:
            aliases[name] = canonical(node[1])
            continue
        letters = tuple(index[1] for i, index in enumerate(indices) if i or index[1].rstrip("'") != "n")
        here = known if right else partial
        here[name] = Definition(name, letters, node, equation.bindings, item.line, normal(item.text), left)
    result = Definitions(called, {}, {}, aliases, tuple(trees))
    for into, definitions in ((result.known, known), (result.partial, partial)):
        for name, definition in definitions.items():
            into[result.resolve(name)] = definition._replace(name=result.resolve(name))
    return result

"""A derivation as source in JavaScript in which each name is an array, computed by loops of its own.

The plans of `plan` fuse a whole operation into passes over a row, which products of matrices do not fit. Here nothing
is fused: every equation becomes a nest of loops over the indices on its left, with a loop inside for each sum on its
right. So products can be compiled, and every name of the derivation has numbers that a page can show.

A sum that does not depend on the innermost loops is computed outside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..notation.grammar import Node
from ..notation.spelling import spelled
from .equations import Definition, Definitions
from .errors import CompileError
from .javascript_code import HELPERS, MATH
from .printer import ATOM, LEVELS, LOWEST, PRODUCT, SUM
from .trees import OPERATORS, ROW

__all__ = ["ArrayProgram", "array_program"]

RELATIONS = {"=": "===", "≠": "!==", "≤": "<=", "≥": ">="}
STARTS = {"sum": "0", "mean": "0", "prod": "1", "max": "-Infinity", "min": "Infinity"}
ADDS = {
    "sum": "{0} += {1};",
    "mean": "{0} += {1};",
    "prod": "{0} *= {1};",
    "max": "{0} = Math.max({0}, {1});",
    "min": "{0} = Math.min({0}, {1});",
}


class ArrayProgram(NamedTuple):
    """A function in JavaScript that takes one object: arrays and numbers as `$name`, sizes as capitals (N: all rows).

    used: the names that it reads or fills. computed: the axes of each array that it fills, in order. sizes: the axes
    that it asks for. same: pairs of letters of axes of the same size.
    """

    source: str
    used: tuple[str, ...]
    computed: Mapping[str, tuple[str, ...]]
    sizes: tuple[str, ...]
    same: frozenset[tuple[str, str]]


def array_program(
    definitions: Definitions,
    name: str,
    results: Sequence[str],
    given: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
) -> ArrayProgram:
    """The program that computes `results`.

    given: the axes of what is there before, () for a number. options: arguments that decide cases; None stands for 0
    where an array could be. Raises CompileError for what has no loops.
    """
    return ArrayPrinter(definitions, given, options).program(name, results)


class ArrayPrinter:
    """Prints the names that results need, each after those that it needs."""

    def __init__(
        self, definitions: Definitions, given: Mapping[str, tuple[str, ...]], options: Mapping[str, Any]
    ) -> None:
        self.definitions, self.given, self.options = definitions, given, options
        self.computed: dict[str, tuple[str, ...]] = {}
        self.body: list[str] = []
        self.open: list[str] = []
        self.sizes: dict[str, None] = {}
        self.used: dict[str, None] = {}
        self.same: set[tuple[str, str]] = set()
        self.count = 0
        self.definition: Definition | None = None

    def program(self, name: str, results: Sequence[str]) -> ArrayProgram:
        for result in results:
            self.axes(self.definitions.resolve(result))
        taken = ", ".join([*self.sizes, *(f"${array}" for array in self.used)])
        helpers = [text for helper, text in HELPERS.items() if any(f"{helper}(" in line for line in self.body)]
        lines = [f"function {name}({{ {taken} }}) {{", *helpers, *(f"  {line}" for line in self.body), "}"]
        source = "\n".join(lines) + "\n"
        return ArrayProgram(source, tuple(self.used), self.computed, tuple(self.sizes), frozenset(self.same))

    def fail(self, message: str) -> CompileError:
        return self.definitions.error(message, self.definition)

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of an array; one that is not there yet is computed first."""
        if name in self.given:
            return self.given[name]
        if name not in self.computed:
            definition = self.definitions.known.get(name)
            if definition is None:
                raise self.definitions.undefined(name, self.definition)
            if name in self.open:
                raise self.fail(f"{name} depends on itself")
            outer, self.definition = self.definition, definition
            self.open.append(name)
            letters = tuple(map(base, definition.letters))
            rows = (ROW,) if self.has_rows(definition.node, definition) else ()
            nest = Nest(self, (*rows, *definition.letters), dict(definition.bindings))
            value = nest.text(definition.node)
            self.used[name] = None
            place = nest.place((*rows, *letters), [("idx", letter) for letter in (*rows, *definition.letters)])
            self.body += [f"// {definition.spelled()}", *nest.lines(f"${name}[{place}] = {value};")]
            self.open.pop()
            self.definition = outer
            self.computed[name] = (*rows, *letters)
        return self.computed[name]

    def has_rows(self, node: Node, definition: Definition) -> bool:
        """Whether a value differs from row to row."""
        kind = node[0] if node and isinstance(node[0], str) else ""
        if kind == "over" and ROW in node[2]:
            return False
        if kind == "idx":
            bound = dict(definition.bindings).get(node[1])
            return node[1] == ROW or (bound is not None and self.has_rows(bound, definition))
        if kind == "name":
            name = self.definitions.resolve(node[1])
            if self.is_absent(name) or self.is_size(node):
                return False
            axes = self.axes(name)
            implicit = axes[:1] == (ROW,) and len(node[2]) < len(axes)
            return implicit or any(self.has_rows(index, definition) for index in node[2])
        if kind == "cases":
            node = self.decided(node)
            if node[0] != "cases":
                return self.has_rows(node, definition)
        return any(self.has_rows(part, definition) for part in node if isinstance(part, tuple))

    def is_absent(self, name: str) -> bool:
        return name not in self.given and name in self.options and self.options[name] is None

    def is_size(self, node: Node) -> bool:
        name = node[1]
        known = name in self.given or name in self.definitions.known or name in self.definitions.aliases
        return not node[2] and len(name) == 1 and name.isupper() and not known

    def decided(self, node: Node) -> Node:
        """The case that the options choose, or the node itself."""
        rest = list[tuple[Node, Any]]()
        for value, conditions in node[1]:
            known = [self.decide(condition) for condition in conditions]
            if all(answer is True for answer in known):
                return ("cases", tuple(rest), value) if rest else value
            if False not in known:
                rest.append((value, conditions))
        return ("cases", tuple(rest), node[2]) if rest else node[2]

    def decide(self, condition: tuple[str, Node, Node]) -> bool | None:
        """Whether a condition on an option holds; None for one on numbers."""
        relation, left, right = condition
        if left[0] != "name" or left[2] or left[1] not in self.options or right[0] != "name":
            return None
        return OPERATORS[relation](str(self.options[left[1]]), right[1])

    def size(self, letter: str) -> str:
        size = base(letter).upper()
        self.sizes[size] = None
        return size


class Nest:
    """The loops of one equation. A line is put as deep as the letters in it ask for."""

    def __init__(self, printer: ArrayPrinter, letters: Sequence[str], bindings: Mapping[str, Node]) -> None:
        self.printer, self.letters, self.bindings = printer, list(letters), bindings
        self.before: list[list[str]] = [[] for _ in range(len(letters) + 1)]  # lines inside of so many loops
        self.inner: list[str] = []  # the letters of the sums around what is printed
        self.inside: list[str] | None = None  # the lines of the innermost of them

    def lines(self, last: str) -> Iterator[str]:
        margin = ""
        for depth, lines in enumerate(self.before):
            yield from (margin + line for line in lines)
            if depth < len(self.letters):
                yield margin + self.loop(self.letters[depth])
                margin += "  "
        yield margin + last
        for depth in reversed(range(len(self.letters))):
            yield "  " * depth + "}"

    def loop(self, letter: str) -> str:
        at = variable(letter)
        return f"for (let {at} = 0; {at} < {self.printer.size(letter)}; {at}++) {{"

    def text(self, node: Node, outer: int = LOWEST) -> str:
        text, level = self.expression(node)
        return text if level >= outer else f"({text})"

    def expression(self, node: Node) -> tuple[str, int]:
        kind, *parts = node
        if kind == "num":
            value = float(parts[0])
            return ("Infinity" if value == float("inf") else repr(value).removesuffix(".0")), ATOM
        if kind == "group":
            return self.expression(parts[0])
        if kind == "idx":
            bound = self.bindings.get(parts[0]) if parts[0] not in self.inner else None
            if bound is None and parts[0] not in (*self.inner, *self.letters):
                raise self.printer.fail(f"the index {parts[0]} stands for nothing here")
            return (variable(parts[0]), ATOM) if bound is None else self.expression(bound)
        if kind == "name":
            return self.named(node), ATOM
        if kind == "over":
            return self.over(node), ATOM
        if kind == "bracket":
            return f"({self.all(parts[0])} ? 1 : 0)", ATOM
        if kind == "delta":
            return f"({self.all([('=', *parts)])} ? 1 : 0)", ATOM
        if kind == "cases":
            decided = self.printer.decided(node)
            if decided[0] != "cases":
                return self.expression(decided)
            chosen = self.text(decided[2])
            for value, conditions in reversed(decided[1]):
                chosen = f"({self.all(conditions)} ? {self.text(value)} : {chosen})"
            return chosen, ATOM
        if kind == "call" and parts[0] in HELPERS:
            return f"{parts[0]}({', '.join(map(self.text, parts[1]))})", ATOM
        if kind in ("abs", "floor") or (kind == "call" and parts[0] in MATH):
            name, arguments = (kind, parts) if kind != "call" else (parts[0], parts[1])
            return f"Math.{name}({', '.join(map(self.text, arguments))})", ATOM
        if kind == "^" and parts[1][:2] == ("num", 2):
            base_ = self.text(parts[0], ATOM)
            return f"{base_} * {base_}", PRODUCT
        if kind == "^":
            return f"Math.pow({self.text(parts[0])}, {self.text(parts[1])})", ATOM
        if kind == "neg":
            return f"(-{self.text(parts[0], ATOM)})", ATOM
        if kind == "mod":
            a, b = (self.text(part, ATOM) for part in parts)
            return f"({a} - {b} * Math.floor({a} / {b}))", ATOM
        if kind in ("+", "-", "*", "/"):
            level = LEVELS[kind]
            return f"{self.text(parts[0], level)} {kind} {self.text(parts[1], level + 1)}", level
        raise self.printer.fail(f"{spelled(node)} has no value that a loop can compute")

    def named(self, node: Node) -> str:
        printer = self.printer
        if printer.is_size(node):
            return printer.size(node[1].lower())
        name = printer.definitions.resolve(node[1])
        if printer.is_absent(name):
            return "0"
        axes = printer.axes(name)
        printer.used[name] = None
        if name in printer.given and not axes:
            return f"${name}"
        indices = list(node[2])
        if len(indices) + 1 == len(axes) and axes[0] == ROW:
            indices = [("idx", ROW), *indices]
        elif indices and indices[0] == ("idx", ROW) and axes[:1] != (ROW,) and len(indices) == len(axes) + 1:
            indices = indices[1:]  # the same in all rows
        if len(indices) != len(axes):
            raise printer.fail(f"{name} has {len(axes)} axes, and {len(indices)} indices here")
        return f"${name}[{self.place(axes, indices)}]"

    def place(self, axes: Sequence[str], indices: Sequence[Node]) -> str:
        """The position of an element in an array whose rows lie one after the other."""
        place = ""
        for axis, index in zip(axes, indices, strict=True):
            if index[0] == "idx" and index[1] not in self.bindings:
                self.printer.same.add((axis, base(index[1])))
            here = self.text(index, SUM)
            place = here if not place else f"({place}) * {self.printer.size(axis)} + {here}"
        return place or "0"

    def all(self, conditions: Sequence[tuple[str, Node, Node]]) -> str:
        texts = []
        for condition in conditions:
            decided = self.printer.decide(condition)
            relation, left, right = condition
            relation = RELATIONS.get(relation, relation)
            texts.append(
                str(decided).lower()
                if decided is not None
                else f"{self.text(left, SUM)} {relation} {self.text(right, SUM)}"
            )
        return " && ".join(texts)

    def over(self, node: Node) -> str:
        """The variable of a sum. Its lines are put inside the sum around it, or else as far outside as they can be."""
        _, function, letters, body, *rest = node
        if function not in STARTS:
            raise self.printer.fail(f"{function} has no loops here")
        self.printer.count += 1
        total, count = f"{function}{self.printer.count}", f"count{self.printer.count}"
        target, inside = self.before[self.depth(node)] if self.inside is None else self.inside, list[str]()
        outer, self.inside, self.inner = (self.inside, self.inner), inside, [*self.inner, *letters]
        if rest and rest[0]:
            inside.append(f"if (!({self.all(rest[0])})) continue;")
        value = self.text(body)
        inside.append(ADDS[function].format(total, value))
        if function == "mean":
            inside.append(f"{count}++;")
        self.inside, self.inner = outer
        target.append(f"let {total} = {STARTS[function]};")
        if function == "mean":
            target.append(f"let {count} = 0;")
        target += ["  " * depth + self.loop(letter) for depth, letter in enumerate(letters)]
        target += ["  " * len(letters) + line for line in inside]
        target += ["  " * depth + "}" for depth in reversed(range(len(letters)))]
        return f"({total} / {count})" if function == "mean" else total

    def depth(self, node: Node) -> int:
        """How many of the loops a node depends on, counted from outside."""
        found = self.letters_in(node, frozenset())
        return max((i + 1 for i, letter in enumerate(self.letters) if letter in found), default=0)

    def letters_in(self, node: Any, bound: frozenset[str]) -> set[str]:
        if not isinstance(node, tuple):
            return set()
        kind = node[0] if node else ""
        if kind == "idx":
            if node[1] in bound:
                return set()
            if node[1] in self.bindings:
                return self.letters_in(self.bindings[node[1]], bound)
            return {node[1]}
        if kind == "over":
            bound = bound | {*node[2]}
        found = set().union(*(self.letters_in(part, bound) for part in node), set())
        if kind == "name" and not self.printer.is_size(node):
            name = self.printer.definitions.resolve(node[1])
            axes = () if self.printer.is_absent(name) else self.printer.axes(name)
            if axes[:1] == (ROW,) and len(node[2]) < len(axes) and ROW not in bound:
                found.add(ROW)
        return found


def base(letter: str) -> str:
    return letter.rstrip("'")


def variable(letter: str) -> str:
    """s' is s1."""
    return base(letter) + (str(len(letter) - len(base(letter))) if letter.endswith("'") else "")

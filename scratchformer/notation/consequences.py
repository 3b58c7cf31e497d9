"""The consequences of a mistake in an equation: the values of all names that the equations below it compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from .check import read_and_run
from .grammar import Equation, Node, NotationError
from .mistakes import in_words, mistakes
from .spelling import spelled
from .values import Scope, bind, evaluate
from .walk import Walk, arranged, holds


class Consequences:
    """An evaluated derivation, in which one equation at a time can be replaced by a wrong one."""

    def __init__(self, walk: Walk, equations: Sequence[Equation]) -> None:
        self.walk, self.equations = walk, equations

    @property
    def values(self) -> dict[str, np.ndarray]:
        """All arrays by name, without a mistake."""
        return self.walk.scope.values

    def gradient(self, argument: str) -> str | None:
        """The name of an argument's gradient, made from its name or a short name of it; None if there is none."""
        names = [argument, *(short for short, long in self.walk.scope.aliases.items() if long == argument)]
        return next((f"d{name}" for name in names if f"d{name}" in self.values), None)

    def of(self, place: int, wrong: Equation, part: int = -1) -> dict[str, np.ndarray]:
        """The names whose values change, with their new values, if equation number `place` is replaced by `wrong`.

        part: the number of the part of `wrong` that gives the value of its left side. Of the equations below it, those
        that use a changed name are evaluated again, by the last of their parts that uses one. Raises NotationError or
        ValueError if the wrong equation cannot be evaluated.
        """
        right = self.walk.scope
        scope = Scope(dict(right.values), right.aliases)
        scope.sizes, scope.functions, scope.differentiate = dict(right.sizes), right.functions, self.walk.partial
        changed: dict[str, np.ndarray] = {}
        partials: dict[Node, Node] = {}
        for number, equation in enumerate(self.equations[place:]):
            equation = equation if number else wrong
            if number and (part := last_part(equation, changed, partials, scope)) < 1:
                continue
            left, node = equation.parts[0], replaced(equation.parts[part], partials)
            if left[0] == "partial":
                partials[left] = ("group", node)
            elif left[0] == "name" and self.computes(left):
                bind(equation, scope)
                right.bound = scope.bound  # partial derivatives are evaluated with the right values
                name = scope.resolve(left[1])
                old = scope.values[name]
                value = arranged(left, evaluate(node, scope), scope)
                if equation.conditions:
                    value = np.where(holds(equation, left, scope), value, old)
                scope.values[name] = changed[name] = value.reshape(old.shape)
        return changed

    def computes(self, left: Node) -> bool:
        """Whether this left side gives the values of an array, and is not just compared with some of them."""
        name = self.walk.scope.resolve(left[1])
        return name not in self.walk.run.arguments and all(index[0] == "idx" for index in left[2])

    def reach(self, place: int) -> set[str]:
        """The names that depend on the left side of an equation, by the equations below it."""
        changed: dict[str, Any] = {}
        partials: dict[Node, Node] = {}
        for number, equation in enumerate(self.equations[place:]):
            left = equation.parts[0]
            if number == 0 or last_part(equation, changed, partials, self.walk.scope):
                if left[0] == "partial":
                    partials[left] = left
                elif left[0] == "name" and self.computes(left):
                    changed[self.walk.scope.resolve(left[1])] = None
        return set(changed)

    def planted(self, names: Collection[str]) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
        """Every mistake that can change the values of these names, from the last equation to the first, and what
        follows from it.

        Each is a name, such as "a term dropped: dx_i = dy_i", a description in words, and the changed values. Mistakes
        that cannot be evaluated are left out. For each equation, the mistakes of `mistakes` come before those of
        `further`.
        """
        for place in reversed(range(len(self.equations))):
            equation = self.equations[place]
            if not self.reach(place).issuperset(names):
                continue
            nearest = sorted(mistakes(equation), key=lambda mistake: -changed_part(equation, mistake[1]))
            for what, wrong in (*nearest, *self.further(equation)):
                part = changed_part(equation, wrong)
                try:
                    with np.errstate(all="ignore"):
                        changed = self.of(place, wrong, part)
                except (NotationError, ValueError):
                    continue
                short = neat(wrong._replace(parts=(wrong.parts[0], wrong.parts[part]), relations=("=",)))
                words = in_words(what, equation, wrong)
                yield f"{what}: {spelled(short)}", f"{words}: {spelled(short)}", changed

    def further(self, equation: Equation) -> Iterator[tuple[str, Equation]]:
        """Larger changes of the last part, which `mistakes` does not plant: two terms dropped, a different array of the
        same shape, a sum along a different axis.
        """
        last = equation.parts[-1]
        free = [index[1] for index in (equation.parts[0][2] if equation.parts[0][0] == "name" else ())]
        for what, wrong in changes(last, lambda node: self.larger(node, free)):
            yield what, equation._replace(parts=(*equation.parts[:-1], wrong))

    def larger(self, node: Node, free: list[str]) -> Iterator[tuple[str, Node]]:
        if node[0] in ("+", "-"):
            terms = list(signed(node))
            if len(terms) > 2:
                for kept in terms:
                    yield "terms dropped", kept
        elif node[0] == "name" and node[2]:
            values, name = self.values, self.walk.scope.resolve(node[1])
            for other, value in values.items():
                if name in values and other != name and value.shape == values[name].shape and value.dtype.kind == "f":
                    yield "another array", ("name", other, node[2])
        elif node[0] == "over" and len(node[2]) == 1 and not node[4]:
            (letter,) = node[2]
            plain = letter.rstrip("'")
            for other in free:
                if plain in free and other != plain:
                    swapped = renamed(node[3], {letter: plain, other: f"{other}'"})
                    yield "a sum along another axis", ("over", node[1], (f"{other}'",), swapped, ())


def consequences(*pair_and_args: Any, **options: Any) -> Consequences:
    """The derivation of a pair, evaluated on a real run. Arguments as for `check_derivation`.

    The gradients are what the equations give, whatever the backward returns. Raises as `check_derivation` does, if an
    equation is not true.
    """
    ran, derivation = read_and_run(*pair_and_args, may_differ=True, **options)
    forward = {name: value for name, value in ran.values.items() if name not in ran.gradients}
    walk = Walk(ran._replace(values=forward, gradients=()))
    equations = derivation._replace(items=tuple(derivation.equations))
    walk.prepare(equations)
    walk.items(ran.name, equations.items)
    return Consequences(walk, [item.equation for item in equations.items if item.equation])


def changes(node: Node, at_top: Callable[[Node], Iterator[tuple[str, Node]]]) -> Iterator[tuple[str, Node]]:
    """The tree with one of its nodes changed in the ways of `at_top`."""
    yield from at_top(node)
    if node[0] in ("name", "num", "idx", "delta", "bracket", "partial", "cases"):
        return
    for place, part in enumerate(node[1:], 1):
        if isinstance(part, tuple) and part and isinstance(part[0], str) and (place == 3 or node[0] != "over"):
            for what, wrong in changes(part, at_top):
                yield what, (*node[:place], wrong, *node[place + 1 :])


def signed(node: Node) -> Iterator[Node]:
    """The terms of a sum, each with its sign."""
    if node[0] not in ("+", "-"):
        yield node
        return
    yield from signed(node[1])
    yield node[2] if node[0] == "+" else ("neg", node[2])


def renamed(tree: Any, letters: dict[str, str]) -> Any:
    """The tree with other index letters."""
    if not isinstance(tree, tuple):
        return tree
    if tree[:1] == ("idx",):
        return "idx", letters.get(tree[1], tree[1])
    return tuple(renamed(part, letters) for part in tree)


def neat(tree: Any) -> Any:
    """The tree without parentheses around a name or a number."""
    if not isinstance(tree, tuple):
        return tree
    if tree[:1] == ("group",) and tree[1][0] in ("name", "num"):
        return tree[1]
    parts = [neat(part) for part in tree]
    return type(tree)(*parts) if isinstance(tree, Equation) else tuple(parts)


def changed_part(right: Equation, wrong: Equation) -> int:
    """The number of the part with the mistake; the last one if the mistake is in a "with" clause."""
    changed = [i for i, (a, b) in enumerate(zip(right.parts, wrong.parts, strict=True)) if a != b]
    return changed[0] if changed else len(wrong.parts) - 1


def last_part(equation: Equation, changed: dict[str, Any], partials: dict[Node, Node], scope: Scope) -> int:
    """The number of the last part that uses a changed name, or 0."""
    if uses((equation.bindings, equation.conditions), changed, partials, scope):
        return len(equation.parts) - 1
    return next(
        (i for i in range(len(equation.parts) - 1, 0, -1) if uses(equation.parts[i], changed, partials, scope)), 0
    )


def uses(tree: Any, changed: dict[str, Any], partials: dict[Node, Node], scope: Scope) -> bool:
    if not isinstance(tree, tuple):
        return False
    if tree[:1] == ("partial",):
        return tree in partials
    return (tree[:1] == ("name",) and scope.resolve(tree[1]) in changed) or any(
        uses(part, changed, partials, scope) for part in tree
    )


def replaced(tree: Any, partials: dict[Node, Node]) -> Any:
    """The tree with other expressions in place of partial derivatives."""
    if not isinstance(tree, tuple) or not partials:
        return tree
    return partials.get(tree) or tuple(replaced(part, partials) for part in tree)

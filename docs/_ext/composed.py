"""Derivations of layers that are made of other layers, with the equations of the parts in place of their calls.

The derivation of a block says what the block does with its parts: f = feedforward(u), and in the backward
du = feedforward_backward(df, u). Each part has a derivation of its own, with the equations behind these calls. They are
put together here, so that a page can compute all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from levels import is_size
from reports import executed

from scratchformer import nn
from scratchformer.catalogue import DerivationCase, Sizes
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation import Equation
from scratchformer.notation.grammar import Node, canonical, rebuilt, walk
from scratchformer.notation.spelling import spelled
from scratchformer.pages.live import is_second_name, is_short_name

OPERATION = {nn.LayerNorm: "layernorm", nn.RMSNorm: "rmsnorm", nn.Linear: "linear"}  # without a derivation of their own


class Composed(NamedTuple):
    """A case whose derivation calls no function. calls: for each equation, the call in whose place it stands, if any.

    A call reads x, not a second name of it such as n = x; that equation stands in the place of the call too.
    """

    case: DerivationCase
    calls: list[Equation | None]


def composed(case: DerivationCase) -> Composed:
    """The same case with the equations of the parts in its derivation."""
    options = {name: value for name, value in case.options.items() if name != "functions"}
    if options == case.options:
        return Composed(case, [])
    equations = list(Composition(case).equations())
    lines = [f"    {spelled(equation)}" for _, equation in equations]
    docstring = "\n".join(["The parts put together.", "", "In this order:", "", *lines])
    return Composed(case._replace(docstring=docstring, options=options), [call for call, _ in equations])


def top_level(case: DerivationCase) -> list[Equation]:
    """The equations of a layer's own derivation, in which parts are calls."""
    return Composition(case).items


class Composition:
    """The derivation of a case, in which calls of parts become equations."""

    def __init__(self, case: DerivationCase) -> None:
        ran, derivation = executed(case)
        self.items = [item.equation for item in derivation.equations if item.equation]
        self.functions: dict[str, Callable] = case.options["functions"]
        self.taken = {*ran.values, *(node[1] for each in self.items for node in walk(tuple(each)) if node[0] == "name")}
        layer = case.op.__self__  # type: ignore[attr-defined]
        self.names = {id(p.data): name for name, p in layer.named_parameters().items()}
        layer.zero_grad()  # the run has added to them
        self.known = frozenset(ran.values)
        self.parts: dict[str, Part] = {}

    def equations(self) -> Iterator[tuple[Equation | None, Equation]]:
        second: dict[Node, Node] = {}  # names of what has a name already
        waiting: list[Equation] = []
        for equation in self.items:
            left, right, *_ = equation.parts
            if is_second_name(equation) and not is_short_name(equation):
                second[left] = right
                waiting.append(equation)
            elif right[0] == "call" and right[1] in self.functions:
                call = equation._replace(parts=(left, rebuilt(right, lambda node: second.get(node, node))))
                yield from ((call, each) for each in (*waiting, *self.called(right, left[1])))
                waiting = []
            else:
                yield None, equation

    def called(self, call: Node, result: str) -> Iterator[Equation]:
        """The equations that compute what a call returns, as far as none before them does."""
        _, function, arguments = call
        given = [argument[1] for argument in arguments]
        name, _, backward = function.partition("_backward")
        if name not in self.parts:
            layer = self.functions[f"{name}_backward"].args[1].__self__  # type: ignore[attr-defined]
            if isinstance(layer, nn.Dropout):  # which passes on what it gets, since no part of a page is random
                yield Equation((("name", result, ()), ("name", given[0], ())), ("=",), (), ())
                return
            self.parts[name] = Part(self, name, layer)
        part = self.parts[name]
        if function == name:
            part.rename(dict(zip(part.inputs, given, strict=True)) | {part.output: result})
            wanted = [part.output]
        else:
            gradient = f"d{backward[1:] or part.inputs[0]}"
            part.rename({f"d{part.output}": given[0], gradient: result})
            wanted = [gradient, *(f"d{parameter}" for parameter in part.parameters)]
        yield from part.needed(wanted)

    def fresh(self, name: str) -> str:
        """A name that nothing has: the name itself, or with a number after it."""
        numbered = (f"{name}{i or ''}" for i in range(len(self.taken) + 1))
        free = next(each for each in numbered if not self.taken & {each, f"d{each}", each.removeprefix("d")})
        self.taken |= {free, f"d{free}"}
        return free


class Part:
    """The derivation of a part, in the names of the whole: each name once, in its first form without a derivative."""

    def __init__(self, whole: Composition, name: str, layer: nn.Layer) -> None:
        case = CASES[OPERATION.get(type(layer), type(layer).__name__)](Sizes())
        ran, derivation = executed(case)
        self.whole, self.name, self.made = whole, name, set[str]()
        self.parameters = {name: whole.names[id(p.data)] for name, p in layer.named_parameters().items()}
        inputs = [p.name for p in inspect.signature(layer.forward).parameters.values() if p.default is p.empty]
        self.inputs, (self.output,) = [canonical(name) for name in inputs], ran.outputs
        self.equations = [each for item in derivation.equations if item.equation and (each := closed(item.equation))]
        self.names = dict(self.parameters) | {f"d{name}": f"d{full}" for name, full in self.parameters.items()}

    def rename(self, names: dict[str, str]) -> None:
        self.names |= names

    def needed(self, wanted: list[str]) -> list[Equation]:
        """The equations that `wanted` needs, in their order, without those that an earlier call has given."""
        reached, kept = set(wanted), []
        for equation in reversed(self.equations):
            if equation.parts[0][1] in reached - self.made:
                reached |= {node[1] for node in walk(tuple(equation)) if node[0] == "name"}
                kept.insert(0, equation)
        self.made |= {equation.parts[0][1] for equation in kept}
        return [Equation(*rebuilt(tuple(equation), self.renamed)) for equation in kept]

    def renamed(self, node: Node) -> Node:
        if node[0] != "name" or is_size(node):
            return node
        _, name, indices = node
        if (mine := f"{self.name}.{name}") in self.whole.known:  # such as a mask: another part has its own
            return "name", mine, indices
        computed = {each.parts[0][1] for each in self.equations}
        of = name[1:] if name[:1] == "d" and name[1:] in computed else name
        if name not in self.names and (of in self.names or name in computed or of not in self.whole.known):
            self.names[of] = self.names.get(of) or self.whole.fresh(of)
            self.names[name] = self.names[of] if name == of else f"d{self.names[of]}"
        return "name", self.names.get(name, name), indices


def closed(equation: Equation) -> Equation | None:
    """The equation with its first form without a derivative; None if it does not define a name in this way."""
    left, *_ = equation.parts
    forms = [part for part in equation.parts[1:] if not any(node[0] == "partial" for node in walk(part))]
    if left[0] != "name" or not forms or not set(equation.relations) <= {"=", ":="}:
        return None
    return Equation((left, forms[0]), ("=",), equation.bindings, equation.conditions)

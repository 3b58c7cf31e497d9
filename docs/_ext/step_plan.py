"""One training step of a model as a plan that a page runs: the calls of its trace, each with code from its derivation.

`plan_of(model, batch)` traces the step and returns JSON:

- `functions`: the source of each operation's forward and backward, and the equation of every array that it computes
- `buffers`: every array of the step, with its shape, the axes of the shape by letter, and the layer that it belongs to
- `calls`: in order, which function runs on which buffers
- `gradients`: for a buffer, the buffer that holds its gradient

A call's input is a buffer, or some of the numbers of one: where the model's own code reshapes, transposes or slices an
array between two operations, the plan says which number of the input comes from which number of the buffer. This is
read from the addresses of the numbers in memory or, where the model has made a copy, from the numbers themselves.

Nothing here knows a model. An operation is a call of the plan if its derivation compiles, otherwise the operations that
it calls are; so is a layer that calls no operation and has a derivation.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from reports import items
from tracing import TracedCall, codes_in, functions_in, trace

from scratchformer import ops
from scratchformer.catalogue import Mistake, entries_of, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.compiler import CompileError
from scratchformer.compiler.derivation import Derivation, fields_of
from scratchformer.compiler.equations import Definition, Definitions, definitions_of
from scratchformer.compiler.javascript_arrays import ArrayProgram, array_program, base
from scratchformer.compiler.javascript_code import javascript_source
from scratchformer.dispatch import reference_only
from scratchformer.nn import Layer, Param
from scratchformer.notation import Equation, NotationError, parse
from scratchformer.notation.grammar import Node, canonical, rebuilt, walk
from scratchformer.notation.layout import normal
from scratchformer.notation.page import equation_as_json
from scratchformer.optim.adam import adam_step
from scratchformer.pages.mathml import pieces
from scratchformer.pages.passages import equation_id

NAMES = {entry.name: entry.names for entry in entries_of("operations")}  # what derivations use besides their arguments


ZERO = -1  # the position of a number that is 0 wherever the others come from


class Source(NamedTuple):
    """A derivation: the definitions in it, the names that its cache keeps, and all that it takes as given."""

    name: str
    definitions: Definitions
    kept: tuple[str, ...]
    names: tuple[str, ...]
    is_operation: bool


@cache
def operation_source(name: str) -> Source:
    op, op_backward = getattr(ops, name).reference, getattr(ops, f"{name}_backward").reference
    arguments = tuple(map(canonical, inspect.signature(op).parameters))
    _, parameter, *_ = inspect.signature(op_backward).parameters
    kept = tuple(map(canonical, fields_of(op_backward, parameter)))
    names = tuple(dict.fromkeys([*arguments, *kept]))
    return Source(name, definitions_of(op, op_backward, names), kept, names, True)


@cache
def layer_source(kind: type[Layer], parameters: tuple[str, ...]) -> Source:
    arguments = tuple(map(canonical, [*inspect.signature(kind.forward).parameters][1:]))
    docstring, names = inspect.getdoc(kind) or "", (*arguments, *map(canonical, parameters))
    definitions = definitions_of(kind.forward, kind.backward, names, docstring)
    return Source(kind.__name__, definitions, (), names, False)


class Place(NamedTuple):
    """Where the numbers of an array are: in a buffer, at these positions (or ZERO), or all of them in order (None)."""

    buffer: int
    positions: tuple[int, ...] | None


class Environment(NamedTuple):
    """What a forward call has, for its backward. axes: of every array by letters, and of the output's gradient."""

    number: int  # of the call
    source: Source
    arguments: dict[str, Any]
    axes: dict[str, tuple[str, ...]]
    options: dict[str, Any]
    sizes: dict[str, int]
    lead: tuple[int, ...]  # the sizes of the axes that n stands for
    buffers: dict[str, int]


class Function(NamedTuple):
    """A program, and what it was made from."""

    source: Source
    program: ArrayProgram
    results: tuple[str, ...]
    given: dict[str, tuple[str, ...]]
    options: dict[str, Any]
    suffix: str


class StepPlan:
    """The plan while it is made."""

    def __init__(self, model: Layer) -> None:
        self.model = model
        self.buffers: list[dict[str, Any]] = []
        self.values: list[np.ndarray] = []
        self.at: dict[int, tuple[int, int]] = {}  # the address of a number: its buffer, and its position there
        self.functions: dict[tuple, int] = {}
        self.made: list[Function] = []
        self.calls: list[dict[str, Any]] = []
        self.environments: dict[int, Environment] = {}  # by the ids of a forward call and of its backward
        self.gradients: dict[int, Place] = {}
        self.kinds: set[str] = set()  # the classes of the layers that were called
        self.labelled: set[str] = set()  # the layers whose call has their name
        for name, p in model.named_parameters().items():
            here = self.buffer(name, p.data, axes=[""] * p.data.ndim, layer=name.rpartition(".")[0], role="parameter")
            gradient = self.buffer(f"d{name}", p.grad, axes=[""] * p.data.ndim, layer="", role="gradient")
            self.gradients[here] = Place(gradient, None)

    def buffer(self, name: str, x: np.ndarray, **options: Any) -> int:
        """A new buffer that holds the numbers of an array of the trace."""
        number = len(self.buffers)
        self.buffers.append({"name": name, "shape": list(np.shape(x)), **options})
        self.values.append(np.asarray(x))
        if isinstance(x, np.ndarray):
            self.at |= {address: (number, i) for i, address in enumerate(addresses(x))}
        return number

    def place(self, x: np.ndarray) -> Place | None:
        """Where the numbers of an array are; None for an array that no call has computed."""
        here = [self.at.get(address) for address in addresses(x)]
        if all(each is not None and each[0] == here[0][0] for each in here):
            return self.positions(here[0][0], [i for _, i in here])
        for number in reversed(range(len(self.values))):  # a copy: the same numbers in another order
            value = self.values[number]
            if value.dtype.kind != x.dtype.kind or x.size < 2:
                continue
            for order in permutations(range(value.ndim)) if value.size == x.size else ():
                if np.array_equal(value.transpose(order).ravel(), x.ravel()):
                    moved = np.arange(value.size).reshape(value.shape).transpose(order)
                    return self.positions(number, moved.ravel().tolist())
            where = {0.0: ZERO} | {number: i for i, number in enumerate(value.ravel().tolist())}
            copied = [where.get(number) for number in x.ravel().tolist()]
            if len(where) >= value.size > 1 and x.any() and None not in copied:
                return self.positions(number, copied)
        return None

    def positions(self, buffer: int, positions: list[int]) -> Place:
        whole = positions == [*range(self.values[buffer].size)]
        return Place(buffer, None if whole else tuple(positions))

    # The calls

    def record(self, call: TracedCall, phase: str, above: tuple[TracedCall, ...] = ()) -> None:
        """Add a call of the trace: as one call of the plan, or else the calls that it makes."""
        self.kinds |= {kind.__name__ for kind in type(call.layer).__mro__}
        source = source_of(call)
        if call.phase == "backward" and id(call) in self.environments:
            return self.backward(call)
        if source is not None and call.phase == "forward":
            try:
                return self.forward(call, source, phase, above)
            except CompileError as error:
                if not call.calls:
                    raise TypeError(f"{call.name}: expected a derivation that compiles: {error}") from error
        elif not call.calls and not is_identity(call):
            raise TypeError(f"{call.name}: expected a derivation of {call.kind}, whose own code computes arrays")
        for below in call.calls:
            self.record(below, phase, (*above, call))

    def forward(self, call: TracedCall, source: Source, phase: str, above: tuple[TracedCall, ...]) -> None:
        (arguments, more), output = arguments_of(call, source), output_of(call)
        arrays = {name: x for name, x in arguments.items() if is_array(x)}
        axes = {name: letters_of(source.definitions, name, x.ndim) for name, x in arrays.items()}
        numbers = {name: float(x) for name, x in arguments.items() if is_number(x)}
        options = {name: x for name, x in arguments.items() if x is None or isinstance(x, str | bool)}
        results = [output, *(name for name in source.kept if name in source.definitions.known)]
        given = {**axes, **dict.fromkeys(numbers, ())}
        function, program = self.function(source, "", results, given, options)
        there = {**given, **program.computed}
        there[f"d{output}"] = there[output]
        if call.backward is not None:  # both must compile
            self.function(source, "_backward", gradients_of(source, arguments), there, options)
        inputs = {name: self.input(name, x, call, name in more) for name, x in arrays.items()}
        rows = [x.shape[: x.ndim - len(axes[name]) + 1] for name, x in arrays.items() if axes[name][:1] == ("n",)]
        lead = rows[0] if rows else ()
        sizes = {"N": math.prod(lead)}
        for name, x in {output: np.asarray(call.output), **arrays}.items():
            for letter, size in zip(reversed(there[name]), reversed(x.shape), strict=False):
                if letter != "n" and sizes.setdefault(letter.upper(), size) != size:
                    raise CompileError(f"{call.name}: {letter} has the sizes {sizes[letter.upper()]} and {size}")
        sizes = spread(sizes, program)
        layer = next((each for each in reversed((*above, call)) if each.layer is not None), call)
        number, made = len(self.calls), {}
        for name, of in program.computed.items():
            role = "output" if name == output else "kept" * (name in results)
            made[name] = self.result(
                name, call.output if name == output else None, of, sizes, lead, layer=layer.name, call=number, role=role
            )
        buffers = {name: place.buffer for name, place in inputs.items()} | made
        environment = Environment(number, source, arguments, there, options, sizes, lead, buffers)
        self.environments[id(call)] = self.environments[id(call.backward)] = environment
        self.calls.append(
            {
                "function": function,
                "phase": phase,
                "operation": source.name,
                "label": self.label(call, layer),
                "inputs": {name: as_json(place) for name, place in inputs.items()},
                "shapes": {name: list(x.shape) for name, x in arrays.items()},
                "numbers": numbers,
                "sizes": sizes,
                "computed": made,
                "output": made[output],
            }
        )

    def label(self, call: TracedCall, layer: TracedCall) -> str:
        """The last name of a layer that makes one call, such as "query"; else the name of the operation."""
        if layer.name == layer.kind or layer.name in self.labelled or len(layer.calls) > 1:
            return call.kind
        self.labelled.add(layer.name)
        return layer.name.rpartition(".")[2]

    def backward(self, call: TracedCall) -> None:
        before = self.environments[id(call)]
        source, arguments, buffers = before.source, before.arguments, before.buffers
        (given, dy), *_ = call.arguments.items()
        results, gradient = gradients_of(source, arguments), canonical(given)
        function, program = self.function(source, "_backward", results, before.axes, before.options)
        sizes = spread(before.sizes, program, {name: before.axes[name[1:]] for name in results})
        inputs = {gradient: self.input(gradient, dy, call)} if is_array(dy) else {}
        for place in inputs.values():
            self.gradients.setdefault(buffers[gradient[1:]], place)
        returned = call.returned if isinstance(call.returned, tuple) else (call.returned,)
        actual = dict(zip(results, returned, strict=False))
        made, adds = {}, {}
        for name, of in program.computed.items():
            parameter = self.parameter(arguments.get(name[1:])) if name in results else None
            x = None if parameter else actual.get(name)
            made[name] = self.result(name, x, of, sizes, before.lead, layer="", call=len(self.calls), role="gradient")
            if parameter is not None:
                adds[name] = as_json(Place(self.gradients[parameter.buffer].buffer, parameter.positions))
            if name not in results and name[1:] in buffers:
                self.gradients.setdefault(buffers[name[1:]], Place(made[name], None))
        self.calls.append(
            {
                "function": function,
                "phase": "backward",
                "operation": source.name,
                "forward": before.number,
                "inputs": {name: as_json(place) for name, place in inputs.items()},
                "shapes": {name: list(dy.shape) for name in inputs},
                "numbers": {} if inputs else {gradient: float(dy)},
                "sizes": sizes,
                "computed": made,
                "adds": adds,
            }
        )

    def result(
        self, name: str, x: Any, axes: tuple[str, ...], sizes: Mapping[str, int], lead: tuple[int, ...], **options: Any
    ) -> int:
        """The buffer of an array that a call computes. x: the array of the trace, None if it has none."""
        rows = axes[:1] == ("n",)
        shape = [*(lead if rows else ()), *(sizes[axis.upper()] for axis in axes[rows:])]
        if x is not None and np.size(x) != math.prod(shape):
            raise TypeError(f"{options['layer']}: expected {name} of the shape {shape}, got {np.shape(x)}")
        letters = [*([""] * len(lead) if rows else []), *axes[rows:]]
        number = self.buffer(name, np.empty(0) if x is None else x, axes=letters, **options)
        self.buffers[number]["shape"] = shape
        return number

    def pass_on(self) -> None:
        """Find the gradients of results that no backward was given as such: where a layer passes gradients on, or adds
        those of several uses.
        """
        sums: dict[int, frozenset[int]] = {}  # what was added up in the backward: buffers that are no sums themselves
        for call in self.calls:
            if call["phase"] == "backward" and "output" in call:
                added = [sums.get(buffer, frozenset({buffer})) for buffer, _ in call["inputs"].values()]
                sums[call["output"]] = frozenset().union(*added)
        of_sums = {parts: buffer for buffer, parts in sums.items()}
        backward = {each["forward"]: each["computed"] for each in self.calls if "forward" in each}
        forward = [(number, call) for number, call in enumerate(self.calls) if call["phase"] == "forward"]
        for _, call in reversed(forward):
            parts = set[int]()
            for number, taker in forward:
                for name, (buffer, positions) in taker["inputs"].items():
                    if buffer != call["output"]:
                        continue
                    if number in backward and positions is None:
                        parts.add(backward[number].get(f"d{name}", -1))
                    elif taker["operation"] == "add" and taker["output"] in self.gradients:
                        passed = self.gradients[taker["output"]].buffer  # each term of a sum has its gradient
                        parts |= sums.get(passed, {passed})
                    else:
                        parts.add(-1)
            gradient = of_sums.get(frozenset(parts), next(iter(parts), -1) if len(parts) == 1 else -1)
            if gradient >= 0:
                self.gradients.setdefault(call["output"], Place(gradient, None))

    def json(self, inputs: dict[str, int], loss: int) -> dict[str, Any]:
        """The plan. inputs: the buffers of the batch, by name. loss: that of the loss."""
        return {
            "functions": [function_json(function) for function in self.made],
            "mistakes": mistakes_json(self),
            "buffers": self.buffers,
            "calls": self.calls,
            "gradients": {buffer: as_json(place) for buffer, place in self.gradients.items()},
            "parameters": [i for i, each in enumerate(self.buffers) if each["role"] == "parameter"],
            "inputs": inputs,
            "loss": loss,
            "optimizer": javascript_source(Derivation(adam_step.reference, None).compile().forward),
        }

    def parameter(self, x: Any) -> Place | None:
        """Where an argument is among the parameters."""
        place = self.place(x) if is_array(x) else None
        return place if place is not None and self.buffers[place.buffer]["role"] == "parameter" else None

    def input(self, name: str, x: np.ndarray, call: TracedCall, constant: bool = False) -> Place:
        """Where an input is. constant: whether it may be from no call, such as a mask."""
        place = self.place(x)
        if place is not None:
            return place
        if not constant:
            raise TypeError(f"{call.name}: expected {name} from a call of the trace, got an array that is from none")
        number = self.buffer(name, x.astype(float), axes=[""] * x.ndim, layer="", role="constant")
        self.buffers[number]["data"] = x.astype(float).ravel().tolist()
        return Place(number, None)

    def function(
        self, source: Source, suffix: str, results: list[str], given: Mapping[str, tuple[str, ...]], options: Mapping
    ) -> tuple[int, ArrayProgram]:
        """The number of the function that computes these results, and its program."""
        key = (source.name, suffix, tuple(results), *sorted(given.items()), *sorted(map(repr, options.items())))
        if key not in self.functions:
            program = array_program(source.definitions, f"{source.name}{suffix}", results, given, options)
            self.functions[key] = len(self.made)
            self.made.append(Function(source, program, tuple(results), dict(given), dict(options), suffix))
        return self.functions[key], self.made[self.functions[key]].program


def source_of(call: TracedCall) -> Source | None:
    """The derivation of an operation, or of a layer that calls none; None if there is none."""
    if call.layer is None:
        return operation_source(call.kind.removesuffix("_backward"))
    if call.calls or (call.phase == "forward" and is_identity(call)):
        return None
    parameters = tuple(name for name, value in vars(call.layer).items() if isinstance(value, Param))
    try:
        return layer_source(type(call.layer), parameters)
    except CompileError:
        return None


def is_identity(call: TracedCall) -> bool:
    """Whether a call returns what it was given, as dropout does outside of training."""
    return any(call.output is x for x in call.arguments.values())


def arguments_of(call: TracedCall, source: Source) -> tuple[dict[str, Any], set[str]]:
    """What the equations take as given in a forward call: arguments, parameters, and what follows from the arguments;
    and the names of the latter, such as a mask.
    """
    arguments = {name: x for name, x in call.arguments.items() if name != "__class__"}
    if call.layer is not None:
        arguments |= {name: p.data for name, p in vars(call.layer).items() if isinstance(p, Param)}
        return {canonical(name): x for name, x in arguments.items()}, set()
    op, names = getattr(ops, source.name), NAMES[source.name]
    taken = inspect.signature(names).parameters
    several = any(each.kind is each.VAR_POSITIONAL for each in taken.values())
    asked = names(*arguments.values()) if several else names(**{n: x for n, x in arguments.items() if n in taken})
    more = asked | ((op.given(*arguments.values()) if op.given else None) or {})
    return {canonical(name): x for name, x in (arguments | more).items()}, {*map(canonical, more)}


def output_of(call: TracedCall) -> str:
    """The name of what a forward returns: the backward's first argument is its gradient."""
    if call.layer is None:
        gradient, *_ = inspect.signature(getattr(ops, f"{call.kind}_backward")).parameters
    else:
        _, gradient, *_ = inspect.signature(type(call.layer).backward).parameters
    return canonical(gradient)[1:]


def gradients_of(source: Source, arguments: Mapping[str, Any]) -> list[str]:
    """The gradients that a backward returns, in order: of the arguments that are arrays of floating-point numbers."""
    names = [f"d{name}" for name, x in arguments.items() if is_array(x) and x.dtype.kind == "f"]
    return [name for name in names if name in {*source.definitions.known, *source.definitions.partial}]


def letters_of(definitions: Definitions, name: str, rank: int) -> tuple[str, ...]:
    """The letters of the axes of an array, with n for all axes before the others."""
    gradient = definitions.known.get(f"d{name}")
    shapes = [gradient.letters] if gradient is not None else []
    bound = {letter for each in definitions.known.values() for letter, _ in each.bindings}
    for clear in (True, False):
        for letters, side in definitions.sides:
            for node in walk(side):
                if node[0] == "name" and definitions.resolve(node[1]) == name and node[2]:
                    indices = [index[1] if index[0] == "idx" else "" for index in node[2]]
                    if "" not in indices and not (clear and {*indices} & {*letters, *bound}):
                        shapes.append(tuple(map(base, indices)))
    for shape in sorted(shapes, key=lambda shape: shape[:1] != ("n",)):
        if shape[:1] == ("n",) and len(shape) <= rank:
            return shape
        if len(shape) == rank:
            return shape
        if len(shape) < rank:
            return ("n", *shape)
    raise CompileError(f"{definitions.operation}: no equation has {name} with {rank} indices")


def spread(
    sizes: Mapping[str, int], program: ArrayProgram, gradients: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, int]:
    """The sizes with those of all letters that run over axes of known sizes."""
    known = dict(sizes)
    pairs = {(a.upper(), b.upper()) for a, b in program.same}
    for name, axes in (gradients or {}).items():
        pairs |= {(a.upper(), b.upper()) for a, b in zip(program.computed[name], axes, strict=False)}
    for _ in range(len(pairs) + 1):
        for a, b in pairs:
            if a in known or b in known:
                known.setdefault(a, known.get(b))
                known.setdefault(b, known.get(a))
    return known


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.number | np.ndarray) and not isinstance(x, bool) and np.ndim(x) == 0


def as_json(place: Place) -> list[Any]:
    return [place.buffer, place.positions and list(place.positions)]


def addresses(x: np.ndarray) -> list[int]:
    start = np.array(x.__array_interface__["data"][0])
    for size, stride in zip(x.shape, x.strides, strict=True):
        start = start[..., None] + np.arange(size) * stride
    return start.ravel().tolist()


def plan_of(model: Layer, *batch: np.ndarray) -> tuple[dict[str, Any], StepPlan]:
    """The plan of the step on a batch, as JSON, and what it was made from. The model's numbers must be in float64."""
    plan = StepPlan(model)
    with reference_only():
        traced = trace(model, *batch, loss=True)
    arrays = {name: x for name, x in traced.arguments.items() if is_array(x)}
    inputs = {name: plan.buffer(name, x, axes=[""] * x.ndim, layer="", role="input") for name, x in arrays.items()}
    plan.record(traced, "forward")
    plan.record(traced.backward, "backward")
    plan.pass_on()
    loss = [call["output"] for call in plan.calls if call["phase"] == "forward"][-1]
    if float(plan.values[loss]) != float(traced.output):
        raise TypeError(f"{type(model).__name__}: expected the loss to be the result of an operation")
    return plan.json(inputs, loss), plan


def wrong_plans(right: StepPlan, *batch: np.ndarray) -> Iterator[tuple[Mistake, dict[str, Any]]]:
    """The known mistakes in the code of the model's layers, each with the plan of the step that the wrong code takes.
    Left out are those with which the step stays the same, or has no plan.
    """
    for entry in entries_of("layers"):
        for mistake in entry.mistakes if entry.name in right.kinds else ():
            try:
                with planted(mistake):
                    wrong, made = plan_of(right.model, *batch)
            except TypeError:
                continue
            if (made.calls, made.buffers) != (right.calls, right.buffers):
                yield mistake, {key: part for key, part in wrong.items() if key != "mistakes"}


@contextmanager
def planted(mistake: Mistake) -> Iterator[None]:
    """While inside, the functions of a module have the code that the mistake makes of them."""
    module = sys.modules[f"scratchformer.{mistake.file.removesuffix('.py').replace('/', '.')}"]
    codes = {code.co_qualname: code for code in codes_in(compile(mistake.source(), str(module.__file__), "exec"))}
    functions = [each for each in functions_in(module) if each.__code__.co_qualname in codes]
    changed = [(function, function.__code__) for function in functions]
    for function, code in changed:
        function.__code__ = codes[code.co_qualname]
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def function_json(function: Function) -> dict[str, Any]:
    """The source of a function, and for each array that it computes its equation."""
    source, program = function.source, function.program
    return {
        "operation": source.name,
        "source": program.source,
        "computed": program.computed,
        "equations": {name: equation_json(function, source.definitions.known[name]) for name in program.computed},
        "aliases": aliases(source, program.used),
    }


def aliases(source: Source, used: tuple[str, ...]) -> dict[str, str]:
    """The short names of arrays and of their gradients, and what they stand for."""
    short = source.definitions.aliases
    both = {**short, **{f"d{name}": f"d{long}" for name, long in short.items()}}
    return {name: long for name, long in both.items() if long in used}


def equation_json(function: Function, definition: Definition) -> dict[str, Any]:
    """The equation that is computed, as a tree and typeset, with the place of its derivation."""
    source = function.source
    absent = {name for name, x in function.options.items() if x is None}

    def present(node: Node) -> Node:
        """A node without a term for an argument that is None, such as a bias."""
        if node[0] == "name" and node[1] in absent:
            return ("num", 0.0, "0")
        return node[1] if node[0] == "+" and node[2][:2] == ("num", 0.0) else node

    equation = Equation((definition.left, rebuilt(definition.node, present)), ("=",), definition.bindings)
    page = f"operations/{source.name}" if source.is_operation else f"layers/{source.name}"
    return {
        "tree": equation_as_json(equation),
        "html": "".join(pieces(equation)),
        "link": f"{page}.html{anchor(source, definition)}",
    }


def anchor(source: Source, definition: Definition) -> str:
    """The anchor of an equation on its page; "" if it has none."""
    if source.name not in CASES:
        return ""
    for number, (item, _) in enumerate(items(source.name)):
        if item.kind == "equation" and normal(item.text) == definition.text:
            return f"#{equation_id(source.name, number)}"
    return ""


def mistakes_json(plan: StepPlan) -> list[dict[str, Any]]:
    """The known mistakes in backwards of the plan: for each function that one changes, what is computed instead."""
    planted = []
    for name in dict.fromkeys(function.source.name for function in plan.made):
        for mistake in mistakes_of(name):
            if (changed := changed_by(mistake, [*enumerate(plan.made)])) is not None:
                planted.append({"operation": name, "title": mistake.title, "effect": mistake.effect, **changed})
    return planted


def changed_by(mistake: Mistake, functions: list[tuple[int, Function]]) -> dict[str, Any] | None:
    changed, typeset = {}, {}
    for number, function in functions:
        source = function.source
        if source.name != mistake.operation or not function.suffix or not mistake.wrong:
            continue
        names = {*source.names, *source.definitions.known, *source.definitions.aliases}
        try:
            right, wrong = (parse(text, names) for text in (mistake.equation, mistake.wrong))
            name = source.definitions.resolve(wrong.parts[0][1])
            definition = source.definitions.known[name]
            letters = tuple(index[1] for index in wrong.parts[0][2] if index != ("idx", "n"))
            planted = definition._replace(letters=letters, node=wrong.parts[-1], bindings=wrong.bindings)
            definitions = source.definitions._replace(known={**source.definitions.known, name: planted})
            program = array_program(
                definitions, f"{source.name}_backward", function.results, function.given, function.options
            )
        except (NotationError, CompileError, KeyError):
            return None
        if program.source == function.program.source:
            continue
        changed[number] = {"source": program.source, "computed": program.computed}
        typeset = {"name": name, "wrong": "".join(pieces(wrong)), "right": "".join(pieces(right))}
    return {**typeset, "functions": changed} if changed else None

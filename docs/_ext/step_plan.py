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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from inspect import Parameter
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
from reports import items
from tracing import TracedCall, codes_in, functions_in, trace

from scratchformer import ops
from scratchformer.catalogue import Mistake, entries_of, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.compiler import CompileError
from scratchformer.compiler.derivation import fields_of
from scratchformer.compiler.equations import Definition, Definitions, definitions_of
from scratchformer.compiler.javascript_arrays import ArrayPrinter, ArrayProgram, array_program, base
from scratchformer.dispatch import reference_only
from scratchformer.nn import EmbeddingSum, Layer, Param, TransformerBlock
from scratchformer.notation import Equation, NotationError, parse
from scratchformer.notation.grammar import Node, canonical, rebuilt, walk
from scratchformer.notation.layout import normal
from scratchformer.notation.page import equation_as_json
from scratchformer.ops.positions import BASE
from scratchformer.ops.rotary import SCALINGS
from scratchformer.pages.mathml import pieces
from scratchformer.pages.passages import equation_id

NAMES = {entry.name: entry.names for entry in entries_of("operations")}  # what derivations use besides their arguments


PRIMES = {"H": 5, "D": 7}  # of the sizes of heads: their number and their width
ZERO = -1  # the position of a number that is 0 wherever the others come from


@dataclass(frozen=True, eq=False)  # of the same text there is one
class Source:
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


def stated(
    name: str, op: Callable, names: Sequence[str], equation: str | None = None, is_operation: bool = False
) -> Source:
    """The equations of a function that is neither a layer nor an operation; or one equation of it."""
    text = None if equation is None else f"Forward.\n\n    {equation}\n\nNo more."
    definitions = definitions_of(op, None, names, text)
    aliases = {short: of for short, of in definitions.aliases.items() if of == "y" or not short.isupper()}  # no sizes
    return Source(name, definitions._replace(aliases=aliases), (), tuple(names), is_operation)


SINUSOIDS = stated("sinusoidal_positions", ops.sinusoidal_positions, ("y", "start"), is_operation=True)
FREQUENCIES = stated(
    "rotary_frequencies",
    ops.rotary_frequencies,
    ("y", *inspect.signature(ops.rotary_frequencies).parameters, *SCALINGS["llama3"]),
    is_operation=True,
)
SCALED = stated("EmbeddingSum", EmbeddingSum.forward, ("x", "scale"), "y_i = scale x_i")
JOINED = stated(
    "TransformerBlock", TransformerBlock.after, ("x", "f"), "y_bsc = x_bsc where s < M, f_{b,s−M,c} elsewhere"
)


LABELS = {SINUSOIDS.name: "sinusoids", FREQUENCIES.name: "frequencies", SCALED.name: "scaled", JOINED.name: "joined"}


class Place(NamedTuple):
    """Where the numbers of an array are: in a buffer, at these positions (or ZERO), or all of them in order (None)."""

    buffer: int
    positions: np.ndarray | None


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


class Added(NamedTuple):
    """What a call of a backward gives to the gradient of a parameter: the array `name`, at a place of it."""

    call: int
    name: str
    place: Place
    value: np.ndarray | None  # None if the trace does not show it


class Function(NamedTuple):
    """A program, and what it was made from."""

    name: str
    source: Source
    program: ArrayProgram
    results: tuple[str, ...]
    given: dict[str, tuple[str, ...]]
    options: dict[str, Any]
    suffix: str


Functions = dict[tuple, Function]  # by what they were made from; plans may share them


class StepPlan:
    """The plan while it is made. letters: sizes that may change when the plan runs, by their letters. Each is a
    multiple of its prime (PRIMES), which divides no other size. functions: those that other plans already have.
    """

    def __init__(
        self, model: Layer, letters: Mapping[str, int] | None = None, functions: Functions | None = None
    ) -> None:
        self.model, self.letters = model, dict(letters or {})
        self.buffers: list[dict[str, Any]] = []
        self.values: list[np.ndarray] = []
        self.spans: list[tuple[int, int]] = []  # the lowest and the highest address of a buffer's numbers
        self.functions = {} if functions is None else functions
        self.calls: list[dict[str, Any]] = []
        self.environments: dict[int, Environment] = {}  # by the ids of a forward call and of its backward
        self.gradients: dict[int, Place] = {}
        self.added: dict[int, list[Added]] = {}  # to the gradients of parameters, by their buffers
        self.kinds: set[str] = set()  # the layers that were called, and the operations that are no calls of the plan
        for name, p in model.named_parameters().items():
            here = self.buffer(name, p.data, axes=[""] * p.data.ndim, layer=name.rpartition(".")[0], role="parameter")
            gradient = self.buffer(f"d{name}", p.grad, axes=[""] * p.data.ndim, layer="", role="gradient")
            self.gradients[here] = Place(gradient, None)

    def buffer(self, name: str, x: np.ndarray, **options: Any) -> int:
        """A new buffer that holds the numbers of an array of the trace."""
        number = len(self.buffers)
        self.buffers.append({"name": name, "shape": list(np.shape(x)), **options})
        self.values.append(np.asarray(x))
        at = addresses(x) if isinstance(x, np.ndarray) and x.size else np.zeros(1, int)
        self.spans.append((int(at.min()), int(at.max())))
        return number

    def place(self, x: np.ndarray) -> Place | None:
        """Where the numbers of an array are; None for an array that no call has computed."""
        at = addresses(x)
        low, high = (int(at.min()), int(at.max())) if x.size else (0, 0)
        for number in reversed(range(len(self.values))):
            first, last = self.spans[number]
            if not 0 < first <= low <= high <= last:
                continue
            value = self.values[number]
            if value.flags.c_contiguous:
                return self.at(number, (at - first) // value.itemsize)
            there = addresses(value).ravel()
            order = np.argsort(there)
            positions = order[np.searchsorted(there, at, sorter=order).clip(0, len(order) - 1)]
            if (there[positions] == at).all():
                return self.at(number, positions)
        return self.copied(x) if x.size > 1 else None

    def copied(self, x: np.ndarray) -> Place | None:
        """Where the numbers were copied from: the same ones in another order, or some of them beside zeros."""
        alike = [number for number, value in enumerate(self.values) if value.dtype.kind == x.dtype.kind]
        for number in reversed(alike):
            value = self.values[number]
            for order in permutations(range(value.ndim)) if value.size == x.size else ():
                if np.array_equal(value.transpose(order).ravel(), x.ravel()):
                    moved = np.arange(value.size).reshape(value.shape).transpose(order)
                    return self.at(number, moved)
        wanted = {*x.ravel().tolist()} - {0.0} if x.any() else set()
        one = next(iter(wanted), None)  # most arrays lack it already
        for number in reversed(alike if len(wanted) > 1 else []):
            value = self.values[number].ravel()
            if one not in value:
                continue
            if wanted <= (numbers := {*value.tolist()}) and len(numbers | {0.0}) >= value.size > 1:
                where = {0.0: ZERO} | {each: i for i, each in enumerate(value.tolist())}
                return self.at(number, np.reshape([where[each] for each in x.ravel().tolist()], x.shape))
        return None

    def at(self, buffer: int, positions: np.ndarray) -> Place:
        whole = positions.size == self.values[buffer].size and (positions.ravel() == np.arange(positions.size)).all()
        return Place(buffer, None if whole else positions)

    # The calls

    def record(self, call: TracedCall, phase: str, above: tuple[TracedCall, ...] = ()) -> None:
        """Add a call of the trace: as one call of the plan, or else the calls that it makes."""
        self.kinds |= {call.kind} if call.layer is not None else set()
        self.phase, self.around = phase, [each for each in (*above, call) if each.layer is not None]
        source = self.source_of(call)
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
        self.kinds.add(call.kind)
        for below in call.calls:
            self.record(below, phase, (*above, call))

    def source_of(self, call: TracedCall) -> Source | None:
        """The derivation of an operation; of a layer if it calls none, or one on arrays that it has computed."""
        if call.layer is None:
            return operation_source(call.kind.removesuffix("_backward"))
        if call.phase == "forward" and (is_identity(call) or any(below.layer is not None for below in call.calls)):
            return None
        given = [x for below in call.calls for x in below.arguments.values() if is_array(x)]
        if (call.phase == "backward" and call.calls) or (given and all(self.place(x) for x in given)):
            return None
        try:
            return layer_source(type(call.layer), tuple(values_of(call.layer)))
        except CompileError:
            return None

    def forward(self, call: TracedCall, source: Source, phase: str, above: tuple[TracedCall, ...]) -> None:
        (arguments, more), output = arguments_of(call, source), output_of(call)
        arrays = {name: x for name, x in arguments.items() if is_array(x)}
        axes = {name: letters_of(source, name, x.ndim) for name, x in arrays.items()}
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
        layer = self.around[-1] if self.around else call
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
                "inputs": {name: self.as_json(place) for name, place in inputs.items()},
                "shapes": {name: list(x.shape) for name, x in arrays.items()},
                "numbers": numbers,
                "sizes": sizes,
                "computed": made,
                "output": made[output],
            }
        )

    def label(self, call: TracedCall, layer: TracedCall) -> str:
        """The last name of a layer that makes one call, such as "query"; else the name of the operation."""
        if layer.name == layer.kind or len(layer.calls) > 1:
            return call.kind
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
        returned = returned_by(call)
        actual = dict(zip(results, returned, strict=False))
        made, adds = {}, {}
        for name, of in program.computed.items():
            parameter = self.parameter(arguments.get(name[1:])) if name in results else None
            x = None if parameter else actual.get(name)
            made[name] = self.result(name, x, of, sizes, before.lead, layer="", call=len(self.calls), role="gradient")
            if parameter is not None:
                adds[name] = self.as_json(Place(self.gradients[parameter.buffer].buffer, parameter.positions))
                added = Added(len(self.calls), name, parameter, actual.get(name))
                self.added.setdefault(parameter.buffer, []).append(added)
            if name not in results and name[1:] in buffers:
                self.gradients.setdefault(buffers[name[1:]], Place(made[name], None))
        self.calls.append(
            {
                "function": function,
                "phase": "backward",
                "operation": source.name,
                "forward": before.number,
                "inputs": {name: self.as_json(place) for name, place in inputs.items()},
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

    def settle(self) -> None:
        """Leave out what the model's own code does not add to a parameter's gradient, such as one use of a table."""
        for buffer in [i for i, each in enumerate(self.buffers) if each["role"] == "parameter"]:
            every, gradient = self.added.get(buffer, []), self.values[self.gradients[buffer].buffer].ravel()
            if any(each.value is None for each in every):
                continue
            some = (each for count in range(len(every), -1, -1) for each in combinations(every, count))
            near = 1e-9 * max(1, np.abs(gradient).max())
            kept = next((each for each in some if np.abs(total(each, gradient.size) - gradient).max() < near), None)
            if kept is None:
                raise TypeError(f"{self.buffers[buffer]['name']}: expected its gradient from calls of the trace")
            for added in every:
                if added not in kept:
                    del self.calls[added.call]["adds"][added.name]

    def pass_on(self) -> None:
        """Find the gradients of results that no backward was given as such: where a layer passes gradients on, or adds
        those of several uses.
        """
        sums: dict[int, frozenset[int]] = {}  # what was added up in the backward: buffers that are no sums themselves
        for call in self.calls:
            if call["phase"] == "backward" and call["operation"] == "add":
                added = [sums.get(buffer, frozenset({buffer})) for buffer, _ in call["inputs"].values()]
                sums[call["output"]] = frozenset().union(*added)
        of_sums = {parts: buffer for buffer, parts in sums.items()}
        backward = {each["forward"]: each["computed"] for each in self.calls if "forward" in each}
        forward = [(number, call) for number, call in enumerate(self.calls) if call["phase"] == "forward"]
        for _, call in reversed(forward):
            parts, whole = set[int](), True
            for number, taker in forward:
                for name, (buffer, positions) in taker["inputs"].items():
                    if buffer != call["output"]:
                        continue
                    whole = whole and positions is None
                    if number in backward:
                        parts.add(backward[number].get(f"d{name}", -1))
                    elif taker["operation"] in ("add", "TransformerBlock") and taker["output"] in self.gradients:
                        passed = self.gradients[taker["output"]].buffer  # each term of a sum has its gradient
                        parts |= sums.get(passed, {passed})
                    else:
                        parts.add(-1)
            gradient = of_sums.get(frozenset(parts), next(iter(parts), -1) if len(parts) == 1 and whole else -1)
            if gradient >= 0:
                self.gradients.setdefault(call["output"], Place(gradient, None))

    def json(self, inputs: dict[str, int], loss: int) -> dict[str, Any]:
        """The plan. inputs: the buffers of the batch, by name. loss: that of the loss."""
        sizes = {call["function"]: None for call in self.calls}
        return {
            "functions": [*sizes],
            "buffers": [each | {"shape": [*map(self.symbol, each["shape"])]} for each in self.buffers],
            "calls": [
                call
                | {"sizes": {name: self.symbol(size) for name, size in call["sizes"].items()}}
                | {"shapes": {name: [*map(self.symbol, shape)] for name, shape in call["shapes"].items()}}
                for call in self.calls
            ],
            "gradients": {buffer: self.as_json(place) for buffer, place in self.gradients.items()},
            "parameters": [i for i, each in enumerate(self.buffers) if each["role"] == "parameter"],
            "inputs": inputs,
            "loss": loss,
        }

    def parameter(self, x: Any) -> Place | None:
        """Where an argument is among the parameters."""
        place = self.place(x) if is_array(x) else None
        return place if place is not None and self.buffers[place.buffer]["role"] == "parameter" else None

    def input(self, name: str, x: np.ndarray, call: TracedCall, constant: bool = False) -> Place:
        """Where an input is. constant: whether it may be from no call, such as a mask."""
        place = self.place(x) or self.computed(x)
        if place is not None:
            return place
        if not constant:
            raise TypeError(f"{call.name}: expected {name} from a call of the trace, got an array that is from none")
        once = x  # without the axes along which the numbers repeat
        for axis in range(x.ndim):
            first = once.take([0], axis)
            once = first if (first == once).all() else once
        if any(isinstance(self.symbol(size), str) for size in once.shape):
            raise TypeError(f"{call.name}: expected {name} to be the same for all sizes")
        number = self.buffer(name, once.astype(float), axes=[""] * x.ndim, layer="", role="constant")
        self.buffers[number]["data"] = once.astype(float).ravel().tolist()
        return self.at(number, np.broadcast_to(np.arange(once.size).reshape(once.shape), x.shape))

    # What the model's own code computes between the calls

    def computed(self, x: np.ndarray) -> Place | None:
        """A new call for an array that no traced call has computed: a table, a multiple of an array, or two joined."""
        return self.table(x) or self.multiple(x) or self.joined(x)

    def table(self, x: np.ndarray) -> Place | None:
        """A table that depends on its sizes and on the first position: sinusoids, perhaps from last to first."""
        if x.ndim == 1 and np.array_equal(x, ops.rotary_frequencies(2 * len(x))):
            sizes = {"D": 2 * len(x), "I": len(x)}
            return self.call(FREQUENCIES, x, {}, {"base": float(BASE)}, sizes, options={"scaling": "none"})
        T, C = x.shape if x.ndim == 2 else (0, 0)
        for start in range(1 - T, 1):
            for step in 1, -1:
                if np.array_equal(x[::step], ops.sinusoidal_positions(T, C, dtype=x.dtype, start=start)):
                    made = self.call(SINUSOIDS, x[::step].copy(), {}, {"start": float(start)}, {"T": T, "C": C})
                    return self.at(made.buffer, np.arange(x.size).reshape(x.shape)[::step])
        return None

    def multiple(self, x: np.ndarray) -> Place | None:
        """An array multiplied by a setting of a layer, such as the scale of embeddings."""
        settings = {float(n) for call in self.around for n in values_of(call.layer).values() if is_number(n)} - {0, 1}
        for number in reversed(range(len(self.values))):
            value = self.values[number]
            if value.shape != x.shape or value.dtype != x.dtype or value.dtype.kind != "f":
                continue
            for factor in settings:
                if np.array_equal(factor * value, x):
                    *lead, size = x.shape
                    inputs = {"x": (Place(number, None), ("n", "i"), x.shape)}
                    sizes = {"N": math.prod(lead), "I": size}
                    return self.call(SCALED, x, inputs, {"scale": factor}, sizes, tuple(lead))
        return None

    def joined(self, x: np.ndarray) -> Place | None:
        """Two arrays one after the other along the middle axis of three, such as a memory and what comes after it."""
        for number, value in enumerate(self.values):
            T = value.shape[1] if value.ndim == x.ndim == 3 else 0
            if not 0 < T < x.shape[1] or not np.array_equal(value, x[:, -T:]):
                continue
            if (first := self.place(x[:, :-T])) is not None:
                (B, S, C), M = x.shape, x.shape[1] - T
                inputs = {
                    "x": (first, ("b", "m", "c"), (B, M, C)),
                    "f": (Place(number, None), ("b", "t", "c"), (B, T, C)),
                }
                return self.call(JOINED, x, inputs, {}, {"B": B, "S": S, "M": M, "T": T, "C": C})
        return None

    def call(
        self,
        source: Source,
        x: np.ndarray,
        inputs: dict[str, tuple[Place, tuple[str, ...], tuple[int, ...]]],
        numbers: dict[str, float],
        sizes: dict[str, int],
        lead: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Place:
        """Where x is, after a new call that computes it as y. inputs: their places, axes and shapes."""
        given = {name: axes for name, (_, axes, _) in inputs.items()} | dict.fromkeys(numbers, ())
        function, program = self.function(source, "", ["y"], given, options or {})
        sizes, number = spread(sizes, program), len(self.calls)
        layer = self.around[-1].name if self.around else ""
        made = {}
        for name, axes in program.computed.items():
            now, role = (x, "output") if name == "y" else (None, "")
            made[name] = self.result(name, now, axes, sizes, lead, layer=layer, call=number, role=role)
        self.calls.append(
            {
                "function": function,
                "phase": self.phase,
                "operation": source.name,
                "label": LABELS.get(source.name, source.name),
                "inputs": {name: self.as_json(place) for name, (place, _, _) in inputs.items()},
                "shapes": {name: list(shape) for name, (_, _, shape) in inputs.items()},
                "numbers": numbers,
                "sizes": sizes,
                "computed": made,
                "output": made["y"],
            }
        )
        return Place(made["y"], None)

    def as_json(self, place: Place) -> list[Any]:
        """The buffer, and the positions in it: all (None), the first one with the steps along some axes, or a list."""
        positions = place.positions
        if positions is None:
            return [place.buffer, None]
        start = int(positions.flat[0])
        steps = [int(positions.take(1, axis).flat[0]) - start if n > 1 else 0 for axis, n in enumerate(positions.shape)]
        again = start + sum(
            np.expand_dims(np.arange(n) * step, [*range(positions.ndim)][:axis] + [*range(positions.ndim)][axis + 1 :])
            for axis, (n, step) in enumerate(zip(positions.shape, steps, strict=True))
        )
        if np.array_equal(np.broadcast_to(again, positions.shape), positions):
            shape = [self.symbol(n) for n in positions.shape]
            return [place.buffer, [self.symbol(start), shape, [self.symbol(step) for step in steps]]]
        if self.letters:
            raise TypeError(f"{self.around[-1].name}: expected numbers at places that are the same for all sizes")
        return [place.buffer, positions.ravel().tolist()]

    def symbol(self, n: int) -> int | str:
        """A size by its letters, such as "2HD"."""
        left, text = Fraction(n), ""
        for letter, prime in PRIMES.items() if n and self.letters else ():
            while left.numerator % prime == 0:
                left, text = left / self.letters[letter], text + letter
        return f"{float(left):g}{text}" if text else n

    def function(
        self, source: Source, suffix: str, results: list[str], given: Mapping[str, tuple[str, ...]], options: Mapping
    ) -> tuple[str, ArrayProgram]:
        """The name of the function that computes these results, and its program."""
        key = (source.name, suffix, tuple(results), *sorted(given.items()), *sorted(map(repr, options.items())))
        if key not in self.functions:
            program = array_program(source.definitions, f"{source.name}{suffix}", results, given, options)
            name = f"{source.name}{suffix}:{len(self.functions)}"
            self.functions[key] = Function(name, source, program, tuple(results), dict(given), dict(options), suffix)
        return self.functions[key].name, self.functions[key].program


def is_identity(call: TracedCall) -> bool:
    """Whether a call returns what it was given, as dropout does outside of training."""
    return any(call.output is x for x in call.arguments.values())


def arguments_of(call: TracedCall, source: Source) -> tuple[dict[str, Any], set[str]]:
    """What the equations take as given in a forward call: arguments, parameters, and what follows from the arguments;
    and the names of the latter, such as a mask.
    """
    arguments = {name: x for name, x in call.arguments.items() if name != "__class__"}
    if call.layer is not None:
        return {canonical(name): x for name, x in (arguments | values_of(call.layer)).items()}, set()
    op, names = getattr(ops, source.name), NAMES[source.name]
    taken = inspect.signature(names).parameters
    kinds = {each.kind for each in taken.values()}
    wanted = {n: x for n, x in arguments.items() if n in taken or Parameter.VAR_KEYWORD in kinds}
    asked = names(*arguments.values()) if Parameter.VAR_POSITIONAL in kinds else names(**wanted)
    more = asked | ((op.given(*arguments.values()) if op.given else None) or {})
    more = {canonical(name): x for name, x in more.items() if canonical(name) not in source.definitions.known}
    return {canonical(name): x for name, x in arguments.items()} | more, {*more}


def values_of(layer: Layer) -> dict[str, Any]:
    """The parameters of a layer, and its settings that are numbers."""
    values = {name: x.data if isinstance(x, Param) else x for name, x in vars(layer).items()}
    return {name: x for name, x in values.items() if is_array(x) or is_number(x)}


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


@cache
def letters_of(source: Source, name: str, rank: int) -> tuple[str, ...]:
    """The letters of the axes of an array, with n for all axes before the others."""
    definitions = source.definitions
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


def returned_by(call: TracedCall) -> tuple[Any, ...]:
    """What a backward returned; without `out`, to which it may have added."""
    returned = call.returned
    if call.arguments.get("out") is not None:
        dy, cache, *_ = call.arguments.values()
        returned = getattr(ops, call.kind).reference(dy, cache)
    return returned if isinstance(returned, tuple) else (returned,)


def total(added: Sequence[Added], size: int) -> np.ndarray:
    """The sum of what is added to a gradient of so many numbers."""
    result = np.zeros(size)
    for _, _, place, value in added:
        np.add.at(result, slice(None) if place.positions is None else place.positions.ravel(), value.ravel())
    return result


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.number | np.ndarray) and not isinstance(x, bool) and np.ndim(x) == 0


def addresses(x: np.ndarray) -> np.ndarray:
    """Of each number in memory."""
    start = np.array(x.__array_interface__["data"][0])
    for size, stride in zip(x.shape, x.strides, strict=True):
        start = start[..., None] + np.arange(size) * stride
    return start


def plan_of(
    model: Layer, *batch: np.ndarray, letters: Mapping[str, int] | None = None, functions: Functions | None = None
) -> tuple[dict[str, Any], StepPlan]:
    """The plan of the step on a batch, as JSON, and what it was made from. The model's numbers must be in float64.
    letters, functions: see `StepPlan`.
    """
    plan = StepPlan(model, letters, functions)
    with reference_only():
        traced = trace(model, *batch, loss=True)
    arrays = {name: x for name, x in traced.arguments.items() if is_array(x)}
    inputs = {name: plan.buffer(name, x, axes=[""] * x.ndim, layer="", role="input") for name, x in arrays.items()}
    plan.record(traced, "forward")
    losses = [each["output"] for each in plan.calls if not plan.buffers[each["output"]]["shape"]]
    if len(losses) == 2 and sum(float(plan.values[loss]) for loss in losses) == float(traced.output):
        terms = {name: (Place(loss, None), ("i",), (1,)) for name, loss in zip("xf", losses, strict=True)}
        losses = [plan.call(operation_source("add"), np.asarray(traced.output), terms, {}, {"I": 1}).buffer]
    if not losses or float(plan.values[losses[-1]]) != float(traced.output):
        raise TypeError(f"{type(model).__name__}: expected the loss to be the result of an operation")
    plan.record(traced.backward, "backward")
    plan.settle()
    plan.pass_on()
    return plan.json(inputs, losses[-1]), plan


def wrong_plans(right: StepPlan, *batch: np.ndarray) -> Iterator[tuple[Mistake, tuple[dict[str, Any], StepPlan]]]:
    """The known mistakes in the code of the model's layers, and of operations that are no calls of the plan, each with
    the plan of the step that the wrong code takes. Left out are those with which the gradient stays the same, or that
    fail or have no plan.
    """
    gradients = [p.grad.copy() for p in right.model.parameters()]
    for entry in entries_of("operations", "layers"):
        for mistake in entry.mistakes if entry.name in right.kinds else ():
            if mistake.file != entry.file:  # it is only in an equation, or in a twin
                continue
            try:
                with planted(mistake):
                    wrong, made = plan_of(right.model, *batch, letters=right.letters, functions=right.functions)
            except (TypeError, ValueError):
                continue
            if not all(map(np.allclose, gradients, (p.grad for p in right.model.parameters()))):
                yield mistake, (wrong, made)


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


def operations_json(functions: Functions) -> dict[str, dict[str, Any]]:
    """The functions by name, and the known mistakes in them, for each operation or layer."""
    by_source: dict[str, list[Function]] = {}
    for function in functions.values():
        by_source.setdefault(function.source.name, []).append(function)
    return {
        name: {"functions": {each.name: function_json(each) for each in made}, "mistakes": mistakes_json(name, made)}
        for name, made in by_source.items()
    }


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
    printer = ArrayPrinter(source.definitions, function.given, function.options)

    def present(node: Node) -> Node:
        """A node without a term for an argument that is None, such as a bias, and without cases that do not occur."""
        if node[0] == "name" and node[1] in absent:
            return ("num", 0.0, "0")
        if node[0] == "cases":
            return printer.decided(node)
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


def mistakes_json(name: str, functions: list[Function]) -> list[dict[str, Any]]:
    """The known mistakes in backwards of an operation: for each function that one changes, what is computed instead."""
    planted = []
    for mistake in mistakes_of(name):
        if (changed := changed_by(mistake, functions)) is not None:
            planted.append({"operation": name, "title": mistake.title, "effect": mistake.effect, **changed})
    return planted


def changed_by(mistake: Mistake, functions: list[Function]) -> dict[str, Any] | None:
    changed, typeset = {}, {}
    for function in functions:
        source = function.source
        if not mistake.wrong:
            continue
        try:
            definitions, (right, wrong) = with_mistake(source.definitions, mistake, source.names)
            program = array_program(
                definitions, f"{source.name}{function.suffix}", function.results, function.given, function.options
            )
        except (NotationError, CompileError, KeyError):
            return None
        if program.source == function.program.source:
            continue
        changed[function.name] = {"source": program.source, "computed": program.computed}
        name = source.definitions.resolve(wrong.parts[0][1])
        typeset = {"name": name, "wrong": "".join(pieces(wrong)), "right": "".join(pieces(right))}
    return {**typeset, "functions": changed} if changed else None


def with_mistake(
    definitions: Definitions, mistake: Mistake, names: Sequence[str] = ()
) -> tuple[Definitions, tuple[Equation, Equation]]:
    """The definitions with a mistake in one of them, and its right and its wrong equation."""
    names = {*names, *definitions.known, *definitions.aliases}
    right, wrong = (parse(text, names) for text in (mistake.equation, mistake.wrong))
    name = definitions.resolve(wrong.parts[0][1])
    letters = tuple(index[1] for index in wrong.parts[0][2] if index != ("idx", "n"))
    planted = definitions.known[name]._replace(letters=letters, node=wrong.parts[-1], bindings=wrong.bindings)
    return definitions._replace(known={**definitions.known, name: planted}), (right, wrong)

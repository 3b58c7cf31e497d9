"""Twins of an operation, made from its derivation: how the loops of its plans are called."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..backend import erf
from ..checks import expect_like
from ..dispatch import Operation
from ..notation.grammar import Node
from .axes import HALF, reordered
from .derivation import PLUS, Derivation, Plans
from .errors import CompileError
from .plan import Plan, names
from .trees import COLUMN, OPERATORS, ROW, Array

__all__ = ["Target", "add_twins"]

CALLS = 256  # the most shapes that a twin remembers
NOTHING: tuple[tuple, Any] = (), None
FUNCTIONS: Mapping[str, str] = {"max": "maximum", "min": "minimum"}  # the array library's names of functions


class Target(Protocol):
    """An array library, and how loops run on its arrays."""

    @property
    def xp(self) -> Any:
        """The array library."""

    @property
    def kind(self) -> type:
        """The type of the arrays."""

    @property
    def empty(self) -> Callable[..., Any]:
        """A function of a shape and a type: room for an array of rows, which may be apart."""

    def source(self, plan: Plan) -> str:
        """The loops as text. Raises CompileError if they cannot run on these arrays."""

    def contiguous(self, x: Any) -> Any:
        """The array, or a copy of it without gaps in its rows; rows may be apart if the loops know it."""

    @property
    def adds(self) -> bool:
        """Whether the loops add gradients to arrays that exist, see `dispatch.Operation.add_twin`."""

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        """Whether the loops of an operation can compute with arrays of this type, and are faster than the reference."""

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        """A function that runs the loops of a plan on arrays of this type: those that it reads, its numbers, and those
        that it writes.
        """


class Shape(NamedTuple):
    """The sizes of the axes, those of the leading axes, which the loops take as one, and the type of the numbers."""

    sizes: dict[str, int]
    lead: tuple[int, ...]
    dtype: np.dtype

    @property
    def wide(self) -> np.dtype:
        """The type in which the loops compute."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def of(self, array: Array) -> tuple[int, ...]:
        """The shape of an array as callers see it."""
        return (
            *(self.lead if ROW in array.axes else ()),
            *(self.sizes[a] for a in without_half(array.axes) if a != ROW),
        )


class Kept(NamedTuple):
    """What a forward leaves to its backward."""

    call: PlannedCall
    values: dict[str, Any]  # by name


def add_twins(op: Operation, op_backward: Operation | None, target: Target) -> CompiledTwin:
    """Register the twins of an operation for the arrays of a target. If its derivation cannot be compiled, which shows
    when it is first called, the twin fits no arguments.
    """
    twin = CompiledTwin(op, op_backward, target)
    backward = twin.backward if op_backward else None
    op.add_twin(target.kind, twin.fits, twin.forward, backward, fast=True, adds=target.adds)
    return twin


class CompiledTwin:
    """An operation as loops on the arrays of a target."""

    def __init__(self, op: Operation, op_backward: Operation | None, target: Target) -> None:
        self.op, self.op_backward, self.target = op, op_backward, target
        self.given = getattr(op, "given", None)
        self.loops: dict[tuple[int, np.dtype], tuple[Plan, Callable]] = {}  # holds the plan, so no other has its id
        self.call = lru_cache(CALLS)(self.make_call)
        self.asked: tuple[tuple, Any] = NOTHING  # the arguments of the latest `fits`, and its call

    def loops_of(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        """The loops of a plan, which are made when they are first asked for."""
        key = id(plan), dtype
        if key not in self.loops:
            self.loops[key] = plan, self.target.loops(plan, dtype)
        return self.loops[key][1]

    @cached_property
    def derivation(self) -> Derivation:
        """Raises CompileError if it cannot be compiled."""
        backward = self.op_backward and self.op_backward.reference
        return Derivation(self.op.reference, backward, getattr(self.op, "gives", ()))

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The arguments that the loops read."""
        try:
            pair = self.derivation.compile()
            for plan in pair[:2]:
                if plan is not None:
                    self.target.source(plan)
        except CompileError:
            return {}
        there = {array.name for array in pair.forward.reads}
        there |= {
            name
            for name, (_, default) in zip(self.names, self.parameters, strict=True)
            if default is inspect.Parameter.empty
        }
        return {name: array for name, array in self.derivation.arrays.items() if name in self.names and name in there}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What equations call the arguments."""
        return tuple(self.derivation.arguments)

    @cached_property
    def parameters(self) -> list[tuple[str, Any]]:
        """The names and defaults of the arguments."""
        return [(name, each.default) for name, each in self.derivation.signature.parameters.items()]

    def in_order(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """All arguments, in the order of the operation's."""
        if len(args) == len(self.parameters) and not kwargs:
            return args
        others = self.parameters[len(args) :]
        values = [kwargs.get(name, default) for name, default in others]
        missing = any([x is inspect.Parameter.empty for x in values])
        if missing or kwargs.keys() - dict(others).keys() or len(args) > len(self.parameters):
            self.derivation.signature.bind(*args, **kwargs)  # raises TypeError
        return (*args, *values)

    def signature(self, args: tuple[Any, ...]) -> tuple:
        """What decides which loops run: of an array its shape and type, an option, of other arguments the type."""
        kind: Any = self.target.kind
        return tuple(
            [
                (x.shape, x.dtype) if type(x) is kind else x if x is None or isinstance(x, (str, bool)) else type(x)
                for x in args
            ]
        )

    def fits(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the loops can compute with these arguments: arrays of one type, whose sizes go together."""
        if not self.arrays:
            return False
        args = self.in_order(args, kwargs)
        call = self.call(self.signature(args))
        if call is not None:
            self.asked = args, call  # for `forward`, which follows
        return call is not None

    def make_call(self, signatures: tuple) -> PlannedCall | None:
        """The plans for what `signature` gives; None if the loops cannot compute with such arguments."""
        arguments = dict(zip(self.names, signatures, strict=True))
        shape = self.shape(arguments)
        if shape is None or not self.target.takes(shape.dtype, self.op):
            return None
        others = {name: arguments[name] for name in self.names if name not in self.arrays}
        numbers = tuple(name for name, kind in others.items() if isinstance(kind, type) and is_number(kind))
        options = {name: value for name, value in others.items() if name not in numbers}
        deciding = tuple((name, value) for name, value in options.items() if name in self.derivation.deciding)
        try:
            pair = self.derivation.pair(numbers, deciding)
        except CompileError:  # with other options than by default
            return None
        odd = HALF in pair.forward.axes and shape.sizes[COLUMN] % 2
        return None if odd else PlannedCall(self, pair, shape, numbers, signatures)

    def shape(self, arguments: Mapping[str, Any]) -> Shape | None:
        """The sizes of the axes; None if the arrays do not go together, or one is empty."""
        sizes: dict[str, int] = {}
        lead: tuple[int, ...] | None = None
        dtype = None
        for name, array in self.arrays.items():
            if type(arguments[name]) is not tuple:  # no array of this library
                return None
            shape, given = arguments[name]
            if 0 in shape:
                return None
            if array.kind == "integer":
                if given.kind not in "iu":
                    return None
            elif given.kind not in "biu":
                if dtype is not None and dtype != given:  # (float64 is equal to None)
                    return None
                dtype = given
            axes = [axis for axis in array.axes if axis != ROW]
            before = len(shape) - len(axes)
            if before < 0 or (before and ROW not in array.axes):
                return None
            if ROW in array.axes:
                if lead not in (None, shape[:before]):
                    return None
                lead = shape[:before]
            for axis, size in zip(axes, shape[before:], strict=True):
                if sizes.setdefault(axis, size) != size:
                    return None
        return None if dtype is None else Shape({**sizes, ROW: math.prod(lead or ())}, lead or (), dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.in_order(args, kwargs)
        before, call = self.asked
        self.asked = NOTHING
        if len(args) != len(before) or any(map(operator.is_not, args, before)):  # another thread has called `fits`
            call = self.call(self.signature(args))
            assert call is not None  # the arguments fit
        values = dict(zip(self.names, args, strict=True))
        if self.given is not None and not call.is_checked(values):
            known = self.given(*args)
            if known is not None:
                values |= known
            elif not call.has_integers:
                call.checked = call.numbers_of(values)
        try:
            results = call.forward(values)
        except IndexError:  # the function may take other integers, such as one that marks padding
            return self.op.reference(*args)
        if call.pair.backward is None:
            return None
        y = results[0]
        y = y.astype(call.shape.dtype) if y.ndim and y.dtype != call.shape.dtype else y
        values[self.derivation.output] = y
        return y, Kept(call, {name: values[name] for name in call.kept})

    def backward(self, dy: Any, kept: Any, out: Any = None, into: Sequence[Any] = (), plus: Any = None) -> Any:
        """The gradients. out: an array to which the only gradient, a sum over rows, is added. into, plus: see
        `dispatch.Operation.add_twin`.
        """
        if type(kept) is not Kept:  # but the reference's cache, since the loops cannot take the integers
            assert self.op_backward is not None
            return self.op_backward.reference(*((dy, kept) if out is None else (dy, kept, out)))
        call, values = kept
        values = {**values, self.derivation.gradient: dy}
        given = dict(enumerate(into, start=1)) if out is None else {0: out}
        if plus is None or call.plus is None:
            results = call.backward(values, given)
            results[0] = results[0] if plus is None else results[0] + plus
        else:
            expect_like(PLUS, plus, call.plus.shape_of_first)
            results = call.plus({**values, PLUS: plus}, given)
        for i in call.summed - given.keys():
            results[i] = results[i].astype(call.shape.dtype)
        return results[0] if len(results) == 1 else tuple(results)


class PlannedCall:
    """The plans of an operation for arguments of certain shapes and types, which are its signatures."""

    def __init__(
        self, twin: CompiledTwin, pair: Plans, shape: Shape, numbers: tuple[str, ...], signatures: tuple
    ) -> None:
        self.twin, self.pair, self.shape, self.numbers, self.signatures = twin, pair, shape, numbers, signatures
        self.kept = (*pair.kept, *numbers)
        self.has_integers = any(array.kind == "integer" for array in twin.arrays.values())
        self.checked: tuple | None = None  # the numbers for which `given` has accepted these shapes and types

    def numbers_of(self, values: Mapping[str, Any]) -> tuple:
        return tuple([values[name] for name in self.numbers])

    def is_checked(self, values: Mapping[str, Any]) -> bool:
        return self.checked is not None and self.checked == self.numbers_of(values)

    @cached_property
    def forward(self) -> PlanRun:
        return PlanRun(self.twin, self.pair.forward, self.shape)

    @cached_property
    def summed(self) -> set[int]:
        """Which gradients are sums over rows that have rows themselves, so that they are no parameter's: they are given
        in the type of y, like all gradients that are no sums.
        """
        plan = self.pair.backward
        if plan is None or self.shape.dtype == self.shape.wide:
            return set()
        trees = [plan.values[name].tree for name in plan.results]
        places = [plan.sums[tree[1]].at or () if tree[0] == "sum" else () for tree in trees]
        return {i for i, at in enumerate(places) if any(p[0] == "at" and p[1] != COLUMN for p in at)}

    @cached_property
    def backward(self) -> PlanRun:
        assert self.pair.backward is not None
        return PlanRun(self.twin, self.pair.backward, self.shape)

    @cached_property
    def plus(self) -> PlanRun | None:
        return None if self.pair.plus is None else PlanRun(self.twin, self.pair.plus, self.shape)


class PlanRun:
    """A plan for arrays of certain shapes: called with values by name, it gives its results. It adds to the values what
    the loops wrote.

    given: the plan whose axes are those of the values, if this one has them in another order.
    """

    def __init__(self, twin: CompiledTwin, plan: Plan, shape: Shape, given: Plan | None = None) -> None:
        self.loops, self.plan, self.shape, self.twin = twin.loops_of(plan, shape.dtype), plan, shape, twin
        self.xp, self.orders = twin.target.xp, {plan.axes: self}
        wide, flat = shape.wide, plan.flat
        before = given or plan
        self.rows = [axis for axis in plan.axes if axis not in (COLUMN, HALF)]

        self.known: dict[str, Any] = {}  # what depends on sizes only
        self.head = []
        for name in plan.head:
            tree = plan.values[name].tree
            if names([tree]) <= self.known.keys():
                self.known[name] = evaluate(tree, self.known, shape, self.xp)
            else:
                self.head.append((name, tree))
        self.tail = [(name, plan.values[name].tree) for name in plan.tail]
        self.reads = [
            (new.name, new, order_of(old, new), looped(new, shape, flat), wide)
            for old, new in zip(before.reads, plan.reads, strict=True)
        ]
        self.writes = []
        for old, array in zip(before.writes, plan.writes, strict=True):
            stored = shape.dtype if COLUMN in array.axes and array.name not in plan.sums else wide
            apart = not flat and HALF not in array.axes
            make = self.xp.zeros if array.name in plan.sums else twin.target.empty if apart else self.xp.empty
            size, dtype = shape.of(array._replace(axes=(ROW, COLUMN)) if flat else array), np.dtype(bool)
            dtype = dtype if array.kind == "bool" else stored
            self.writes.append((array.name, make, size, dtype, looped(array, shape, flat), order_of(array, old)))

    @property
    def shape_of_first(self) -> tuple[int, ...]:
        """The shape of the first result, if the loops write it."""
        return next(whole for name, _, whole, *_ in self.writes if name == self.plan.results[0])

    def in_order_of_memory(self, values: Mapping[str, Any]) -> PlanRun:
        """This run, or one whose loops over rows go as the first array with all rows lies in memory."""
        array = next((a for a in self.plan.reads if {*self.rows} <= {*a.axes} and a.name in values), None)
        if array is None or (x := values[array.name]).ndim != len(axes := without_half(array.axes)):
            return self
        strides = dict(zip(axes, x.strides, strict=True))
        order = (*sorted(self.rows, key=lambda axis: -strides[axis]), *self.plan.axes[len(self.rows) :])
        if order not in self.orders:
            self.orders[order] = PlanRun(self.twin, reordered(self.plan, order), self.shape, self.plan)
            self.orders[order].rows = []  # it is in order
        return self.orders[order]

    def __call__(self, values: dict[str, Any], into: Mapping[int, Any] = {}) -> list:
        """into: arrays to which results are added, instead of new ones, by the place of the result."""
        if len(self.rows) > 1 and (run := self.in_order_of_memory(values)) is not self:
            return run(values, into)
        plan, xp = self.plan, self.xp
        values |= self.known
        for name, tree in self.head:
            values[name] = evaluate(tree, values, self.shape, xp)
        for name, axis in plan.places if xp is np else ():
            end = self.shape.sizes[axis]
            if values[name].min() < 0 or values[name].max() >= end:  # compiled code would read and write anywhere
                raise IndexError(f"{name}: expected integers from 0 to {end - 1}")
        reads = [
            arranged(
                values[name] if order is None else values[name].transpose(order), array, size, wide, self.twin.target
            )
            for name, array, order, size, wide in self.reads
        ]
        writes = []
        sums = {plan.values[plan.results[i]].tree: x for i, x in into.items()}
        for name, make, whole, dtype, size, order in self.writes:
            x = sums.get(("sum", name))
            if x is None or x.dtype != dtype or not x.flags.c_contiguous:
                x = make(whole, dtype)
            values[name] = x if order is None else x.transpose(order)
            writes.append(x if size is None or x.shape == size else x.reshape(size))
        self.loops(reads, [values[name] for name in plan.numbers], writes)
        for name, tree in self.tail:
            values[name] = values[tree[1]] if tree[0] == "sum" else evaluate(tree, values, self.shape, xp)
        results = [values[name] for name in plan.results]
        for i, x in into.items():
            if results[i] is not x:
                x += results[i]
                results[i] = x
        return results


def without_half(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != HALF)


def order_of(old: Array, new: Array) -> list[int] | None:
    """How an array with the axes of `old` is transposed to have those of `new`; None if they are the same."""
    return None if old.axes == new.axes else [without_half(old.axes).index(axis) for axis in without_half(new.axes)]


def looped(array: Array, shape: Shape, flat: bool) -> tuple[int, ...] | None:
    """The shape in which the loops take an array: its leading axes as one, or all of them, and a column in halves. None
    if it is the array's.
    """
    if flat:
        return (shape.sizes[ROW] * shape.sizes[COLUMN],)
    if not {*without_half(array.axes)} <= shape.sizes.keys():
        return None
    sizes = [shape.sizes[axis] for axis in without_half(array.axes)]
    return (*sizes[:-1], 2, sizes[-1] // 2) if HALF in array.axes else tuple(sizes)


def is_number(kind: type) -> bool:
    return issubclass(kind, int | float | np.floating | np.integer) and kind is not bool


def arranged(x: Any, array: Array, shape: tuple[int, ...] | None, wide: np.dtype, target: Target) -> Any:
    """An array as the loops take it: without gaps in its rows, in this shape."""
    if not array.axes or array.kind == "bits":
        return x
    if array.kind == "integer":
        x = x.astype(np.intp, copy=False)
    elif array.kind == "real" and x.dtype.kind in "biu":
        x = x.astype(wide)
    x = target.contiguous(x)
    return x if shape is None or x.shape == shape else x.reshape(shape)


def evaluate(tree: Node, env: Mapping[str, Any], shape: Shape, xp: Any) -> Any:
    """The value of a tree of the head or the tail, which has whole arrays in place of elements."""
    kind, *parts = tree
    if kind == "num":
        return parts[0]
    if kind == "number":
        return float(env[parts[0]])  # not NumPy's, which would widen arrays, or overflow as integers do
    if kind in ("value", "sum", "load"):
        x = env[parts[0]]
        return x.astype(shape.wide) if getattr(x, "dtype", None) == np.bool_ else x
    if kind == "size":
        return shape.sizes[parts[0]]
    if kind == "over":
        return getattr(evaluate(parts[1], env, shape, xp), parts[0])()  # sum or mean
    if kind == "call":
        inside = [evaluate(part, env, shape, xp) for part in parts[1]]
        if parts[0] == "erf":  # which is in no array library
            return erf(*inside)
        return getattr(library_of(inside, xp), str(FUNCTIONS.get(parts[0], parts[0])))(*inside)
    if kind == "if":
        holds: Any = True
        for relation, left, right in parts[0]:
            holds = holds & OPERATORS[relation](evaluate(left, env, shape, xp), evaluate(right, env, shape, xp))
        inside = [holds, *(evaluate(part, env, shape, xp) for part in parts[1:])]
        return library_of(inside, xp).where(*inside)
    inside = [evaluate(part, env, shape, xp) for part in parts]
    try:
        x = OPERATORS[kind](*inside)
    except ArithmeticError:  # of Python's numbers, where NumPy has infinity or NaN
        return float(OPERATORS[kind](*map(np.float64, inside)))
    return math.nan if isinstance(x, complex) else x


def library_of(values: Sequence[Any], xp: Any) -> Any:
    """xp, or NumPy if there is no array among the values: CuPy would move their results to the GPU."""
    return np if all(isinstance(x, int | float | np.generic) for x in values) else xp

"""Twins of an operation, made from its derivation: how the loops of its plans are called."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import dispatch
from ..dispatch import Operation, TwinCache
from ..notation.grammar import Node
from . import CompileError
from .axes import HALF, reordered
from .derivation import Derivation, Pair
from .plan import Plan
from .trees import COLUMN, ROW, Array

__all__ = ["Target", "add_twins"]

SIGNS: Mapping[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
    "mod": operator.mod,
    "neg": operator.neg,
    "=": operator.eq,
    "≠": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "≤": operator.le,
    "≥": operator.ge,
}
FUNCTIONS = {"max": "maximum", "min": "minimum"}  # what the array library calls those of the notation


class Target(Protocol):
    """An array library, and how loops run on its arrays."""

    xp: Any
    kind: type  # of the arrays

    def source(self, plan: Plan) -> str:
        """The loops as text. Raises CompileError if they cannot run on these arrays."""

    def contiguous(self, x: Any) -> Any:
        """The array, or a copy of it without gaps in its rows. (Between the rows there may be gaps that the loops know.)"""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Room for an array of rows, which may be apart."""

    def takes(self, dtype: np.dtype) -> bool:
        """Whether the loops can compute with arrays of this type."""

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], bool]:
        """A function that runs the loops of a plan on arrays of this type: those that it reads, its numbers, and those
        that it writes. It returns False if a sum was not finite, and may leave that unnoticed.
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

    pair: Pair
    values: dict[str, Any]  # by name
    shape: Shape


def add_twins(op: Operation, op_backward: Operation | None, target: Target, fast: bool = True) -> Twin:
    """Register the twins of an operation for the arrays of a target. If its derivation cannot be compiled, which shows
    when it is first called, the twin fits no arguments.
    """
    twin = Twin(op, op_backward, target)
    op.add_twin(target.kind, twin.fits, twin.forward, twin.backward if op_backward else None, fast=fast)
    return twin


class Twin:
    """An operation as loops on the arrays of a target."""

    def __init__(self, op: Operation, op_backward: Operation | None, target: Target) -> None:
        self.op, self.op_backward, self.target = op, op_backward, target
        self.loops: dict[tuple[int, np.dtype], Callable] = {}  # by plan; the derivation keeps the plans
        self.plans: dict[tuple[int, tuple[str, ...]], Plan] = {}  # in another order

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
            reads = {array.name for array in pair.forward.reads}
        except CompileError:
            return {}
        arguments = self.derivation.arguments
        return {name: array for name, array in self.derivation.arrays.items() if name in arguments and name in reads}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        parameters = self.derivation.signature.parameters.values()
        return {name: p.default for name, p in zip(self.derivation.arguments, parameters, strict=True)}

    @cached_property
    def canonical(self) -> dict[str, str]:
        return {original: name for name, original in self.derivation.arguments.items()}

    def named(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by the names that equations have for them."""
        by_name = {self.canonical[name]: value for name, value in kwargs.items()}
        return {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **by_name}

    def fits(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the loops can compute with these arguments: arrays of one type, whose sizes go together."""
        shape = self.shape(self.named(args, kwargs)) if self.arrays else None
        return shape is not None and self.target.takes(shape.dtype)

    def shape(self, values: Mapping[str, Any]) -> Shape | None:
        """The sizes of the axes; None if the arrays do not go together, or one is empty."""
        sizes: dict[str, int] = {}
        lead: tuple[int, ...] | None = None
        dtype = None
        for name, array in self.arrays.items():
            x = values[name]
            if type(x) is not self.target.kind or not x.size:
                return None
            if array.kind == "integer":
                if x.dtype.kind not in "iu":
                    return None
            elif x.dtype.kind not in "biu":
                if dtype not in (None, x.dtype):
                    return None
                dtype = x.dtype
            axes = [axis for axis in array.axes if axis != ROW]
            before = x.ndim - len(axes)
            if before < 0 or (before and ROW not in array.axes):
                return None
            if ROW in array.axes:
                if lead not in (None, x.shape[:before]):
                    return None
                lead = x.shape[:before]
            for axis, size in zip(axes, x.shape[before:], strict=True):
                if sizes.setdefault(axis, size) != size:
                    return None
        return None if dtype is None else Shape({**sizes, ROW: math.prod(lead or ())}, lead or (), dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self.named(args, kwargs)
        shape = self.shape(values)
        assert shape is not None  # the arguments fit
        given = getattr(self.op, "given", None)
        if given is not None:
            values |= given(*(values[name] for name in self.defaults)) or {}
        pair, others = self.pair(values)
        results = self.run(pair.forward, values, shape)
        if results is None:
            return self.op.reference(*args, **kwargs)
        if pair.backward is None:
            return None
        values |= dict(zip(pair.forward.results, results, strict=True))
        kept = {name: values[name] for name in pair.kept} | others
        y = results[0]
        return y.astype(shape.dtype, copy=False) if y.ndim else y, Kept(pair, kept, shape)

    def pair(self, values: Mapping[str, Any]) -> tuple[Pair, dict[str, Any]]:
        """The plans for these values of arguments, and the numbers and options on which they depend."""
        others = [name for name in self.defaults if name not in self.arrays]
        numbers = {name: values[name] for name in others if is_number(values[name])}
        options = {name: values[name] for name in others if name not in numbers and name in self.derivation.deciding}
        return self.derivation.pair(tuple(numbers), tuple(options.items())), numbers | options

    def cache_of(self, values: Mapping[str, Any], like: TwinCache) -> TwinCache:
        """The cache that `forward` would leave with these values, for the y of another cache."""
        pair, others = self.pair({**self.defaults, **values})
        kept = Kept(pair, {name: values[name] for name in pair.kept} | others, like.kept.shape)
        backward = self.backward if self.op_backward else None
        twin = dispatch.Twin(self.op.__name__, self.fits, self.forward, backward)
        return TwinCache(twin, kept, like.shape, like.dtype)

    def backward(self, dy: Any, kept: Any, out: Any = None) -> Any:
        """The gradients. out: an array to which the only gradient, a sum over rows, is added."""
        if type(kept) is not Kept:  # the cache of the reference, which took over after an overflow
            return self.op_backward.reference(dy, kept) if out is None else self.op_backward.reference(dy, kept, out)
        pair, values, shape = kept
        results = self.run(pair.backward, {**values, self.derivation.gradient: dy}, shape, out)
        return results[0] if len(results) == 1 else tuple(results)

    def in_order_of_memory(self, plan: Plan, values: Mapping[str, Any]) -> Plan:
        """The plan with its loops over rows in the order in which the first array with all rows lies in memory."""
        rows = [axis for axis in plan.axes if axis not in (COLUMN, HALF)]
        if len(rows) < 2:
            return plan
        array = next((array for array in plan.reads if {*rows} <= {*array.axes}), None)
        if array is None or values[array.name].ndim != len(without_half(array.axes)):
            return plan
        strides = dict(zip(without_half(array.axes), values[array.name].strides, strict=True))
        order = (*sorted(rows, key=lambda axis: -strides[axis]), *plan.axes[len(rows) :])
        if order == plan.axes:
            return plan
        if (id(plan), order) not in self.plans:
            self.plans[id(plan), order] = reordered(plan, order)
        return self.plans[id(plan), order]

    def run(self, plan: Plan, values: Mapping[str, Any], shape: Shape, out: Any = None) -> list | None:
        """The results of a plan; None if a sum was not finite. out: see `backward`."""
        xp, wide, flat = self.target.xp, shape.wide, plan.axes == (COLUMN,)
        env = dict(values)
        for name in plan.head:
            env[name] = evaluate(plan.values[name].tree, env, shape, xp)
        given, plan = plan, self.in_order_of_memory(plan, env)
        pairs = zip(given.reads, plan.reads, strict=True)
        reads = [arranged(transposed(env[old.name], old, new), new, flat, wide, self.target) for old, new in pairs]
        writes = []
        for old, new in zip(given.writes, plan.writes, strict=True):
            stored = shape.dtype if COLUMN in new.axes and new.name not in plan.sums else wide
            apart = not flat and HALF not in new.axes
            make = xp.zeros if new.name in plan.sums else self.target.empty if apart else xp.empty
            x = make(
                shape.of(new._replace(axes=(ROW, COLUMN)) if flat else new), bool if new.kind == "bool" else stored
            )
            env[new.name] = transposed(x, new, old)
            writes.append(arranged(x, new, flat, wide, self.target))
        for name, axis in plan.places if xp is np else ():
            size = shape.sizes[axis]
            if env[name].min() < 0 or env[name].max() >= size:  # compiled code would read and write anywhere
                raise IndexError(f"{name}: expected integers from 0 to {size - 1}")
        key = id(plan), shape.dtype
        if key not in self.loops:
            self.loops[key] = self.target.loops(plan, shape.dtype)
        if not self.loops[key](reads, [float(env[name]) for name in plan.numbers], writes):
            return None
        for name in plan.tail:
            env[name] = evaluate(plan.values[name].tree, env, shape, xp)
        if out is not None and (result := env[plan.results[0]]) is not out:
            out += result
            return [out]
        return [env[name] for name in plan.results]


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.floating | np.integer) and not isinstance(x, bool)


def without_half(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != HALF)


def transposed(x: Any, old: Array, new: Array) -> Any:
    """An array with the axes of `old` in the order of `new`."""
    if old.axes == new.axes:
        return x
    return x.transpose([without_half(old.axes).index(axis) for axis in without_half(new.axes)])


def arranged(x: Any, array: Array, flat: bool, wide: np.dtype, target: Target) -> Any:
    """An array as the loops take it, contiguous, with its leading axes as one; all axes as one if `flat`."""
    if not array.axes or array.kind == "bits":
        return x
    if array.kind == "integer":
        x = x.astype(np.intp, copy=False)
    elif array.kind == "real" and x.dtype.kind in "biu":
        x = x.astype(wide)
    if x.ndim > len(array.axes) and x.shape[-1] == 1 and COLUMN not in array.axes:
        x = x[..., 0]  # an axis that a reduction kept
    x = target.contiguous(x)
    if flat:
        return x.reshape(-1)
    if HALF in array.axes:
        return x.reshape(*x.shape[:-1], 2, -1)
    return x.reshape(-1, *x.shape[x.ndim - len(array.axes) + 1 :]) if array.axes[0] == ROW else x


def evaluate(tree: Node, env: Mapping[str, Any], shape: Shape, xp: Any) -> Any:
    """The value of a tree of the head or the tail, which has whole arrays in place of elements."""
    kind, *parts = tree
    if kind == "num":
        return parts[0]
    if kind in ("number", "value", "sum", "load"):
        x = env[parts[0]]
        return x.astype(shape.wide) if getattr(x, "dtype", None) == bool else x
    if kind == "size":
        return shape.sizes[parts[0]]
    if kind == "over":
        return evaluate(parts[1], env, shape, xp).sum()
    if kind == "call":
        inside = [evaluate(part, env, shape, xp) for part in parts[1]]
        return getattr(xp, FUNCTIONS.get(parts[0], parts[0]))(*inside)
    if kind == "if":
        holds: Any = True
        for relation, left, right in parts[0]:
            holds = holds & SIGNS[relation](evaluate(left, env, shape, xp), evaluate(right, env, shape, xp))
        return xp.where(holds, *(evaluate(part, env, shape, xp) for part in parts[1:]))
    return SIGNS[kind](*(evaluate(part, env, shape, xp) for part in parts))

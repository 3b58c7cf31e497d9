"""Operations that change arrays in place, such as the step of an optimizer, as one loop over their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from ..dispatch import Operation
from ..ops.rounding import round_into
from ..optim.adam import adam_step
from ..optim.muon import move, nesterov
from ..optim.optimizer import scale
from ..optim.sgd import sgd_step
from .derivation import before
from .errors import CompileError
from .twins import CompiledTwin, Shape, Target, evaluate, is_number

__all__ = ["IN_PLACE", "add_in_place"]

IN_PLACE = (adam_step, sgd_step, nesterov, move, round_into, scale)


def add_in_place(op: Any, target: Target) -> None:
    """Register the twin of an operation that changes arrays in place for the arrays of a target."""
    twin = InPlace(op, target)
    op.add_twin(target.kind, twin.fits, twin.forward, fast=True)


class InPlace(CompiledTwin):
    """The twin of an operation that has no backward: its results are those arguments that an equation defines.

    All arrays have one shape. They are called on pieces of cache size, so as little as possible is done in each call.
    """

    def __init__(self, op: Operation, target: Target) -> None:
        super().__init__(op, None, target)
        self.prepared = lru_cache(64)(self.prepare)  # for each learning rate
        self.number = getattr(target, "number", target.kind)  # the type of a number that is in an array ()

    @cached_property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Where among the arguments are arrays that are read, arrays that are only written, and numbers. The first is
        empty if the derivation cannot be compiled.
        """
        try:
            self.derivation.compile()
        except CompileError:
            return (), (), ()
        known, arrays = self.derivation.definitions.known, self.derivation.arrays
        places: tuple[list[int], list[int], list[int]] = [], [], []
        for i, name in enumerate(self.derivation.arguments):
            read = before(name) in arrays if name in known else name in arrays
            places[0 if read else 1 if name in known else 2].append(i)
        return tuple(places[0]), tuple(places[1]), tuple(places[2])

    def fits(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the loops can compute with these: contiguous arrays of one shape, those that are read of one type."""
        read, written, others = self.places
        if not read:
            return False
        args = self.in_order(args, kwargs)
        kind: Any = self.target.kind
        takes = partial(self.target.takes, op=self.op)
        first = args[read[0]]
        if type(first) is not kind or not first.size or not takes(first.dtype):
            return False
        for i in read:
            x = args[i]
            if type(x) is not kind or x.dtype != first.dtype or x.shape != first.shape or not x.flags.c_contiguous:
                return False
        for i in written:
            x = args[i]
            if type(x) is not kind or x.shape != first.shape or not x.flags.c_contiguous or not takes(x.dtype):
                return False
            if first.dtype == np.float64 and x.dtype.itemsize == 2:
                return False  # by way of float32 it would be rounded twice
        return not any(type(args[i]) is kind and args[i].shape for i in others)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        args = self.in_order(args, kwargs)
        read, _, others = self.places
        numbers = tuple([None if type(x) is self.number else x for x in [args[i] for i in others]])
        self.prepared(args[read[0]].dtype, numbers)(args)

    def prepare(self, dtype: np.dtype, others: tuple) -> Callable[[tuple], object]:
        """A function of the arguments that runs the loops. others: the values of those that are not arrays; None for a
        number that is in an array ().
        """
        names = [*self.derivation.arguments]
        values = {names[i]: value for i, value in zip(self.places[2], others, strict=True)}
        numbers = tuple(name for name in values if is_number(type(values[name])))
        options = tuple((name, value) for name, value in values.items() if isinstance(value, bool | str))
        plan = self.derivation.pair(numbers, options).forward
        for name in plan.head:
            values[name] = evaluate(plan.values[name].tree, values, Shape({}, (), dtype), np)
        given = [float(values[name]) for name in plan.numbers]
        run = self.loops_of(plan, dtype)
        reads = [(names.index(array.name), array.axes) for array in plan.reads]
        writes = [names.index(array.name) for array in plan.writes]

        def loops(args: tuple) -> object:
            arrays = [args[i].reshape(-1) if axes else args[i] for i, axes in reads]
            return run(arrays, given, [args[i].reshape(-1) for i in writes])

        return loops

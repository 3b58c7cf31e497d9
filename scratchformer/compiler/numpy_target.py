"""Blocks of rows on NumPy, without the extra `fast`: for arrays in float32 and float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import erf
from ..rng import GAMMA, Bits
from .axes import leaves
from .derivation import Pair
from .numpy_code import numpy_source
from .plan import Plan
from .trees import COLUMN, LOOPS

__all__ = ["NumpyTarget", "saves_time"]

CHAIN = 10  # operations on whole arrays in forward and backward, from which blocks are faster
ON_ARRAYS = ("+", "-", "*", "/", "^", "neg", "mod", "call", "if")


class NumpyTarget:
    xp: Any = np
    kind: type = np.ndarray
    source: Any = staticmethod(numpy_source)
    contiguous: Any = staticmethod(np.ascontiguousarray)
    empty: Any = staticmethod(np.empty)

    def takes(self, dtype: np.dtype) -> bool:
        return dtype in (np.float32, np.float64)

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], bool]:
        space: dict[str, Any] = {"np": np, "erf": erf, "drawn": drawn}
        exec(compile(numpy_source(plan), __file__, "exec"), space)
        function = space[plan.name]

        def run(reads: list, numbers: list, writes: list) -> bool:
            arrays = (x if isinstance(x, Bits) or np.ndim(x) else float(x) for x in reads)
            with np.errstate(over="ignore", invalid="ignore"):  # then the reference runs, and says so
                return bool(function(*arrays, *map(dtype.type, numbers), *writes))

        return run


def saves_time(pair: Pair) -> bool:
    """Whether blocks are faster than whole arrays: for a long chain without a condition on the place in a row."""
    steps = 0
    for plan in filter(None, pair[:2]):
        trees = [value.tree for value in plan.values.values() if value.stage == LOOPS and COLUMN in value.axes]
        trees += [each.tree for each in plan.sums.values()]
        nodes = [node for tree in trees for node in leaves(tree)]
        sides = [side for node in nodes if node[0] == "if" for condition in node[1] for side in condition[1:]]
        if any(("at", COLUMN) in leaves(side) for side in sides):
            return False
        steps += len(plan.sums) + sum(node[0] in ON_ARRAYS for node in nodes)
    return steps >= CHAIN


def drawn(bits: Bits, block: slice, shape: tuple[int, ...]) -> np.ndarray:
    """The random integers of a block of rows of an array of this shape."""
    width = math.prod(shape[1:])
    words, skipped = divmod(block.start * width, 4)
    start = np.add(bits.start, np.multiply(words, GAMMA, dtype=np.uint64), dtype=np.uint64)
    integers = Bits(start).draw(skipped + (block.stop - block.start) * width)
    return integers[skipped:].reshape(-1, *shape[1:])

"""Loops over blocks of rows in NumPy, for arrays in float32 and float64. No twin is made of them, since they would save
less than a hundredth of a training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import erf
from ..rng import GAMMA, Bits
from .numpy_code import numpy_source
from .plan import Plan


class NumpyTarget:
    xp: Any = np
    kind: type = np.ndarray
    adds: bool = False
    source: Any = staticmethod(numpy_source)
    contiguous: Any = staticmethod(np.ascontiguousarray)
    empty: Any = staticmethod(np.empty)

    def takes(self, dtype: np.dtype, op: Any) -> bool:
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


def drawn(bits: Bits, block: slice, shape: tuple[int, ...]) -> np.ndarray:
    """The random integers of a block of rows of an array of this shape."""
    width = math.prod(shape[1:])
    words, skipped = divmod(block.start * width, 4)
    start = np.add(bits.start, np.multiply(words, GAMMA, dtype=np.uint64), dtype=np.uint64)
    integers = Bits(start).draw(skipped + (block.stop - block.start) * width)
    return integers[skipped:].reshape(-1, *shape[1:])

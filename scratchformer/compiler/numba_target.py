"""Loops in compiled code, by Numba: for NumPy arrays in float32, float64 and bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from ..kernels import numba_math, numba_rows
from ..kernels.numba_code import as_bits, compiled, plus
from ..rng import Bits
from .numba_code import numba_source
from .plan import Plan

__all__ = ["NumbaTarget"]


class NumbaTarget:
    xp, kind = np, np.ndarray

    def takes(self, dtype: np.dtype) -> bool:
        return dtype in (np.float32, np.float64) or dtype.name == "bfloat16"

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], bool]:
        wide = np.float64 if dtype == np.float64 else np.float32
        function = loops(numba_source(plan), plan.name, wide, plan.in_place)

        def run(reads: list, numbers: list, writes: list) -> bool:
            return function(*map(as_taken, reads), *map(wide, numbers), *map(as_bits, writes)) == 0

        def as_taken(x: Any) -> Any:
            return x.start if isinstance(x, Bits) else as_bits(x) if getattr(x, "ndim", 0) else wide(x)

        return run


@cache
def loops(source: str, name: str, wide: Any, exact: bool) -> Any:
    """The compiled function of a source that computes in the type `wide`. exact: whether each operation is rounded as
    NumPy rounds it; then steps of an optimizer give the same weights whether they are compiled or not.

    Numba keeps compiled code on disk by file, name and line. The file is this one, and the name has a checksum of the source.
    """
    unique = f"{name}_{sha256(source.encode()).hexdigest()[:12]}_{np.dtype(wide).name}"
    space = {"__name__": __name__, "np": np, "R": wide, "plus": plus, "maximum_of_row": numba_rows.maximum_of_row}
    space |= {key: getattr(numba_math, key) for key in ("read", "narrow", "exp", "draw")} | {
        "log": np.log,
        "tanh": np.tanh,
        "sin": np.sin,
        "cos": np.cos,
        "erf": math.erf,
    }
    exec(compile(source.replace(f"def {name}(", f"def {unique}(", 1), __file__, "exec"), space)
    return compiled(space[unique], () if exact else ("contract",))

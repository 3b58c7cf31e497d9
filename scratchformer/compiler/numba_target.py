"""Loops in compiled code, by Numba: for NumPy arrays in float32, float64 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from .. import ops
from ..kernels import numba_math, numba_rows
from ..kernels.numba_code import as_bits, compiled, plus
from .numba_code import numba_source
from .plan import Plan

__all__ = ["NumbaTarget"]


class NumbaTarget:
    xp, kind, source = np, np.ndarray, staticmethod(numba_source)
    adds = False
    contiguous, empty = staticmethod(np.ascontiguousarray), staticmethod(np.empty)

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        native = dtype in (np.float32, np.float64)
        return dtype.name == "bfloat16" or (native and op is not ops.add)  # which NumPy computes as fast by itself

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        wide = np.float64 if dtype == np.float64 else np.float32
        function = loops(numba_source(plan), plan.name, wide, plan.in_place)

        drawn = [i for i, array in enumerate(plan.reads) if array.kind == "bits"]
        half, scalars = dtype.kind == "V", [i for i, array in enumerate(plan.reads) if not array.axes]

        def run(reads: list, numbers: list, writes: list) -> None:
            for i in drawn:
                reads[i] = reads[i].start
            for i in scalars:
                reads[i] = wide(reads[i])
            if half or plan.in_place:  # what is only written may be of another type
                reads, writes = (
                    [as_bits(x) if type(x) is np.ndarray else x for x in reads],
                    [as_bits(x) for x in writes],
                )
            function(*reads, *map(wide, numbers), *writes)

        return run


@cache
def loops(source: str, name: str, wide: Any, exact: bool) -> Any:
    """The compiled function of a source that computes in the type `wide`. exact: whether each operation is rounded as
    NumPy rounds it; then steps of an optimizer give the same weights whether they are compiled or not.

    Numba keeps compiled code on disk by file, name and line. The file is this one, and the name has a checksum of the
    source.
    """
    unique = f"{name}_{sha256(source.encode()).hexdigest()[:12]}_{np.dtype(wide).name}"
    space = {"__name__": __name__, "np": np, "R": wide, "plus": plus, "maximum_of_row": numba_rows.maximum_of_row}
    functions = "read narrow column_of draw drawn_at greater lesser exp log log1p tanh erf"
    space |= {name: getattr(numba_math, name) for name in functions.split()}
    space |= {"sin": np.sin, "cos": np.cos}
    exec(compile(source.replace(f"def {name}(", f"def {unique}(", 1), __file__, "exec"), space)
    return compiled(space[unique], () if exact else ("contract",))

"""Twins on NumPy from derivations, without the extra `fast`: blocks of rows that stay in the processor's cache.

NumPy goes over its arrays once for each operation on them. Where many operations follow each other, all are done for
one block of rows and then for the next, so that memory is read and written once. An operation gets such a twin if that
saves time: if its forward and backward together are a long chain, and no condition depends on the place in a row. (Such
a condition costs more here than the indexing that it stands for.) Arrays smaller than a block are in the cache anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .. import ops

SMALLEST = 1 << 16  # numbers in an array


def add_blocks(op: Any, op_backward: Any) -> None:
    """Register the twin of an operation. The first call with a large array makes it, if it saves time."""

    @cache
    def twin() -> Any:
        from ..compiler.numpy_target import NumpyTarget, saves_time  # they import SciPy
        from ..compiler.twins import Twin

        made = Twin(op, op_backward, NumpyTarget())
        return made if made.arrays and saves_time(made.derivation.compile()) else None

    def fits(*args: Any, **kwargs: Any) -> bool:
        large = any(type(x) is np.ndarray and x.size >= SMALLEST for x in args)
        return large and twin() is not None and twin().fits(*args, **kwargs)

    op.add_twin(
        np.ndarray,
        fits,
        lambda *args, **kwargs: twin().forward(*args, **kwargs),
        lambda dy, kept, **kwargs: twin().backward(dy, kept, **kwargs),
    )


for name, op in list(vars(ops).items()):  # without those of `ops.fused`, which would be loaded now
    if hasattr(op, "add_twin") and f"{name}_backward" in vars(ops):
        add_blocks(op, getattr(ops, f"{name}_backward"))

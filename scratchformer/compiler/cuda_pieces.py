"""Operations that change arrays in place, for `Pieces` on a GPU: one kernel for all parts of the flat arrays.

An optimizer steps parameters of several kinds, each of which lies in many places of the flat arrays. A kernel for each
place would take longer to start than to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cupy
import numpy as np

from ..backend import kept
from ..kernels.cupy_code import BYTES, TYPES, real
from ..optim.optimizer import Pieces
from .cuda_code import cuda_source, is_flat
from .cuda_target import kernel, readable
from .errors import CompileError
from .in_place import IN_PLACE, InPlace
from .plan import Plan

__all__ = ["add_pieces"]

THREADS, BLOCKS = 256, 4096  # of a block; blocks of a piece, at most


def add_pieces() -> None:
    """Register the twins of operations that change arrays in place, for `Pieces` of CuPy arrays."""
    for op in IN_PLACE:
        twin = InPlacePieces(op, PiecesTarget())
        op.add_twin(Pieces, twin.fits, twin.forward, fast=True)


class InPlacePieces(InPlace):
    def fits(self, *args: Any, **kwargs: Any) -> bool:
        flats = [x.flat for x in (*args, *kwargs.values()) if type(x) is Pieces]
        return all(type(flat) is cupy.ndarray for flat in flats) and super().fits(*args, **kwargs)


class PiecesTarget:
    """`Pieces` of CuPy arrays, for `InPlace`."""

    xp, kind, number, adds = cupy, Pieces, cupy.ndarray, False

    @staticmethod
    def source(plan: Plan) -> str:
        if not is_flat(plan):
            raise CompileError(f"{plan.name}: its arrays have rows")
        return cuda_source(plan, pieces=True)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return cupy.empty(shape, dtype)

    def contiguous(self, x: Any) -> Any:
        return x

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        return dtype.name in TYPES

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        wide, text = real(dtype), cache(partial(cuda_source, plan, pieces=True))

        def run(reads: list, numbers: list, writes: list) -> None:
            arrays = [
                x if isinstance(x, Pieces) else readable(x, array, dtype)
                for x, array in zip(reads + writes, (*plan.reads, *plan.writes), strict=True)
            ]
            parts = [x for x in arrays if isinstance(x, Pieces)]
            sizes = tuple(map(math.prod, parts[0].shapes))
            device = cupy.cuda.runtime.getDevice()
            table = table_of(device, sizes, *(x.starts for x in parts))
            V = vector_of(tuple((x.flat.itemsize, x.flat.data.ptr % BYTES, x.starts) for x in parts))
            names = {dtype: "T", real(dtype): "REAL"} if dtype != real(dtype) else {dtype: "T"}
            types = tuple(names.get(x.dtype) or TYPES[x.dtype.name] for x in arrays)
            constants = dict(V=V, THREADS=THREADS, ROWS=1, WHOLE=int(not any(size % V for size in sizes)))
            run_kernel = kernel(text(types), f"{plan.name}_pieces", dtype.name, tuple(constants.items()))
            blocks = min(BLOCKS, -(-max(sizes) // (V * THREADS)))
            given = [x.flat if isinstance(x, Pieces) else x for x in arrays]
            run_kernel((blocks, len(sizes)), (THREADS, 1), (table, *given, *map(wide.type, numbers)))

        return run


@kept(256)
def table_of(device: int, sizes: tuple[int, ...], *starts: tuple[int, ...]) -> Any:
    """A row for each piece: its size, and where it starts in each array."""
    return cupy.asarray(np.array([sizes, *starts], np.int64).T.copy())


@cache
def vector_of(arrays: tuple[tuple[int, int, tuple[int, ...]], ...]) -> int:
    """How many numbers a thread can read at once of all pieces: for each array the bytes of a number, by how many bytes
    it starts after a multiple of 16, and the starts of its pieces in it.
    """
    numbers = [math.gcd(BYTES, at, *(size * start for start in starts)) // size for size, at, starts in arrays]
    return max(1, min(numbers))

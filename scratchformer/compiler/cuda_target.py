"""Loops as CUDA kernels: for CuPy arrays in float16, bfloat16, float32 and float64.

Rows of an array may be apart, if the numbers of each row are neighbours. Results of wide rows begin at multiples of 16
bytes, so that kernels read 16 bytes at once, and products of them are fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cupy
import numpy as np

from ..kernels.cupy_code import BYTES, TYPES, program, real
from ..kernels.cupy_linear import column_sums
from ..kernels.cupy_products import padded
from .cuda_code import BITS, BITS_AT, axes_of, cuda_source, has_step, is_flat, rows_of_sums
from .plan import Plan
from .trees import COLUMN, Array

__all__ = ["CudaTarget"]

BLOCKS = 528  # with sums over rows: 4 for each of the 132 processors of an H200
KINDS = {"integer": "Index", "bool": "bool"}
WIDE = 256  # times 16 bytes: rows of results that are wider begin at multiples of 16 bytes


class CudaTarget:
    xp, kind, source = cupy, cupy.ndarray, staticmethod(cuda_source)
    adds = True

    def contiguous(self, x: Any) -> Any:
        return x if x.ndim > 1 and x.strides[-1] == x.itemsize else cupy.ascontiguousarray(x)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        wide = len(shape) > 1 and shape[-1] * np.dtype(dtype).itemsize >= WIDE * BYTES
        return padded(shape, np.dtype(dtype)) if wide else cupy.empty(shape, dtype)

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        return dtype.name in TYPES

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        wide, text = real(dtype), cache(partial(cuda_source, plan))

        def run(reads: list, numbers: list, writes: list) -> None:
            arrays = [(readable(x, array, dtype), array) for x, array in zip(reads, plan.reads, strict=True)]
            arrays += zip(writes, plan.writes, strict=True)
            sizes = {axis: n for x, a in arrays if a.kind != "bits" for axis, n in zip(a.axes, x.shape, strict=True)}
            blocks, constants = layout(plan, arrays, sizes, dtype)
            totals = [] if rows_of_sums(plan) else [x for x, array in arrays if array.name in plan.sums]
            of_blocks = cupy.empty((blocks, len(totals), sizes.get(COLUMN, 1)), wide)
            parts, arguments = iter(range(len(totals))), []
            for x, array in arrays:
                if array.name in plan.sums and totals:
                    x = of_blocks[0, next(parts)]
                arguments += [x, np.int64(x.strides[-2] // x.itemsize)] if has_step(array, plan) else [x]
            arguments += [*map(wide.type, numbers), *(np.int64(sizes[axis]) for axis in axes_of(plan))]
            names = {dtype: "T", real(dtype): "REAL"} if dtype != real(dtype) else {dtype: "T"}
            types = tuple(type_of(x, array, names) for x, array in arrays)
            run_kernel = kernel(text(types), f"{plan.name}_loops", dtype.name, tuple(constants.items()))
            run_kernel((blocks,), (constants["THREADS"], constants["ROWS"]), tuple(arguments))
            for i in range(0, len(totals), 2):  # two at once
                column_sums(of_blocks[:, i : i + 2].reshape(blocks, -1), *totals[i : i + 2])

        return run


def type_of(x: Any, array: Array, names: dict[np.dtype, str]) -> str:
    """The type of an array's numbers in CUDA."""
    if array.kind == "bits":
        return BITS_AT if isinstance(x, cupy.ndarray) else BITS
    return KINDS.get(array.kind) or names.get(x.dtype) or TYPES[x.dtype.name]


@cache
def kernel(source: str, name: str, dtype: str, constants: tuple[tuple[str, int], ...]) -> Any:
    return cupy.RawKernel(program(source, dtype, **dict(constants)), name, options=("-std=c++17",))


def readable(x: Any, array: Array, dtype: np.dtype) -> Any:
    """An array that loops read, as a kernel takes it: of numbers of its types, without gaps but between rows."""
    if array.kind == "bits":
        return x.start
    if not array.axes and not isinstance(x, cupy.ndarray):
        return cupy.full((), x, real(dtype))
    x = cupy.asarray(x)  # `given` may return an array of another library
    if array.kind == "real" and x.dtype not in (dtype, real(dtype)):
        x = x.astype(real(dtype))
    rows = x[..., 0] if len(array.axes) > 2 and array.axes[-1] == COLUMN else x
    apart = x.strides[-2] if rows is not x else x.itemsize
    if len(array.axes) == 2 and array.axes[-1] == COLUMN:
        return x
    even = all(rows.strides[i] == apart * math.prod(rows.shape[i + 1 :]) for i in range(rows.ndim))
    return x if even else cupy.ascontiguousarray(x)


def layout(
    plan: Plan, arrays: list[tuple[Any, Array]], sizes: dict[str, int], dtype: np.dtype
) -> tuple[int, dict[str, int]]:
    """The blocks of a kernel, and its constants: see `cuda_code`."""
    columns, flat = sizes.get(COLUMN, 1), is_flat(plan)
    V = BYTES // dtype.itemsize
    multiples = [
        (x.itemsize, math.gcd(BYTES, x.data.ptr, 0 if flat else x.strides[-2]))
        for x, array in arrays
        if has_step(array, plan) or (flat and array.kind != "bits")
    ]
    while V > 1 and (columns < 32 * V or any(at < min(BYTES, V * size) for size, at in multiples)):
        V //= 2
    vectors = -(-columns // V)
    others = {*plan.sums, *(array.name for _, array in arrays if array.kind == "bits")}
    there = [x for x, array in arrays if array.axes[-1:] == (COLUMN,) and array.name not in others]
    whole = int(columns % V == 0 and not any(x.data.ptr % min(BYTES, V * x.itemsize) for x in there))
    if flat:
        return -(-vectors // 256), dict(V=V, THREADS=256, ROWS=1, WHOLE=whole)
    THREADS = 32 if vectors <= 128 else 128 if vectors <= 512 else 512
    constants = dict(V=V, THREADS=THREADS, ROWS=4 if THREADS == 32 else 1, WHOLE=whole)
    rows = rows_of_sums(plan) or [axis for axis in plan.axes if axis != COLUMN]
    blocks = -(-math.prod(sizes[axis] for axis in rows) // constants["ROWS"])
    if not plan.sums.keys() & {array.name for array in plan.writes}:
        return blocks, constants
    return blocks if rows_of_sums(plan) else min(blocks, BLOCKS), constants | dict(PER=-(-vectors // THREADS))

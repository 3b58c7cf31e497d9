"""The CUDA kernels in `kernels/cuda`: their compilation, their calls, and the arrays that they take.

A file is compiled once for each type of numbers and each set of constants, such as the width of a row, when a kernel in
it is first called. CuPy keeps the compiled code on disk.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import Array

FOLDER = Path(__file__).parent / "cuda"
TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
BYTES = 16  # that a thread reads at once


def source(file: str, dtype: str, **constants: float | str) -> str:
    """The text of a file in `kernels/cuda` for arrays of `dtype`, with these constants."""
    return program((FOLDER / f"{file}.cu").read_text(encoding="utf-8"), dtype, **constants)


def program(text: str, dtype: str, **constants: float | str) -> str:
    """A text after what all kernels share, for arrays of `dtype`, with these constants."""
    types = {"T": TYPES[dtype], "REAL": "double" if dtype == "float64" else "float"}
    headers = ["#include <cuda_bf16.h>", "#include <cuda_fp16.h>"]
    defined = [f"#define {name} {value}" for name, value in (types | constants).items()]
    return "\n".join([*headers, *defined, (FOLDER / "common.cuh").read_text(encoding="utf-8"), text])


@functools.cache
def kernel(file: str, name: str, dtype: str, **constants: float | str) -> Any:
    """The kernel `name` of a file, for arrays of `dtype`: kernel(grid, block, arguments)."""
    import cupy

    return cupy.RawKernel(source(file, dtype, **constants), name, options=("-std=c++17",))


def real(dtype: np.dtype) -> np.dtype:
    """The type in which sums run: float32 for half precision."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def alike(*arrays: Array) -> bool:
    """Whether all are CuPy arrays on the current GPU, of one type that the kernels know."""
    import cupy

    first, device = arrays[0], cupy.cuda.runtime.getDevice()
    return getattr(getattr(first, "dtype", None), "name", "") in TYPES and all(
        type(x) is cupy.ndarray and x.dtype == first.dtype and x.device.id == device for x in arrays
    )


def contiguous(x: Array) -> Array:
    """x itself if its numbers are in order without gaps, otherwise a copy."""
    import cupy

    return cupy.ascontiguousarray(x)


def vector(dtype: np.dtype, *multiples: int) -> int:
    """How many numbers a thread can read at once, given the addresses, and the bytes from row to row."""
    return max(1, math.gcd(BYTES, *multiples) // dtype.itemsize)


def launch_each(file: str, name: str, arrays: tuple, *arguments: Any, **constants: float | str) -> None:
    """Run a kernel in which each thread has some neighbouring elements of each of these contiguous arrays of one size.
    Its arguments are the arrays, then the given ones, and last the size.
    """
    first, threads = arrays[0], 256
    V = vector(first.dtype, *(x.data.ptr for x in arrays))
    if first.size:
        run = kernel(file, name, first.dtype.name, V=V, **constants)
        run((-(-first.size // (V * threads)),), (threads,), (*arrays, *arguments, np.int64(first.size)))

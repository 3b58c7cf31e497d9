"""Matrix products for compiled code, by NumPy's BLAS, by MKL or by `numba_bfloat16`: see `choice`.

A product of bfloat16 arrays with float32 sums pays on a processor that has instructions for it, if the library uses
them. Elsewhere compiled code widens the arrays to float32 first. Affine maps have code of their own for AMX
(`numba_tiles`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload
from threadpoolctl import threadpool_info

from ..processor import described, instructions
from . import mkl, numba_bfloat16
from .numba_code import compiled
from .numba_math import BITS, read

ROWS, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # the numbers of CBLAS
VARIABLE = "SCRATCHFORMER_PRODUCTS"  # in the environment
LARGE = ctypes.c_int64
FLOAT, POINTER = ctypes.c_float, ctypes.c_void_p
MATRIX = POINTER, LARGE
CBLAS = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 3, *[LARGE] * 3, FLOAT, *MATRIX, *MATRIX, FLOAT, *MATRIX)


class Products(NamedTuple):
    """The addresses of functions c = α a b + β c, as compiled code takes them; 0 for one that is not to be used."""

    float32: int
    float64: int
    bfloat16: int = 0  # arrays of bfloat16, with a float32 result


class Choice(NamedTuple):
    """Which library multiplies matrices of each type."""

    float32: str
    bfloat16: str  # "float32" if the arrays are widened

    def __str__(self) -> str:
        half = "widened to float32" if self.bfloat16 == "float32" else f"by {self.bfloat16}"
        return f"float32 by {self.float32}, bfloat16 {half}"


def choice() -> Choice | None:
    """The rule: float32 by MKL where it is installed, unless the environment names another library. bfloat16 by MKL on
    processors with AMX, which it uses; by our own code on AMD's with AVX512-BF16. On Intel's these instructions are no
    faster than those for float32, to which bfloat16 is widened there and elsewhere. None if there is no library.

    Measured on one thread, in GFLOP/s: an Intel Xeon without AMX has 154 by MKL, 142 by OpenBLAS, and in bfloat16 84 by
    MKL and 79 by our own code; an AMD EPYC (Zen 4) 86 by MKL, also in bfloat16, 91 by OpenBLAS and 152 by our own code.
    """
    offered = libraries()
    if not offered:
        return None
    chosen = os.environ.get(VARIABLE) or next(iter(offered))
    if chosen not in offered:
        raise ValueError(f"{VARIABLE}: expected {' or '.join(offered)}, got {chosen!r}")
    if "AMX" in instructions() and offered[chosen].bfloat16:
        return Choice(chosen, chosen)
    ours = numba_bfloat16.available() and "AMD" in described()
    return Choice(chosen, "Numba" if ours else "float32")


@cache
def products() -> Products | None:
    """The functions of `choice`; None if there is none with 64-bit sizes. Without our own code everything works, so an
    error where it is compiled is a warning.
    """
    if (chosen := choice()) is None:
        return None
    half = libraries()[chosen.float32].bfloat16 if chosen.bfloat16 == chosen.float32 else 0
    if chosen.bfloat16 == "Numba":
        try:
            half = numba_bfloat16.address()
        except Exception as error:  # Numba and LLVM raise many kinds
            warnings.warn(f"our own products of bfloat16 cannot be compiled: {error!r}", stacklevel=2)
    return libraries()[chosen.float32]._replace(bfloat16=half)


@cache
def libraries() -> dict[str, Products]:
    """The libraries that there are, the preferred one first: MKL, and OpenBLAS as NumPy's packages bring it."""
    offered = {}
    if (library := mkl.library()) is not None:
        offered["MKL"] = addresses(library, "cblas_sgemm_64", "cblas_dgemm_64", "cblas_gemm_bf16bf16f32_64")
    for each in threadpool_info():
        if each["internal_api"] == "openblas" and "numpy" in each["filepath"]:
            with contextlib.suppress(AttributeError):
                names = (f"scipy_cblas_{letter}gemm64_" for letter in "sd")
                offered["OpenBLAS"] = addresses(ctypes.CDLL(each["filepath"]), *names)
    return offered


def addresses(library: Any, *names: str) -> Products:
    return Products(*(ctypes.cast(getattr(library, name), POINTER).value or 0 for name in names))


def product(library: Any, a: Any, ta: bool, b: Any, tb: bool, first: int, c: Any) -> None:
    """c = a b in compiled code, with a transposed if `ta`, and b if `tb`. Of b the columns from `first` on are used, as
    many as c has. All are contiguous, and none is empty.
    """


@overload(product, strict=False)
def _product(library: Any, a: Any, ta: Any, b: Any, tb: Any, first: Any, c: Any) -> Any:
    def of_bits(library, a, ta, b, tb, first, c):  # type: ignore[no-untyped-def]
        if library.bfloat16:
            gemm(library.bfloat16, a, ta, b, tb, first, c)
        else:
            gemm(library.float32, widen(a), ta, widen(b), tb, first, c)

    double = a.dtype == numba.float64
    if a.dtype == BITS:
        return of_bits
    return lambda library, a, ta, b, tb, first, c: gemm(
        library.float64 if double else library.float32, a, ta, b, tb, first, c
    )


@compiled
def widen(x: Any) -> Any:
    """A float32 copy of bits."""
    y = np.empty(x.shape, np.float32)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = read(x[i, j])
    return y


@compiled
def gemm(function: Any, a: Any, ta: Any, b: Any, tb: Any, first: Any, c: Any) -> None:
    sizes = c.shape[0], c.shape[1], a.shape[0] if ta else a.shape[1]
    one, zero = c.dtype.type(1), c.dtype.type(0)
    start = b.ctypes.data + b.itemsize * (first * b.shape[1] if tb else first)
    call(function, ta, tb, sizes, one, a.ctypes.data, a.shape[1], start, b.shape[1], zero, c.ctypes.data)


@intrinsic
def call(typing, function, ta, tb, sizes, alpha, a, lda, b, ldb, beta, c):  # type: ignore[no-untyped-def]
    """Call the CBLAS function at an address. ctypes would need the interpreter lock, and a fixed address."""
    del typing

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        function, ta, tb, sizes, alpha, a, lda, b, ldb, beta, c = values
        small, large = ir.IntType(32), ir.IntType(64)
        flags = [builder.select(t, ir.Constant(small, TRANSPOSE), ir.Constant(small, NO_TRANSPOSE)) for t in (ta, tb)]
        m, n, k = (builder.extract_value(sizes, i) for i in range(3))
        arguments = [ir.Constant(small, ROWS), *flags, m, n, k, alpha, a, lda, b, ldb, beta, c, n]
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in arguments])
        assert all(x.type in (small, large, alpha.type) for x in arguments)
        builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return numba.void(function, ta, tb, sizes, alpha, a, lda, b, ldb, beta, c), generate

"""Matrix products for compiled code, by NumPy's BLAS, by MKL or by `numba_bfloat16`: on each machine, by the one
that proves fastest.

A product of bfloat16 arrays with float32 sums pays on a processor that has instructions for it, if the library uses
them. Elsewhere compiled code widens the arrays to float32 first. Affine maps have code of their own for AMX, which is
used without being measured (`numba_tiles`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload
from threadpoolctl import threadpool_info, threadpool_limits

from ..processor import described, instructions
from ..shell.files import append, cache_dir, force_to_disk, make_folder
from . import mkl, numba_bfloat16
from .numba_code import compiled
from .numba_math import BITS, read

ROWS, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # the numbers of CBLAS
SHAPES = ((512, 256, 256, False, False), (512, 1024, 256, False, True), (256, 1024, 512, True, False))
HALF = " in bfloat16"  # after the name of a library, among what was measured
REPEATS = 5
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time  # Windows counts it in steps of 16 ms
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
    """Which library multiplies matrices of each type, and what was measured: GFLOP/s on one thread."""

    float32: str
    bfloat16: str  # "float32" if the arrays are widened
    measured: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in self.measured.items())
        half = "widened to float32" if self.bfloat16 == "float32" else f"by {self.bfloat16}"
        return f"float32 by {self.float32}, bfloat16 {half} (GFLOP/s on one thread: {rates})"


_taken: list[Choice] = []  # of the open blocks of `taking`


@contextlib.contextmanager
def taking(float32: str, bfloat16: str) -> Iterator[None]:
    """Inside this block, products are by these libraries instead of those of `choice`, in the whole process: a run goes
    on with the libraries with which it began. Has no effect if one of them is not here.
    """
    if float32 not in libraries() or bfloat16 not in ("float32", *halves()):
        yield
        return
    _taken.append(Choice(float32, bfloat16, {}))
    products.cache_clear()
    try:
        yield
    finally:
        _taken.pop()
        products.cache_clear()


def used() -> Choice | None:
    """Whose products are used now: see `taking` and `choice`."""
    return _taken[-1] if _taken else choice()


@cache
def products() -> Products | None:
    """The functions of the libraries that `used` names; None if there is none with 64-bit sizes."""
    if (chosen := used()) is None:
        return None
    offered = available() if chosen.bfloat16 == "Numba" else libraries()
    half = offered[chosen.bfloat16].bfloat16 if chosen.bfloat16 in offered else 0
    return offered[chosen.float32]._replace(bfloat16=half)


@cache
def available() -> dict[str, Products]:
    """The libraries, and our own code for bfloat16, which this compiles. Without it everything works, so an error there
    is a warning.
    """
    offered = dict(libraries())
    if numba_bfloat16.available():
        try:
            offered["Numba"] = Products(0, 0, numba_bfloat16.address())
        except Exception as error:  # Numba and LLVM raise many kinds
            warnings.warn(f"our own products of bfloat16 cannot be compiled: {error!r}", stacklevel=2)
    return offered


@cache
def libraries() -> dict[str, Products]:
    """The libraries that there are: MKL, and OpenBLAS as NumPy's packages bring it."""
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


def halves() -> list[str]:
    """The names of those that multiply bfloat16. Nothing is compiled for this."""
    ours = ["Numba"] if numba_bfloat16.available() else []
    return [name for name, library in libraries().items() if library.bfloat16] + ours


@cache
def choice() -> Choice | None:
    """The choice for this processor and these versions. It is measured once, and kept in the cache folder (if it can be
    written), so that a run that is resumed has the same sums. None if there is nothing to choose from.

    Each process that finds no choice adds a line with its own. The first line counts for all, so processes that start
    together agree.
    """
    if not libraries():
        return None
    if (kept := _kept()) is not None:
        return kept
    measured = measure()
    with contextlib.suppress(OSError):
        make_folder(_file().parent)
        line = json.dumps({machine(): measured._asdict()})
        append(_file(), f"\n{line}")  # a full disk may have cut off the line before it
        force_to_disk(_file())
        force_to_disk(_file().parent)
    return _kept() or measured


def _kept() -> Choice | None:
    """The first choice in the cache folder that is for this machine and can be used; None if there is none."""
    try:
        lines = _file().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    here, names = machine(), ["float32", *halves()]
    for line in lines:
        # a damaged line, or one of another machine
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            kept = Choice(**json.loads(line)[here])
            rates = all(isinstance(rate, int | float) for rate in kept.measured.values())
            if rates and kept.float32 in libraries() and kept.bfloat16 in names:
                return kept
    return None


def _file() -> Path:
    return cache_dir() / "matrix_products.jsonl"


def machine() -> str:
    """The processor, the versions of the libraries and of our own code, those that multiply bfloat16, and the settings
    that forbid instructions.
    """
    processor = ", ".join([described() or platform.processor(), *instructions()])
    version = metadata.version("mkl") if mkl.library() is not None else "none"
    code = sha256(Path(numba_bfloat16.__file__).read_bytes()).hexdigest()[:8]
    versions = f"NumPy {np.__version__}; MKL {version}; Numba {numba.__version__}, {code}"
    settings = [f"{name}={os.environ.get(name, '')}" for name in ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS")]
    return "; ".join([processor, versions, f"bfloat16 by {', '.join(halves()) or 'none'}", *settings])


def measure() -> Choice:
    """Time the products of a layer forward and backward on one thread, by each library in turn."""
    functions: dict[str, tuple[int, Any]] = {}
    for name, library in available().items():
        if library.float32:
            functions[name] = library.float32, np.float32
        if library.bfloat16:
            functions[name + HALF] = library.bfloat16, np.uint16
    with threadpool_limits(1, "blas"):
        times = [{name: _seconds(*each) for name, each in functions.items()} for _ in range(1 + REPEATS)]
    work = sum(2 * m * n * k for m, n, k, *_ in SHAPES)
    rates = {name: round(work / min(t[name] for t in times) / 1e9, 1) for name in functions}
    best = max((name for name in rates if not name.endswith(HALF)), key=rates.__getitem__)
    half = max((name for name in rates if name.endswith(HALF)), key=rates.__getitem__, default=best)
    return Choice(best, half.removesuffix(HALF) if rates[half] > rates[best] else "float32", rates)


def _seconds(function: int, dtype: Any) -> float:
    """How long the function at this address takes for the products of SHAPES, not counting other processes."""
    call, total = CBLAS(function), 0.0
    for m, n, k, ta, tb in SHAPES:
        a, b, c = np.zeros((k, m) if ta else (m, k), dtype), np.zeros((n, k) if tb else (k, n), dtype), np.zeros((m, n))
        flags = [TRANSPOSE if t else NO_TRANSPOSE for t in (ta, tb)]
        at = [x.ctypes.data for x in (a, b, c)]
        start = CLOCK()
        call(ROWS, *flags, m, n, k, 1.0, at[0], a.shape[1], at[1], b.shape[1], 0.0, at[2], n)
        total += CLOCK() - start
    return total


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

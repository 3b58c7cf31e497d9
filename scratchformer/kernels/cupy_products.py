"""Matrix products on a GPU by cuBLASLt, from NVIDIA's nvmath-python.

CuPy's own products have no bias or activation, no batches in bfloat16, no float32 result of half-precision factors, and
cannot be part of a CUDA graph. A product has a plan, made once for its shapes, types and strides: cuBLASLt proposes
some of its kernels, in the order of its own estimates, and the fastest is chosen by trying.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np

from ..backend import Array, is_recording

WORKSPACE = 32 << 20  # bytes of scratch memory for the library
PROPOSALS = 16  # kernels of cuBLASLt to choose from, at most
TRIALS = 4  # timed runs of each
FASTER = 0.95  # another kernel must take less than this share of the first one's time
WORTH = 1e8  # operations; a smaller product takes the first kernel, since starting it takes as long as running it
OFTEN = 200  # uses of a plan before its kernels are timed; at once for a step that is recorded
MAX_PLANS = 4096  # plans
KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
FLOAT32, FLOAT64, TF32 = 68, 70, 77  # cublasComputeType
BIAS, RELU_BIAS = 4, 6  # cublasLtEpilogue
LONG = 512  # an axis that is longer, and no multiple of 16 bytes, is cut: the library's fast kernels do not take it


class ReadyProduct(NamedTuple):
    """A product that is ready to run."""

    descriptor: int
    layouts: tuple[int, ...]
    algorithms: np.ndarray  # proposals, or the one that was chosen
    scales: np.ndarray  # 1, 0


@functools.cache
def available() -> bool:
    """Whether nvmath-python and its cuBLASLt can be loaded. If not, says why on stderr, once."""
    try:
        from nvmath.bindings import cublasLt

        cublasLt.get_version()
    except Exception as error:  # not only ImportError: a library may be missing or too old
        print(
            f"nvmath-python cannot be used ({type(error).__name__}: {error}), so matrix products are CuPy's, which are "
            "slower; to install it: pip install 'scratchformer[cuda13]' (or [cuda12])",
            file=sys.stderr,
        )
        return False
    return True


class CublasLt:
    """The library for one GPU. All products use the same scratch memory, so they must be on streams that wait for each
    other, as they do unless a program makes streams of its own.
    """

    def __init__(self) -> None:
        from nvmath.bindings import cublasLt

        self.library: Any = cublasLt
        self.handle = cublasLt.create()
        self.workspace = cupy.cuda.alloc(WORKSPACE)
        self.plans: dict[tuple, ReadyProduct | None] = {}
        self.uses: Counter[tuple] = Counter()
        self.lock = threading.Lock()
        self.preference = cublasLt.matmul_preference_create()
        self._set("matmul_preference", self.preference, 1, WORKSPACE, np.uint64)

    def _set(self, kind: str, which: int, attribute: int, value: int, dtype: Any = np.int32) -> None:
        number = np.array(value, dtype)
        getattr(self.library, f"{kind}_set_attribute")(which, attribute, number.ctypes.data, number.nbytes)

    def run(
        self,
        x: Array,
        y: Array,
        out: Array,
        plus: Array | None,
        bias: Array | None,
        activation: str,
        scales: tuple[float, float],
    ) -> bool:
        """As `attempt`, in one piece."""
        arrays = x, y, out if plus is None else plus, out
        layouts = ((a.dtype, a.shape, a.strides, math.gcd(16, a.data.ptr)) for a in arrays)
        tf32 = x.dtype == np.float32 and _tf32()
        scales = scales if plus is not None else (scales[0], 0.0)
        known = *layouts, tf32, scales, bias is None, activation
        with self.lock:  # a descriptor has one bias
            if known not in self.plans:
                if len(self.plans) >= MAX_PLANS:
                    for each in self.plans.values():
                        self._destroy(each)
                    self.plans.clear()
                    self.uses.clear()
                self.plans[known] = self._plan(arrays, tf32, bias, activation, scales)
            plan = self.plans[known]
            if plan is None:
                return False
            if bias is not None:
                self._set("matmul_desc", plan.descriptor, 8, bias.data.ptr, np.uint64)
            self.uses[known] += 1
            if len(plan.algorithms) > 1 and (is_recording() or self.uses[known] > OFTEN):
                plan = self.plans[known] = self._fastest(plan, arrays)
            try:
                self._call(plan, 0, arrays)
            except self.library.cuBLASLtError:
                self._destroy(plan)
                self.plans[known] = None
                return False
        return True

    def _destroy(self, plan: ReadyProduct | None) -> None:
        if plan is not None:
            self.library.matmul_desc_destroy(plan.descriptor)
            for layout in plan.layouts:
                self.library.matrix_layout_destroy(layout)

    def _call(self, plan: ReadyProduct, choice: int, arrays: tuple[Array, ...]) -> None:
        times, add = plan.scales.ctypes.data, plan.scales.ctypes.data + plan.scales.itemsize
        # cuBLASLt counts by columns, for which a row-major matrix is its transpose: outᵀ = yᵀ xᵀ.
        (of_x, of_y, of_plus, of_out), (x, y, plus, out) = plan.layouts, arrays
        algorithm = plan.algorithms.ctypes.data + choice * plan.algorithms.itemsize
        self.library.matmul(
            self.handle, plan.descriptor, times, y.data.ptr, of_y, x.data.ptr, of_x, add,
            plus.data.ptr, of_plus, out.data.ptr, of_out, algorithm, self.workspace.ptr, WORKSPACE,
            cupy.cuda.get_current_stream().ptr,
        )  # fmt: skip

    def _fastest(self, plan: ReadyProduct, arrays: tuple[Array, ...]) -> ReadyProduct:
        """The plan with the fastest of the kernels that were proposed."""
        (x, y, plus, out), stream = arrays, cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return plan
        if 2 * x.size * y.shape[-1] < WORTH:
            return plan._replace(algorithms=plan.algorithms[:1])
        before, seconds = out.copy() if plan.scales[1] and plus.data.ptr == out.data.ptr else None, []
        for choice in range(len(plan.algorithms)):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            try:
                self._call(plan, choice, arrays)
                start.record(stream)
                for _ in range(TRIALS):
                    self._call(plan, choice, arrays)
                end.record(stream)
                end.synchronize()
                seconds.append(cupy.cuda.get_elapsed_time(start, end))
            except self.library.cuBLASLtError:
                seconds.append(float("inf"))
        if before is not None:
            out[...] = before
        best = int(np.argmin(seconds))
        best = best if seconds[best] < FASTER * seconds[0] else 0
        return plan._replace(algorithms=plan.algorithms[best : best + 1])

    def _plan(
        self, arrays: tuple[Array, ...], tf32: bool, bias: Any, activation: str, scales: tuple[float, float]
    ) -> ReadyProduct | None:
        lt, (x, y, plus, out) = self.library, arrays
        double = out.dtype == np.float64
        descriptor = lt.matmul_desc_create(FLOAT64 if double else TF32 if tf32 else FLOAT32, 1 if double else 0)
        self._set("matmul_desc", descriptor, 3, _is_transposed(y))  # TRANSA
        self._set("matmul_desc", descriptor, 4, _is_transposed(x))  # TRANSB
        if bias is not None:
            self._set("matmul_desc", descriptor, 7, RELU_BIAS if activation else BIAS)  # EPILOGUE
            self._set("matmul_desc", descriptor, 8, bias.data.ptr, np.uint64)  # BIAS_POINTER
        proposals, count = np.zeros(PROPOSALS, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        numbers = np.array(scales, np.float64 if double else np.float32)
        plan = ReadyProduct(descriptor, tuple(map(self._layout, arrays)), proposals["algo"], numbers)
        of_x, of_y, of_plus, of_out = plan.layouts
        for attribute, a in (5, y), (6, x), (7, plus), (8, out):  # MIN_ALIGNMENT_..._BYTES
            self._set("matmul_preference", self.preference, attribute, math.gcd(16, a.data.ptr))
        try:
            lt.matmul_algo_get_heuristic(
                self.handle, descriptor, of_y, of_x, of_plus, of_out, self.preference, PROPOSALS,
                proposals.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError:
            count[0] = 0
        if not count[0]:
            self._destroy(plan)
            return None
        return plan._replace(algorithms=np.ascontiguousarray(plan.algorithms[: count[0]]))

    def _layout(self, x: Array) -> int:
        """Row-major, so by columns, as cuBLASLt counts, the rows of the layout are the columns in memory."""
        rows, columns = x.shape[-2:] if _is_transposed(x) else x.shape[:-3:-1]
        stride = x.strides[-1 if _is_transposed(x) else -2] // x.itemsize
        # An axis of length 1 may have any stride.
        layout = self.library.matrix_layout_create(KINDS[x.dtype.name], rows, columns, max(stride, rows))
        if x.ndim == 3 and len(x) > 1:
            self._set("matrix_layout", layout, 5, len(x))
            self._set("matrix_layout", layout, 6, x.strides[0] // x.itemsize, np.int64)
        return layout


def _is_transposed(x: Array) -> bool:
    return x.strides[-1] != x.itemsize and x.shape[-1] > 1


def fits(x: Array) -> bool:
    """Whether `CublasLt` can read the matrices of x without a copy: neighbours along one of the last two axes, and rows
    along it that do not overlap, as they do in a broadcast array.
    """
    size, (rows, columns), (down, right) = x.itemsize, x.shape[-2:], x.strides[-2:]
    if columns == 1 or right == size:
        apart, width, count = down, columns, rows
    elif rows == 1 or down == size:
        apart, width, count = right, rows, columns
    else:
        return False
    return apart % size == 0 and apart >= (width * size if count > 1 else 0)


def readable(x: Array) -> Array:
    """x itself if `fits(x)`, otherwise a copy."""
    return x if fits(x) else cupy.ascontiguousarray(x)


def _tf32() -> bool:
    """Whether the factors of float32 products may be rounded to TF32: what `backend.tf32` has set."""
    from cupy._core import _routines_linalg as setting

    return setting.get_compute_type(np.float32) == setting.COMPUTE_TYPE_TF32


@functools.cache
def _products(device: int) -> CublasLt:
    return CublasLt()


def product(
    x: Array, y: Array, out: Array, plus: Array | None = None, scales: tuple[float, float] = (1.0, 1.0)
) -> Array:
    """s x y + t plus, where `scales` are s and t, as `attempt`. Raises RuntimeError if cuBLASLt has no kernel."""
    if not attempt(x, y, out, plus, scales=scales):
        raise RuntimeError(
            f"cuBLASLt has no product of {x.dtype} {x.shape} and {y.shape}: SCRATCHFORMER_FAST=0 in the environment "
            "leaves all products to CuPy, which has none of batches in bfloat16"
        )
    return out


def attempt(
    x: Array,
    y: Array,
    out: Array,
    plus: Array | None = None,
    bias: Array | None = None,
    activation: str = "",
    scales: tuple[float, float] = (1.0, 1.0),
) -> bool:
    """out = s x y + t plus + bias, or ReLU of it, where `scales` are s and t. False if cuBLASLt has no kernel for it;
    `out` may then be partly written.

    x: (..., N, K), y: (..., K, M), out: (..., N, M), each with at most one leading axis, and with neighbours in memory
    along one of the last two axes; out along its last. plus: an array like out, or out itself. bias: (M,), from
    `aligned`. activation: "relu" or "". A long axis whose size is no multiple of 16 bytes, such as a vocabulary, is cut
    into a multiple and the rest.
    """
    step, (N, K), M = 16 // x.itemsize, x.shape[-2:], y.shape[-1]

    def of(a: Array | None, *part: slice) -> Array | None:
        return None if a is None else a[..., *part]

    if M > LONG and M % step:
        return all(
            attempt(x, y[..., part], out[..., part], of(plus, part), of(bias, part), activation, scales)
            for part in _cut(M, step)
        )
    if N > LONG and N % step and x.strides[-1] != x.itemsize:
        return all(
            attempt(x[..., part, :], y, out[..., part, :], of(plus, part, slice(None)), bias, activation, scales)
            for part in _cut(N, step)
        )
    if K > LONG and K % step and bias is None:
        first, rest = _cut(K, step)
        return attempt(x[..., first], y[..., first, :], out, plus, scales=scales) and attempt(
            x[..., rest], y[..., rest, :], out, out, scales=(scales[0], 1.0)
        )
    return _products(cupy.cuda.runtime.getDevice()).run(x, y, out, plus, bias, activation, scales)


def _cut(size: int, step: int) -> tuple[slice, slice]:
    return slice(0, size // step * step), slice(size // step * step, size)


def aligned(bias: Array | None) -> Array | None:
    """The bias (M,) itself if it is contiguous and starts at a multiple of 16 bytes, as kernels may expect, otherwise a
    copy.
    """
    if bias is None or (bias.flags.c_contiguous and bias.data.ptr % 16 == 0):
        return bias
    return bias.copy()


def padded(shape: tuple[int, ...], dtype: np.dtype, make: Callable = cupy.empty) -> Array:
    """Room for matrices whose rows start at multiples of 16 bytes; without that, products are slow."""
    step = 16 // dtype.itemsize
    return make((*shape[:-1], -(-shape[-1] // step) * step), dtype)[..., : shape[-1]]

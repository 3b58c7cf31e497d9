"""The emulator of CUDA runs any source: here a kernel that sums rows, with a block for each."""

import shutil
import sys

import numpy as np
import pytest

from .on_cpu.emulator import Kernel

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads take turns with the ucontext of Linux"),
]
TYPES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
ROW_SUMS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __device__ void row_sums_of(const T* x, float* y, long N, int C) {
    __shared__ float sums[32];
    for (long n = blockIdx.x; n < N; n += gridDim.x) {
        float sum = 0;
        for (int c = threadIdx.x; c < C; c += blockDim.x) sum += (float)x[n * C + c];
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
        for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
        if (threadIdx.x == 0) y[n] = sum;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(64) row_sums(const TYPE* x, float* y, TYPE* rounded, long N, int C) {
    row_sums_of(x, y, N, C);
    for (long n = blockIdx.x; n < N; n += gridDim.x)
        if (threadIdx.x == 0) rounded[n] = (TYPE)y[n];
}
"""


def row_sums(x, source=ROW_SUMS):
    name = x.dtype.name
    y, rounded = np.empty(len(x), np.float32), np.empty(len(x), x.dtype)
    kernel = Kernel(source.replace("TYPE", TYPES[name]), "row_sums")
    kernel((3,), (64,), (x, y, rounded, np.int64(len(x)), np.int32(x.shape[1])))
    return y, rounded


@pytest.mark.parametrize("dtype", TYPES)
def test_row_sums(dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    x = np.random.default_rng(0).standard_normal((7, 150)).astype(dtype)
    x[3, 5], x[4, 5] = np.inf, np.nan
    y, rounded = row_sums(x)
    np.testing.assert_allclose(y, x.astype(np.float64).sum(axis=1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(rounded.astype(np.float64), y.astype(dtype).astype(np.float64))


def test_arguments_of_other_types_are_refused():
    kernel = Kernel(ROW_SUMS.replace("TYPE", "float"), "row_sums")
    x, y = np.zeros((2, 3), np.float32), np.zeros(2)
    with pytest.raises(TypeError, match=r"row_sums: expected \*f4 \*f4 \*f4 i8 i4 , got \*f4 \*f8 \*f4 i8 i8"):
        kernel((1,), (32,), (x, y, x, np.int64(2), 3))


def test_threads_that_wait_for_ever():
    source = ROW_SUMS.replace("__syncthreads();", "if (threadIdx.x) __shfl_xor_sync(1, 0, 1); else __syncthreads();", 1)
    with pytest.raises(AssertionError, match="the threads of row_sums wait for each other"):
        row_sums(np.zeros((2, 3), np.float32), source)

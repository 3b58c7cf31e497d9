"""The work on the flat arrays that is done once a step, on a GPU: norm, clipping, Adam and rounding, a kernel each."""

from __future__ import annotations

import math

import cupy
import numpy as np

from ..backend import Array
from ..ops import precision
from ..optim import adam, clip
from .cupy_code import alike, kernel, launch_each, vector

BLOCKS = 1056  # that sum squares


def real_numbers(*arrays: Array) -> bool:
    """Whether all are contiguous CuPy arrays of float32, or all of float64."""
    return alike(*arrays) and arrays[0].itemsize >= 4 and all(x.flags.c_contiguous and x.size for x in arrays)


@adam.adam_step.twin(cupy.ndarray, fast=True)
def adam_step(
    w: Array, g: Array, m: Array, v: Array, lr: float, beta1: float, beta2: float, eps: float, steps: int
) -> None:
    """As `optim.adam.adam_step`, in one kernel.

    For each weight i, with m0, v0 and w0 for the values before the step, and t for `steps`, as in `Adam`:

        t := steps
        m_i = β1 m0_i + (1 − β1) g_i        v_i = β2 v0_i + (1 − β2) g_i²
        m̂_i = m_i/(1 − β1^t)                v̂_i = v_i/(1 − β2^t)
        w_i = w0_i − lr m̂_i/(√v̂_i + eps)

    What does not depend on i is computed on the host, in float64: in float32, 1 − 0.999 is wrong in the fifth digit.

        rest1 := 1 − β1        rest2 := 1 − β2        rate := lr/(1 − β1^t)        root := 1/√(1 − β2^t)
        m_i = β1 m0_i + rest1 g_i        v_i = β2 v0_i + rest2 g_i²        w_i = w0_i − rate m_i/(root √v_i + eps)
    """
    if not real_numbers(w, g, m, v):
        return adam.adam_step.reference(w, g, m, v, lr, beta1, beta2, eps, steps)
    rate, root = lr / (1 - beta1**steps), 1 / math.sqrt(1 - beta2**steps)
    numbers = beta1, beta2, 1 - beta1, 1 - beta2, eps, rate, root
    launch_each("optimizer", "adam", (w, g, m, v), *map(w.dtype.type, numbers))
    return None


@clip.sum_of_squares.twin(cupy.ndarray, fast=True)
def sum_of_squares(x: Array) -> Array:
    """As `optim.clip.sum_of_squares`, without a float64 copy of x."""
    if not real_numbers(x):
        return clip.sum_of_squares.reference(x)
    V, sums = vector(x.dtype, x.data.ptr), cupy.empty(min(BLOCKS, -(-x.size // 256)), np.float64)
    kernel("optimizer", "squares", x.dtype.name, V=V)((sums.size,), (256,), (x, sums, np.int64(x.size)))
    return sums.sum()


@clip.scale.twin(cupy.ndarray, fast=True)
def scale(x: Array, share: Array) -> None:
    """As `optim.clip.scale`; if the share is 1, nothing is read or written."""
    if not real_numbers(x):
        return clip.scale.reference(x, share)
    launch_each("optimizer", "scale", (x,), cupy.asarray(share, np.float64))
    return None


@precision.round_into.twin(cupy.ndarray, fast=True)
def round_into(x: Array, out: Array) -> None:
    """As `ops.precision.round_into`, from float32 to half precision:

        out_i = x_i

    rounded to the nearest number of the type of `out`.
    """
    half = out.dtype.name in ("float16", "bfloat16")
    contiguous = x.flags.c_contiguous and out.flags.c_contiguous
    if not (half and x.dtype == np.float32 and x.size and x.shape == out.shape and contiguous):
        return precision.round_into.reference(x, out)
    V = 4 if x.data.ptr % 16 == 0 and out.data.ptr % 8 == 0 else 1
    run = kernel("round", "round_into", out.dtype.name, V=V)
    run((-(-x.size // (V * 256)),), (256,), (x, out, np.int64(x.size)))
    return None

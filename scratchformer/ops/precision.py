"""Half precision is for storage, not for sums: reductions of float16 and bfloat16 data run in float32."""

from __future__ import annotations

import numpy as np

from ..backend import Array
from ..dispatch import operation


def widen(x: Array) -> Array:
    """`x` itself, or a float32 copy if `x` is float16 or bfloat16."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


@operation
def round_into(x: Array, out: Array) -> None:
    """Write x (P,), such as a model's float32 weights, to `out` (P,), which may be in half precision.

    For each number i, with the values of `out` afterwards,

        out_i = x_i

    rounded to the nearest number of the type of `out`.
    """
    out[...] = x

"""Half precision is for storage, not for sums: reductions of float16 and bfloat16 data run in float32."""

from __future__ import annotations

import numpy as np

from ..backend import Array


def widen(x: Array) -> Array:
    """`x` itself, or a float32 copy if `x` is float16 or bfloat16."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x

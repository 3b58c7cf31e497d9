"""Rounding to half precision, and the type bfloat16."""

from __future__ import annotations

import numpy as np

from ..backend import CPU, Array, Device
from ..dispatch import operation


def bfloat16(device: Device) -> np.dtype:
    """The type bfloat16. Raises ImportError if the package that defines it for NumPy is missing."""
    try:
        import ml_dtypes
    except ImportError as error:
        extra = "'scratchformer[fast]'" if device is CPU else "'scratchformer[cuda13]' (or [cuda12])"
        raise ImportError(f"bfloat16 needs the package ml_dtypes: pip install {extra}") from error
    return np.dtype(ml_dtypes.bfloat16)


@operation
def round_into(x: Array, out: Array) -> None:
    """Write x (P,), such as a model's float32 weights, to `out` (P,), which may be in half precision.

    For each number i, with the values of `out` afterwards,

        out_i = x_i

    rounded to the nearest number of the type of `out`.
    """
    out[...] = x

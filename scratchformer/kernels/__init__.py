"""Fast twins of the operations. Importing this package registers them; without it everything works, but slower.

The twins named `numpy_...` need only NumPy. Those named `numba_...` and `mkl_...` need the extra `fast`, and are
registered when `dispatch.fast()` is first entered.
"""

import os
from importlib import import_module
from importlib.util import find_spec

from ..dispatch import when_fast
from . import (
    numpy_adam,
    numpy_attention,
    numpy_cross_entropy,
    numpy_dense,
    numpy_dropout,
    numpy_embedding,
    numpy_extend,
    numpy_layernorm,
    numpy_relative,
    numpy_rmsnorm,
    numpy_swiglu,
)

__all__ = [
    "numpy_adam",
    "numpy_attention",
    "numpy_cross_entropy",
    "numpy_dense",
    "numpy_dropout",
    "numpy_embedding",
    "numpy_extend",
    "numpy_layernorm",
    "numpy_relative",
    "numpy_rmsnorm",
    "numpy_swiglu",
]

FAST: tuple[str, ...] = ("numba_attention",)  # the modules of the extra `fast`


def load_fast() -> None:
    """Import the modules that register fast twins, unless Numba is missing or SCRATCHFORMER_FAST is 0."""
    if find_spec("numba") and os.environ.get("SCRATCHFORMER_FAST") != "0":
        for name in FAST:
            import_module(f"{__name__}.{name}")


when_fast(load_fast)

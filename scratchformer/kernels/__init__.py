"""Fast implementations of operations, written by hand, each registered as a twin by the module that has it.

The modules named `numpy_...` need only NumPy, and importing this package registers their twins. Those named `numba_...`
and `mkl_...` need the extra `fast`. Those named `cupy_...` are for a GPU, and those of them with matrix products need
nvmath-python, which the extras `cuda12` and `cuda13` bring. `scratchformer.fast_twins` says when they are imported.
"""

from . import numpy_attention, numpy_extend, numpy_half, numpy_relative

__all__ = ["numpy_attention", "numpy_extend", "numpy_half", "numpy_relative"]

"""Fast twins of the operations. Importing this package registers them; without it everything works, but slower.

The modules named `numpy_...` need only NumPy. Those named `numba_...` and `mkl_...` need the extra `fast`; their twins
are registered when `dispatch.fast()` is first entered. The twins in those named `cupy_...` are for a GPU: they are
registered when one is chosen, and run inside `dispatch.fast()`. Those with matrix products need nvmath-python, which
the extras `cuda12` and `cuda13` bring. With the last two sets, twins that `compiler` makes from derivations are
registered too.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec

from ..backend import when_gpu
from ..dispatch import turned_off, when_fast
from . import numpy_attention, numpy_extend, numpy_half, numpy_relative

__all__ = ["numpy_attention", "numpy_extend", "numpy_half", "numpy_relative"]

FAST = (  # the modules of the extra `fast`
    "numba_attention",
    "numba_extend",
    "numba_linear",
    "mkl_muon",
)

CUDA = (  # the modules for a GPU
    "cupy_adam",
    "cupy_attention",
    "cupy_embedding",
    "cupy_half",
    "cupy_linear",
    "cupy_muon",
)


def load_fast() -> None:
    """Import the modules that register fast twins, unless Numba is missing or the environment turns them off."""
    if not find_spec("numba") or turned_off():
        return
    try:
        import_module(f"{__name__}.mkl_products").products()  # first: if it fails, no twin that needs it is registered
        for name in FAST:
            import_module(f"{__name__}.{name}")
        from ..compiler import add_all
        from ..compiler.numba_target import NumbaTarget

        add_all(NumbaTarget())
    except ImportError as error:  # such as a Numba that is too old for this NumPy
        warnings.warn(f"the fast twins do not run: {error}", stacklevel=2)


def load_cuda() -> None:
    """Import the modules that register twins for CuPy, unless the environment turns them off."""
    if turned_off().startswith("SCRATCHFORMER_FAST"):
        return
    from ..compiler import add_all
    from ..compiler.cuda_target import CudaTarget

    add_all(CudaTarget())  # first, since twins that are registered later are tried before these
    for name in CUDA:
        import_module(f"{__name__}.{name}")


when_fast(load_fast)
when_gpu(load_cuda)

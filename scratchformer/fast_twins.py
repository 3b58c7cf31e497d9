"""The fast twins of all operations: when those of `kernels` are imported, and the loops of `compiler` are made.

Twins of the extra `fast` are registered when a block of `dispatch.fast()` is first entered, and those for a GPU when a
GPU is chosen. They run inside `dispatch.fast()`. Without this module and `kernels` everything works, but slower.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec

from . import kernels
from .backend import when_gpu
from .compiler import add_all
from .dispatch import turned_off, when_fast

KERNELS = kernels.__name__
FAST = (  # the modules of the extra `fast`
    "numba_attention",
    "numba_extend",
    "numba_linear",
    "numba_portable",
    "mkl_muon",
)

CUDA = (  # the modules for a GPU
    "cupy_adam",
    "cupy_attention",
    "cupy_embedding",
    "cupy_extend",
    "cupy_linear",
    "cupy_muon",
    "cupy_relative",
)


def load_fast() -> None:
    """Import the modules that register fast twins, unless Numba is missing or the environment turns them off."""
    if not find_spec("numba") or turned_off():
        return
    try:
        import_module(f"{KERNELS}.mkl_products").products()  # first: if it fails, no twin that needs it is registered
        for name in FAST:
            import_module(f"{KERNELS}.{name}")
        from .compiler.numba_target import NumbaTarget

        add_all(NumbaTarget())
    except Exception as error:  # Numba is too old for this NumPy, or cannot read a .numba_config.yaml in this folder
        warnings.warn(f"the fast twins do not run: {error}", stacklevel=2)


def load_cuda() -> None:
    """Import the modules that register twins for CuPy, unless the environment turns them off."""
    if turned_off().startswith("SCRATCHFORMER_FAST"):
        return
    from .compiler.cuda_pieces import add_pieces
    from .compiler.cuda_target import CudaTarget

    add_pieces()
    add_all(CudaTarget())  # first, since twins that are registered later are tried before these
    for name in CUDA:
        import_module(f"{KERNELS}.{name}")


when_fast(load_fast)
when_gpu(load_cuda)

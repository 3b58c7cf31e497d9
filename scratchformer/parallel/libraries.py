"""The libraries on which the bits of a run depend besides its settings.

Two libraries for matrix products add in different orders, and so do the loops of one library for different processors.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_info

from .. import ops
from ..dispatch import is_fast, twins_of


def libraries() -> str:
    """One line that names the libraries with which the CPU computes at present, and the processor for which they do."""
    of_numpy = [each for each in threadpool_info() if each["user_api"] == "blas" and "numpy" in each["filepath"]]
    blas = " and ".join(f"{each['internal_api']} {each['version']} {each.get('architecture')}" for each in of_numpy)
    line = f"NumPy {np.__version__} with {blas or 'another BLAS'}"
    if not (is_fast() and twins_of(ops.linear, fast=True)):
        return f"{line}; fast twins off"
    from importlib import metadata  # here, since it takes as long to import as half of the package

    import llvmlite.binding
    import numba

    from ..kernels import mkl_products

    processor = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    products = str(mkl_products.choice())
    if "MKL" in products:
        products += f" (MKL {metadata.version('mkl')})"
    return f"{line}; fast twins by Numba {numba.__version__} for {processor}; {products}"

"""Intel's MKL, from the package `mkl`: the functions for matrix products, called through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from typing import Any

AUTOMATIC = 2  # of MKL's "conditional numerical reproducibility": the same bits in every run, on one processor
SEQUENTIAL = 1  # MKL's number for no threads


@cache
def library() -> Any:
    """MKL as a ctypes library; None if the package `mkl` is not installed or cannot be loaded.

    It runs in the thread that calls it, since every replica is a thread. (With OpenMP it would call the scheduler a
    million times a step, although each replica has only one thread.)
    """
    try:
        path = next(
            f for f in files("mkl") or () if f.name.startswith(("libmkl_rt.", "mkl_rt.")) and f.suffix != ".lib"
        )
        mkl = ctypes.CDLL(str(path.locate()))
        mkl.MKL_Set_Threading_Layer(SEQUENTIAL)
        mkl.MKL_CBWR_Set(AUTOMATIC)  # before the first product; otherwise sums may depend on where arrays lie
    except (PackageNotFoundError, StopIteration, OSError):
        return None
    return mkl

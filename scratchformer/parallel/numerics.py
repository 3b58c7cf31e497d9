"""The record of what the bits of a run depend on besides its settings: libraries, versions, the kind of processor.

Two libraries for matrix products add in different orders, and so do the loops of one library for different processors.
So the record of `numerics` is in each snapshot. All ranks must have the same one, and a run that is resumed says so if
it has changed. A library for products is chosen by its speed, so the choice may change; a resumed run keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from .. import ops
from ..dispatch import is_fast, twins_of
from ..portable import DEFINITION
from ..processor import instructions
from ..shell.text import shown

PRODUCTS, HALF = "library for products", "library for products of bfloat16"
SETTINGS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_L2_SIZE")  # in the environment


def numerics(precision: str = "float32", portable: bool = False) -> dict[str, str]:
    """What the bits of a computation on the CPU depend on at present, each by the name that is used in messages.
    Portable bits depend on their definition alone.
    """
    if portable:
        return {"bits": f"portable, definition {DEFINITION}"}
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    record = {
        "NumPy": f"{np.__version__} with {_blas()}",
        "kind of processor": ", ".join([*simd, *instructions()]),
        "setting of the fast twins": "off",
    }
    if settings := [f"{name}={value}" for name in SETTINGS if (value := os.environ.get(name))]:
        record["setting of the libraries"] = ", ".join(settings)
    if not (is_fast() and twins_of(ops.linear, fast=True)):
        return record
    import llvmlite.binding
    import numba

    from ..kernels import mkl_products

    processor = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    record["setting of the fast twins"] = f"on, by Numba {numba.__version__} for {processor}"
    if (used := mkl_products.used()) is not None:
        record[PRODUCTS] = _library(used.float32)
        if precision == "bfloat16":
            record[HALF] = _library(used.bfloat16)
    return record


def with_libraries_of(record: Mapping[str, str]) -> AbstractContextManager:
    """Inside this block, matrix products are by the libraries of this record, if these are installed."""
    if PRODUCTS not in record or not (is_fast() and twins_of(ops.linear, fast=True)):
        return nullcontext()
    from ..kernels import mkl_products

    half = record[HALF] if HALF in record else getattr(mkl_products.used(), "bfloat16", "float32")
    return mkl_products.taking(*(library.partition(" ")[0] for library in (record[PRODUCTS], half)))


def is_record(value: Any) -> bool:
    """Whether `value`, of a snapshot, is a record of `numerics`. Snapshots of earlier versions have none."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two records, for a message."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name}: {shown(before.get(name))} before, {shown(now.get(name))} now" for name in names)


def _library(name: str) -> str:
    """The name of a library for products, and for MKL its version. (NumPy's BLAS is part of another entry.)"""
    from importlib import metadata  # here, since it takes as long to import as half of the package

    return f"MKL {metadata.version('mkl')}" if name == "MKL" else name


def _blas() -> str:
    """The library for products of NumPy itself, which is loaded with it, and the processor for which it computes."""
    libraries = [each for each in threadpool_info() if each["user_api"] == "blas"]
    of_numpy = [each for each in libraries if "numpy" in each["filepath"]] or libraries
    return ", ".join(
        f"{each['internal_api']} {each['version']} {each.get('architecture', '')}".strip() for each in of_numpy[:1]
    )

"""Compilation by Numba for the fast twins, and bfloat16 as 16-bit integers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

config: Any = numba.config
config._config_fname = os.devnull  # in place of .numba_config.yaml in the current folder, which may be a stranger's
config.reload_config()

IMPORT = re.compile(r"^from \.\.([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)  # from another folder of the package
CONSTANT = re.compile(r"\b[A-Z][A-Z_\d]+\b")


def has(feature: str) -> bool:
    """Whether compiled code may use this feature of the processor, by LLVM's name; NUMBA_CPU_FEATURES can forbid it.

    Of several mentions, as in "+avx2,-avx2", the last one counts.
    """
    known = config.CPU_FEATURES
    if known is None:
        known = "" if config.CPU_NAME else llvmlite.binding.get_host_cpu_features().flatten()
    mentions = [each for each in known.split(",") if each[1:] == feature]
    return mentions[-1:] == [f"+{feature}"]


class Wide(Lower):
    """The translation of a function for LLVM, which may then use whole vector registers of 512 bits, and not just half
    of them, as it prefers on some processors.
    """

    def setup_function(self, fndesc: Any) -> None:
        super().setup_function(fndesc)
        set.add(self.function.attributes, '"prefer-vector-width"="512"')  # llvmlite's own `add` does not know it


@register_pass(mutates_CFG=True, analysis_only=False)
class WideLowering(NativeLowering):
    lowering_class = Wide


class WideCompiler(Compiler):
    """How Numba compiles functions of this package. What it compiles for others stays as it was.

    Says once that functions are being compiled, which takes some seconds.
    """

    said = False

    def define_pipelines(self) -> list:
        if not WideCompiler.said:
            WideCompiler.said = True
            print("compiling the fast twins, once on this machine", file=sys.stderr, flush=True)
        pipelines = super().define_pipelines()
        for each in pipelines:
            each.passes = [(WideLowering if kind is NativeLowering else kind, name) for kind, name in each.passes]
        return pipelines


def compiled(function: Callable, fastmath: Collection[str] = ("contract",), inline: bool = False) -> Any:
    """`function`, compiled when it is first called, without the interpreter lock; the code is kept on disk.

    fastmath: what LLVM may do that changes how a result is rounded. By default only a product and a sum may become one
    instruction, which rounds once. Nothing is reordered: (z − m) − log Z must not become z − (m + log Z), in which a
    large m rounds off log Z. Sums that may be reordered are written with `plus`.
    inline: whether its code is copied to where it is called, where more is known about its arguments.
    """
    options: dict[str, Any] = dict(nogil=True, fastmath=set(fastmath), error_model="numpy", forceinline=inline)
    options["pipeline_class"] = WideCompiler
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
        on_disk = dispatcher._cache._cache_file
        on_disk._source_stamp = sources()
        on_disk._load_index = partial(load_index, on_disk._load_index)
    except (RuntimeError, AttributeError):  # Numba finds no folder to write to, or has changed
        return numba.njit(**options)(function)
    return dispatcher


def load_index(load: Callable[[], dict]) -> dict:
    """Numba's index of the code on disk; empty if it names a class that has since moved, so that it is made again."""
    try:
        return load()
    except (AttributeError, ImportError):
        return {}


@cache
def sources() -> str:
    """A checksum of the modules that compiled code is made from: compiled code includes that of the functions which it
    calls, and constants, but Numba itself notices changes only in a function's own file.
    """
    return sha256(b"".join(file.read_bytes() for file in source_files())).hexdigest()


def source_files() -> list[Path]:
    """All modules of this folder, all others called numba_*, those from which they take constants, and `portable`,
    whose functions are compiled, with `backend`, from which it takes constants.
    """
    folder = Path(__file__).parent
    files = {*folder.glob("*.py"), *folder.parent.rglob("numba_*.py")}
    files |= {folder.parent / "portable.py", folder.parent / "backend.py"}
    for file in list(files):
        for module, names in IMPORT.findall(file.read_text(encoding="utf-8")):
            if CONSTANT.search(names):
                files.add(folder.parent / f"{module.replace('.', '/')}.py")
    return sorted(files)


def as_bits(x: np.ndarray) -> np.ndarray:
    """x as compiled code takes it: bfloat16 as its 16 bits in unsigned integers, a view; any other array itself."""
    return x.view(np.uint16) if x.dtype.kind == "V" else x


@partial(compiled, fastmath=("reassoc", "nsz", "contract"), inline=True)
def plus(total: Any, x: Any) -> Any:
    """total + x, in an order that LLVM may choose if x is added in a loop: then the loop runs in vectors.

    The permission belongs to this one addition. What x is computed from is not reordered.
    """
    return total + x


@compiled
def widened(bits: Any) -> Any:
    """The float32 that a bfloat16, given as its 16 bits, stands for: the upper half of the float32's bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def rounded(x: Any) -> Any:
    """The 16 bits of the bfloat16 that is nearest to the float32 x; of two, the one whose last bit is 0.

    Adding 0x7FFF to the lower half, or 0x8000 if the bit above it is 1, carries into the upper half exactly if that has
    to be rounded up. NaN gets a bit instead, so that it does not become infinity. The choice is made between 32-bit
    numbers, since a loop takes three times as long with 16-bit ones.
    """
    bits = np.float32(x).view(np.uint32)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(np.uint32(np.uint32(bits | np.uint32(0x400000)) if x != x else nearest) >> np.uint32(16))

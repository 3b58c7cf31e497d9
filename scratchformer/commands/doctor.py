"""The facts that a bug report needs: versions, BLAS, GPU, memory, the data cache, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from packaging.requirements import Requirement
from threadpoolctl import threadpool_info

from .. import processor
from ..backend import DeviceError, cores, get_device, gpus
from ..dispatch import turned_off
from ..shell.files import cache_dir
from ..version import __version__

if TYPE_CHECKING:
    from ..kernels.mkl_products import Choice

IN_HARDWARE = "--precision bfloat16, which this processor multiplies in hardware"


def report() -> Iterator[tuple[str, str]]:
    """Pairs (subject, finding)."""
    yield "scratchformer", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "NumPy", np.__version__
    for library in threadpool_info():
        if library["user_api"] == "blas":
            name = f"{library['internal_api']} {library['version']} ({library.get('architecture', 'unknown')})"
            yield "BLAS", f"{name}, {library['num_threads']} threads, {library['filepath'].rpartition('/')[2]}"
    if kind := os.environ.get("OPENBLAS_CORETYPE"):
        yield "", f"OPENBLAS_CORETYPE={kind} is set, so OpenBLAS does not choose its kernels by the CPU"
    yield from _processor()
    yield "free memory", _free_memory()
    yield "MPI", _mpi()
    yield from _gpu()
    folder = cache_dir()
    held = [p.name for p in sorted(folder.iterdir(), key=str)] if folder.is_dir() else []
    yield "data cache", f"{folder} (holds {', '.join(held) or 'nothing yet'})"
    yield from _packages()


def _processor(root: Path = processor.ROOT, allowed: Collection[int] | None = None) -> Iterator[tuple[str, str]]:
    """The CPU, how much of it this process may use, and what the extra `fast` would add."""
    name, instructions = processor.described(root) or platform.machine(), processor.instructions(root)
    try:
        counts = processor.processors(root, allowed)
    except ValueError as error:
        yield "CPU", f"{name}; the system's files cannot be read ({error}): {cores()} replicas by default"
    else:
        yield "CPU", f"{name}: {counts.logical} logical processors on {counts.physical} cores"
        limit = "no CPU limit" if math.isinf(counts.quota) else f"a limit of {counts.quota:g} CPUs (cgroup quota)"
        allowed_here = f"may run on {counts.allowed} of them (affinity), on {counts.separate} cores, with {limit}"
        yield "", f"this process {allowed_here}: {counts.useful} replicas by default"
    yield "instructions", ", ".join(instructions) or f"none of {', '.join(processor.INSTRUCTIONS.values())}"
    choice, products = _products()
    yield "fast", _fast(instructions, choice)
    if products:
        yield "products", products


TILES = "; affine maps in bfloat16 by our own code for AMX"


def _products() -> tuple[Choice | None, str]:
    """How the extra `fast` multiplies matrices, and the finding about it; empty without the extra."""
    if not find_spec("numba") or turned_off():
        return None, ""
    from ..kernels import mkl_products, numba_tiles

    choice = mkl_products.choice()
    tiles = choice is not None and numba_tiles.available()
    return choice, str(choice or "by NumPy") + TILES * tiles


def _fast(instructions: Collection[str], choice: Choice | None) -> str:
    """What the extra `fast` does, with this choice of products, or would do on a processor with these instructions."""
    unit = next((unit for unit in processor.BFLOAT16 if unit in instructions), None)
    packages = [package for package, extras in _requirements().items() if "fast" in extras]
    if missing := [package for package in packages or ["numba"] if not _version(package)]:
        gain = f" and {IN_HARDWARE} ({unit})" if unit else ""
        return f"{', '.join(missing)} not installed; for faster kernels{gain}: pip install 'scratchformer[fast]'"
    if setting := turned_off():
        return f"installed, but {setting} turns it off"
    if choice is None or choice.bfloat16 == "float32":
        return "installed; bfloat16 would be slower than float32 on this processor"
    used = "AVX512-BF16" if choice.bfloat16 == "Numba" else unit or choice.bfloat16
    return f"installed; use {IN_HARDWARE} ({used})"


def _mpi() -> str:
    """mpi4py, and the launcher of its MPI."""
    if not (version := _version("mpi4py")):
        return "mpi4py not installed; to train with several processes: pip install 'scratchformer[distributed]'"
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec") or "no mpiexec found"
    return f"mpi4py {version}, {launcher}"


_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_KERNELS = ("nvmath-python", "nvidia-cudnn-frontend")  # with CuPy, for the fast kernels
_OF_EXTRAS = (*_CUPY, *_KERNELS, "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")  # of cuda12 and cuda13


def _packages() -> Iterator[tuple[str, str]]:
    """The version of every package that this one requires here, or the extras that install it."""
    packages = _requirements()
    if not packages:
        yield "packages", "unknown, since scratchformer is not installed"
    for package, extras in packages.items():
        if package in ("numpy", *_OF_EXTRAS):  # these have lines of their own
            continue
        ways = " or ".join(f"pip install 'scratchformer[{name}]'" for name in extras)
        yield package, _version(package) or f"not installed; {ways}"


def _requirements() -> dict[str, list[str]]:
    """The packages that the metadata of this one requires on such a system and processor, with the extras that install
    each; empty without metadata.
    """
    packages: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires("scratchformer") or []
    except importlib.metadata.PackageNotFoundError:
        return packages
    for requirement in map(Requirement, requirements):
        for extra in re.findall(r'extra == "(.+?)"', str(requirement.marker)) or [""]:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                packages.setdefault(requirement.name, []).extend([extra] if extra else [])
    return packages


def _version(distribution: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> Iterator[tuple[str, str]]:
    """The NVIDIA driver, its GPUs, and the extra of this package whose CUDA version it supports."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.free", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        yield "NVIDIA driver", "none found (nvidia-smi does not answer): no GPU can be used"
        return
    for line in lines:
        version, name, free = (part.strip() for part in line.split(","))
        # CUDA 13 needs driver 580 or later, CUDA 12 driver 525 or later.
        extra = "cuda13" if int(version.partition(".")[0]) >= 580 else "cuda12"
        yield "NVIDIA driver", f"{version}; {name}, {free} free; install scratchformer[{extra}]"


def _free_memory() -> str:
    try:
        lines = open("/proc/meminfo", encoding="ascii").read().splitlines()
    except OSError:
        return "unknown on this system"
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return f"{kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB"


def _gpu() -> Iterator[tuple[str, str]]:
    yield from _driver()
    found = next(filter(None, map(_version, _CUPY)), "")
    yield "CuPy", found or "not installed; needed for --device gpu"
    if found:
        kernels = [f"{name} {version}" for name in _KERNELS if (version := _version(name))]
        if missing := " and ".join(name for name in _KERNELS if not _version(name)):
            kernels.append(f"{missing} not installed: products and attention are slower")
        yield "GPU kernels", "; ".join(kernels)
    try:
        cupy, count = gpus()
    except DeviceError as error:
        yield "GPU", str(error)
        return
    runtime = cupy.cuda.runtime
    yield "CUDA", f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"
    for i in range(count):
        with cupy.cuda.Device(i):
            free, total = runtime.memGetInfo()
        name = runtime.getDeviceProperties(i)["name"].decode()
        yield f"gpu:{i}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        try:
            get_device(f"gpu:{i}")
        except DeviceError as error:
            yield "", str(error)

"""What a bug report needs: versions, BLAS, GPU, memory, the data cache, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
from threadpoolctl import threadpool_info

from .backend import DeviceError, get_device

EXTRAS = {
    "matplotlib": "`scratchformer plot`: pip install 'scratchformer[plot]'",
    "tensorboardX": "--tensorboard: pip install 'scratchformer[tensorboard]'",
    "hypothesis": "the strategies and the tests: pip install 'scratchformer[test]'",
    "torch": "the parity tests and benchmarks: pip install 'scratchformer[torch]'",
}


def report() -> Iterator[tuple[str, str]]:
    """(subject, finding) pairs."""
    from . import __version__
    from .data import cache_dir
    from .training.replicas import cores

    yield "scratchformer", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "NumPy", np.__version__
    for library in threadpool_info():
        if library["user_api"] == "blas":
            name = f"{library['internal_api']} {library['version']} ({library.get('architecture', 'unknown')})"
            yield "BLAS", f"{name}, {library['num_threads']} threads, {library['filepath'].rpartition('/')[2]}"
    if kind := os.environ.get("OPENBLAS_CORETYPE"):
        yield "", f"OPENBLAS_CORETYPE={kind} is set: OpenBLAS does not choose its kernels to suit the CPU"
    yield "CPU", f"{cores()} cores for this process"
    yield "free memory", _free_memory()
    yield from _gpu()
    folder = cache_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    held = [p.name for p in sorted(folder.iterdir())] if folder.is_dir() else []
    yield "data cache", f"{folder} ({free:.1f} GiB free; holds {', '.join(held) or 'nothing yet'})"
    for package in ("scipy", "safetensors", "threadpoolctl", "pooch", "tqdm"):
        yield package, importlib.metadata.version(package)
    for package, purpose in EXTRAS.items():
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, f"not installed; needed for {purpose}"


_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _driver() -> Iterator[tuple[str, str]]:
    """The NVIDIA driver, its GPUs, and the extra for the CUDA version that it can run."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.free", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        yield "NVIDIA driver", "none found (nvidia-smi does not answer): no GPU can be used"
        return
    for line in lines:
        version, name, free = (part.strip() for part in line.split(","))
        # CUDA 13 needs a driver of version 580 or later, CUDA 12 one of version 525 or later.
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
    try:
        yield "CuPy", importlib.metadata.version(next(d for d in _CUPY if _installed(d)))
    except StopIteration:
        yield "CuPy", "not installed; needed for --device gpu"
    try:
        device = get_device("gpu")
    except DeviceError as error:
        yield "GPU", str(error)
        return
    runtime = device.xp.cuda.runtime
    yield "CUDA", f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"
    for i in range(runtime.getDeviceCount()):
        with device.xp.cuda.Device(i):
            free, total = runtime.memGetInfo()
        name = runtime.getDeviceProperties(i)["name"].decode()
        yield f"gpu:{i}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"

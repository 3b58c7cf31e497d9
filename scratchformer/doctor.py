"""What a bug report needs: versions, BLAS, GPU, memory, where data is kept, and what to install for what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
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
    from .data import cache_dir
    from .training.replicas import cores

    yield "scratchformer", importlib.metadata.version("scratchformer")
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "NumPy", np.__version__
    for library in threadpool_info():
        if library["user_api"] == "blas":
            name = f"{library['internal_api']} {library['version']} ({library.get('architecture', 'unknown')})"
            yield "BLAS", f"{name}, {library['num_threads']} threads, {library['filepath'].rpartition('/')[2]}"
    if kind := os.environ.get("OPENBLAS_CORETYPE"):
        yield "", f"OPENBLAS_CORETYPE={kind} is set, which keeps OpenBLAS from choosing its kernels by the CPU"
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


def _free_memory() -> str:
    try:
        lines = open("/proc/meminfo", encoding="ascii").read().splitlines()
    except OSError:
        return "unknown on this system"
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return f"{kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB"


def _gpu() -> Iterator[tuple[str, str]]:
    try:
        device = get_device("gpu")
    except DeviceError as error:
        yield "GPU", str(error)
        driver = shutil.which("nvidia-smi")
        yield "NVIDIA driver", "nvidia-smi found" if driver else "none found (nvidia-smi is not on the path)"
        return
    runtime = device.xp.cuda.runtime
    yield "CuPy", device.xp.__version__
    yield "CUDA", f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"
    for i in range(runtime.getDeviceCount()):
        with device.xp.cuda.Device(i):
            free, total = runtime.memGetInfo()
        name = runtime.getDeviceProperties(i)["name"].decode()
        yield f"gpu:{i}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"

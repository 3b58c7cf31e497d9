"""Runs portable arrays on a GPU that is a CPU: CuPy is the strict stand-in for it here, and its kernels are emulated.

    python tests/kernels/on_cpu/portable_arrays.py kernels|operations|training              # the bits are those of NumPy
    python tests/kernels/on_cpu/portable_arrays.py kernels FILE OLD NEW                     # with a mistake planted

It prints the first results that differ, and then exits with 3.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from emulator import Kernel, elementwise_source

from scratchformer.testing import strict
from scratchformer.testing.strict import STRICT, DeviceArray


def host(x):
    return x._host if isinstance(x, DeviceArray) else x


class RawKernel(Kernel):
    def __call__(self, grid, block, arguments):
        super().__call__(grid, block, tuple(map(host, arguments)))


class ElementwiseKernel:
    """As CuPy's, of float32 and float64 numbers."""

    def __init__(self, given, result, operation, name, preamble=""):
        self.types = [np.dtype(each.split()[0]) for each in (*given.split(", "), result)]
        self.kernel = Kernel(elementwise_source(given, result, operation, name, preamble), name)

    def __call__(self, *args):
        *types, result = self.types
        assert all(x.dtype == kind for x, kind in zip(args, types, strict=True)), (self.kernel.name, args)
        arrays = [np.array(x, order="C") for x in np.broadcast_arrays(*map(host, args))]
        y = np.empty(arrays[0].shape, result)
        if y.size:
            self.kernel((-(-y.size // 256),), (256,), (*arrays, y, np.int64(y.size)))
        return DeviceArray(y)


cupy = strict.library
vars(cupy).update(RawKernel=RawKernel, ElementwiseKernel=ElementwiseKernel)
cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Device=nullcontext)
sys.modules["cupy"] = cupy
sys.path.append(str(Path(__file__).parents[2]))

from scratchformer import portable  # noqa: E402
from scratchformer.backend import device_of, to_cpu, to_device  # noqa: E402
from scratchformer.kernels import cupy_code, cupy_portable  # noqa: E402

ROOM = ModuleType
DEVICE = device_of(cupy_portable.LIBRARY.zeros(1))

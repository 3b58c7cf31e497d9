"""Runs portable arrays for a GPU on a CPU, and compares all bits with those of portable arrays on the CPU. The strict
stand-in takes the place of CuPy and refuses to compute with float32; the kernels are emulated (see `emulator.py`).

    python tests/kernels/on_cpu/portable_arrays.py kernels                   # or refusals, operations, training
    python tests/kernels/on_cpu/portable_arrays.py kernels FILE OLD NEW      # with a mistake planted in FILE.cu

Exits with 3 at the first result that differs.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from emulator import Kernel, elementwise_source, plant

from scratchformer.backend import Device
from scratchformer.testing import strict
from scratchformer.testing.strict import DeviceArray

MOVING = """
view copy ravel flatten reshape swapaxes transpose squeeze repeat take take_along_axis where concatenate stack split
array_split broadcast_to expand_dims moveaxis matrix_transpose zeros_like ones_like empty_like full_like
""".split()


def host(x):
    return x._host if isinstance(x, DeviceArray) else x


class RawKernel(Kernel):
    def __call__(self, grid, block, arguments):
        super().__call__(grid, block, tuple(map(host, arguments)))


class ElementwiseKernel:
    """As cupy.ElementwiseKernel, for float32 and float64. One thread computes all elements."""

    def __init__(self, given, result, operation, name, preamble=""):
        self.types = [np.dtype(each.split()[0]) for each in (*given.split(", "), result)]
        self.kernel = Kernel(elementwise_source(given, result, operation, name, preamble), name)

    def __call__(self, *args):
        *types, result = self.types
        assert [x.dtype for x in args] == types, self.kernel.name
        arrays = [np.array(x, order="C") for x in np.broadcast_arrays(*map(host, args))]
        y = np.empty(arrays[0].shape, result)
        self.kernel((1,), (1,), (*arrays, y, np.int64(y.size)))
        return DeviceArray(y)


def guarded(call):
    """Let CuPy only move float32 numbers, since it treats subnormal ones as 0 when it computes with them."""

    def guarded_call(name, function, args, keywords):
        given = getattr(function, "__self__", None), *args
        types = {x.dtype for x in given if isinstance(x, np.ndarray | DeviceArray)}
        types |= {np.dtype(args[0])} if name == "astype" else set()
        if np.float32 in types and not (name in MOVING or (name == "astype" and len(types) == 1)):
            raise TypeError(f"CuPy would compute {name} of float32")
        if name == "where" and args[0].dtype == np.float32:
            raise TypeError("CuPy would compare a condition of float32 with 0")
        return call(name, function, args, keywords)

    return guarded_call


def assign(self, key, value):
    if isinstance(value, DeviceArray) and value.dtype != self.dtype and np.float32 in (value.dtype, self.dtype):
        raise TypeError(f"CuPy would convert {value.dtype} to {self.dtype}")
    put(self, key, value)


put, DeviceArray.__setitem__, strict._call = DeviceArray.__setitem__, assign, guarded(strict._call)
for operator in "add sub mul truediv neg lt le gt ge eq ne iadd isub imul itruediv".split():
    delattr(DeviceArray, f"__{operator}__")
cupy = strict.library
vars(cupy).update(RawKernel=RawKernel, ElementwiseKernel=ElementwiseKernel)
cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Device=nullcontext)
cupy.__name__, DeviceArray.device = "cupy", SimpleNamespace(id=0)
sys.modules["cupy"] = cupy
sys.path.append(str(Path(__file__).parents[3]))

from scratchformer.kernels import cupy_code, cupy_portable  # noqa: E402, F401
from scratchformer.parallel import replicas  # noqa: E402
from tests.kernels.portable_checks import CHECKS  # noqa: E402

replicas.tf32 = lambda *_: nullcontext()  # it sets what only CuPy has
GPU = Device("gpu:0", cupy, 0)

if __name__ == "__main__":
    which, *mistake = sys.argv[1:]
    if mistake:
        plant(cupy_code, *mistake)
    try:
        with np.errstate(all="ignore"):
            for check in CHECKS[which]:
                check(GPU)
                print("ok", check.__name__, flush=True)
    except AssertionError as error:  # any other error is not a difference of bits, and is raised
        print("FAILED", check.__name__, error)
        sys.exit(3)

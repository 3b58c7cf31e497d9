"""Runs portable arrays for a GPU on a CPU, and compares all bits with NumPy's. CuPy is the strict stand-in here, which
must not compute with float32, and the kernels are emulated (see `emulator.py`).

    python tests/kernels/on_cpu/portable_arrays.py kernels                   # or operations, or training
    python tests/kernels/on_cpu/portable_arrays.py kernels FILE OLD NEW      # with a mistake planted in FILE.cu

Exits with 3 at the first result that differs.
"""

import io
import itertools
import re
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from emulator import Kernel, elementwise_source, plant

from scratchformer.testing import strict
from scratchformer.testing.strict import STRICT, DeviceArray

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
    """As CuPy's, of float32 and float64 numbers. One thread computes all."""

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
    """Let CuPy only move float32 numbers, since it makes those below 2⁻¹²⁶ 0 where it computes."""

    def guarded_call(name, function, args, keywords):
        given = getattr(function, "__self__", None), *args
        types = {x.dtype for x in given if isinstance(x, np.ndarray | DeviceArray)}
        types |= {np.dtype(args[0])} if name == "astype" else set()
        if np.float32 in types and not (name in MOVING or (name == "astype" and len(types) == 1)):
            raise TypeError(f"CuPy would compute {name} of float32")
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
sys.modules["cupy"] = cupy
sys.path.append(str(Path(__file__).parents[3]))

from scratchformer import portable  # noqa: E402
from scratchformer.backend import CPU, device_of, to_cpu, to_device  # noqa: E402
from scratchformer.catalogue import LAYERS, OPERATIONS  # noqa: E402
from scratchformer.dispatch import reference_only  # noqa: E402
from scratchformer.kernels import cupy_code  # noqa: E402
from scratchformer.kernels.cupy_portable import LIBRARY, PortableGPUArray  # noqa: E402
from scratchformer.models import LanguageModel, Llama, TransformerXL  # noqa: E402
from scratchformer.optim import Adam, AdamW, Muon  # noqa: E402
from scratchformer.portable import PortableKey  # noqa: E402
from tests import test_portable  # noqa: E402
from tests.kernels.drawn_bits import SPECIAL, expect_same, numbers, strided  # noqa: E402

DEVICE = device_of(LIBRARY.zeros(1))
KINDS = "plain", "special", "subnormal", "ties"
STRIDES = "plain", "transposed", "reversed", "cut out"
STACKS = ((), ()), ((3,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1, 2), (1, 2, 1)), ((0,), ())
FUNCTIONS = [getattr(portable, name) for name in ("exp", "log", "log1p", "tanh", "erf")]


def compare(function, *args):
    """function(*args) for arrays on the CPU and on the GPU."""
    here = function(*(portable.portable(x) if isinstance(x, np.ndarray) else x for x in args))
    there = function(*(to_device(x, DEVICE) if isinstance(x, np.ndarray) else x for x in args))
    for x, y in zip(*(each if isinstance(each, list | tuple) else [each] for each in (there, here)), strict=True):
        assert type(x) is PortableGPUArray, type(x)
        expect_same(np.ascontiguousarray(to_cpu(x)), np.ascontiguousarray(y))


def compare_products():
    sizes = itertools.cycle([0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 65, 130])
    for a_kind, b_kind, a_how, b_how in itertools.product(KINDS, KINDS, STRIDES, STRIDES):
        M, K, N = (next(sizes) for _ in range(3))
        stack_a, stack_b = STACKS[(M + K + N + len(a_how)) % len(STACKS)]
        a = strided(numbers(M, (*stack_a, M, K), a_kind), a_how)
        compare(np.matmul, a, strided(numbers(N, (*stack_b, K, N), b_kind), b_how))
        next(sizes)  # of 13, so that each of the three takes all


def compare_sums():
    for shape in (7,), (1, 33), (3, 70, 2), (5, 2, 40), (2, 0, 3), (1030,), (70_001,):
        for kind, dtype in itertools.product(KINDS, (np.float32, np.float64)):
            x = numbers(len(shape), shape, kind).astype(dtype)
            for axis in (None, 0, -1, *[(0, -1), ()][: 2 * (x.ndim > 1)]):
                compare(lambda x, axis=axis: np.sum(x, axis), x)
                compare(lambda x, axis=axis: x.T.mean(axis, keepdims=True), x)


def compare_functions():
    bits = np.random.default_rng(0).integers(0, 2**32, 30_000, dtype=np.uint32).view(np.float32)
    for function in FUNCTIONS:
        for x in bits.reshape(3, -1).T, numbers(0, 5000, "plain"), SPECIAL.astype(np.float32), np.array(2, np.float32):
            compare(function, x)


def compare_exact():
    """All exact functions of pairs of numbers, also with a number of Python, and what compares or converts."""
    x, y = (a.reshape(-1).astype(np.float32) for a in np.meshgrid(SPECIAL, SPECIAL))
    x, y = (np.concatenate([a, *(numbers(seed, 200, kind) for kind in KINDS)]) for seed, a in enumerate((x, y)))
    for ufunc in (*portable.EXACT, np.maximum, np.minimum):
        compare(ufunc, *((x, y) if ufunc.nin == 2 else (x,)))
        compare(ufunc, *((x, y.astype(np.float64)) if ufunc.nin == 2 else (x.astype(np.float64),)))
    compare(lambda x: [0.1 * x, x / 3, 1 - x, x < 1e-40, x * np.float32(0.1), x * np.float64(0.1), x > 0], x)
    for dtype in (np.float64, bool):
        compare(lambda x, dtype=dtype: x.astype(dtype), x)
    compare(lambda x: x.astype(np.float32), x.astype(np.float64) * 2.0**-140)
    table = x[: 30 * (x.size // 30)].reshape(-1, 5, 6)
    for name in "all any argmax argmin max min".split():
        compare(lambda x, name=name: [getattr(x, name)(), getattr(x, name)(axis=1), getattr(np, name)(x, -1)], table)
    compare(lambda x, y: [np.where(x < y, x, 0), np.concatenate([x, y]), x.clip(-1, y), np.stack([x, y])[:, ::2]], x, y)
    compare(lambda x: [(x > 0).mean(), (x > 0).sum(), np.cumsum(x > 0), np.nonzero(x)[0], np.where(x > 0, x, np.pi)], x)
    compare(lambda x, y: [np.where(x > 0, x, y), np.where(x > 0, x, np.float64(1))], x, x.astype(np.float64) / 3)
    compare(lambda x: x[:1] * (int(np.count_nonzero(x)) + bool(np.array_equal(x, x))), x)


def compare_assignments():
    """Into an array, and into its parts."""

    def change(x, y, ids):
        x = x.copy()
        x += y
        x[1:3] *= 0.3
        x[0] = y[1].astype(np.float64)
        np.add.at(x, ids, y[: len(ids)])
        np.add.at(x[:, 1:], ids, y[: len(ids), 1:])
        return x

    for kind in KINDS:
        compare(change, numbers(0, (9, 7), kind), numbers(1, (9, 7), kind), np.array([3, 0, 3, 8, 3, 0]))


def compare_case(function, name):
    there = function(name, partial(to_device, device=DEVICE), DEVICE)
    for x, y in zip(there, function(name, portable.portable), strict=True):
        assert type(x) is PortableGPUArray, name
        expect_same(np.ascontiguousarray(to_cpu(x)), np.ascontiguousarray(y))


def compare_cases():
    for function, names in (test_portable.of_operation, OPERATIONS), (test_portable.of_layer, LAYERS):
        for name in names:
            if name != "BidirectionalLanguageModel":  # its dy has another form
                compare_case(function, name)
    with reference_only():  # without the twins here
        for name in "attention", "layernorm":
            compare_case(test_portable.of_operation, name)


def compare_training():
    sizes = dict(d_model=12, heads=2, depth=1, context=8, dropout=0.1, key=PortableKey(0))
    kinds = (LanguageModel, Adam, 10), (Llama, Muon, 3), (partial(TransformerXL, memory=8), AdamW, 3)
    for kind, optimizer, steps in kinds:
        hashes = []
        for device in "cpu", STRICT:
            model = kind(31, **sizes).to(device).make_portable()
            data = test_portable.trained(model, optimizer(model.parameters(), 0.01), steps, count=1)
            hashes.append(test_portable.digest_of([data]))
        assert type(data) is PortableGPUArray
        assert hashes[0] == hashes[1], kind


def compare_runs():
    """A run on one device is resumed on the other."""
    with tempfile.TemporaryDirectory() as folder:
        for out, device, steps, options in (
            ("whole", CPU, 4, {}),
            ("here", CPU, 2, {}),
            ("here", STRICT, 4, dict(resume=True)),
            ("there", STRICT, 2, {}),
            ("there", CPU, 4, dict(resume=True)),
        ):
            with redirect_stdout(io.StringIO()) as printed:
                test_portable.run_of(Path(folder, out), steps, device=device, **options)
            (found,) = re.findall(f"SHA-256 of the parameters after step {steps}: (.*)", printed.getvalue())
            whole = found if out == "whole" else whole
            assert steps == 2 or found == whole, (out, device)


CHECKS = {
    "kernels": [compare_products, compare_sums, compare_functions, compare_exact, compare_assignments],
    "operations": [compare_cases],
    "training": [compare_training, compare_runs],
}

if __name__ == "__main__":
    which, *mistake = sys.argv[1:]
    if mistake:
        plant(cupy_code, *mistake)
    try:
        with np.errstate(all="ignore"):
            for check in CHECKS[which]:
                check()
                print("ok", check.__name__, flush=True)
    except AssertionError as error:  # anything else is no comparison, and ends the program
        print("FAILED", check.__name__, error)
        sys.exit(3)

"""Which library multiplies matrices, and whether its products are the same on every run."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba")
mkl_products = pytest.importorskip("scratchformer.kernels.mkl_products")
linear = pytest.importorskip("scratchformer.kernels.numba_linear")
numba_bfloat16 = pytest.importorskip("scratchformer.kernels.numba_bfloat16")

if mkl_products.products() is None:
    pytest.skip("neither MKL nor OpenBLAS is there", allow_module_level=True)

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16


@pytest.fixture
def machine(monkeypatch):
    """machine(libraries, processor, instructions) is another machine; addresses are numbers."""

    def machine(libraries, processor="", instructions=()):
        offered = {name: mkl_products.Products(*addresses) for name, addresses in libraries.items()}
        monkeypatch.setattr(mkl_products, "libraries", lambda: offered)
        monkeypatch.setattr(mkl_products, "described", lambda: processor)
        monkeypatch.setattr(mkl_products, "instructions", lambda: [*instructions])
        monkeypatch.setattr(numba_bfloat16, "available", lambda: "AVX512-BF16" in instructions)
        mkl_products.products.cache_clear()

    yield machine
    monkeypatch.undo()
    mkl_products.products.cache_clear()


BOTH = {"MKL": (1, 2, 3), "OpenBLAS": (4, 5, 0)}
OPENBLAS = {"OpenBLAS": (4, 5, 0)}
INTEL, EPYC = "Intel(R) Xeon(R) Processor", "AMD EPYC 9R14"
RULE = [
    (BOTH, INTEL, [], ("MKL", "float32")),
    (BOTH, INTEL, ["AVX512-BF16"], ("MKL", "float32")),
    (BOTH, INTEL, ["AVX512-BF16", "AMX"], ("MKL", "MKL")),
    (OPENBLAS, INTEL, ["AVX512-BF16", "AMX"], ("OpenBLAS", "float32")),
    (BOTH, EPYC, [], ("MKL", "float32")),
    (BOTH, EPYC, ["AVX512-BF16"], ("MKL", "Numba")),
    (OPENBLAS, EPYC, ["AVX512-BF16"], ("OpenBLAS", "Numba")),
    (OPENBLAS, "", [], ("OpenBLAS", "float32")),
]


@pytest.mark.parametrize(("libraries", "processor", "instructions", "expected"), RULE)
def test_the_rule(machine, monkeypatch, libraries, processor, instructions, expected):
    monkeypatch.delenv(mkl_products.VARIABLE, raising=False)
    machine(libraries, processor, instructions)
    assert mkl_products.choice() == expected
    machine({}, processor, instructions)
    assert mkl_products.choice() is mkl_products.products() is None


def test_the_environment_names_another_library(machine, monkeypatch):
    machine(BOTH, INTEL, ["AMX"])
    for name, half in ("MKL", 3), ("OpenBLAS", 0):
        monkeypatch.setenv(mkl_products.VARIABLE, name)
        mkl_products.products.cache_clear()
        assert mkl_products.products() == mkl_products.libraries()[name]._replace(bfloat16=half)
        assert str(mkl_products.choice()).startswith(f"float32 by {name}, bfloat16 ")
    monkeypatch.setenv(mkl_products.VARIABLE, "blis")
    with pytest.raises(ValueError, match=r"^SCRATCHFORMER_PRODUCTS: expected MKL or OpenBLAS, got 'blis'$"):
        mkl_products.choice()


def test_our_own_code_is_left_out_if_it_cannot_be_compiled(machine, monkeypatch):
    def address():
        raise RuntimeError("LLVM has changed")

    monkeypatch.delenv(mkl_products.VARIABLE, raising=False)
    monkeypatch.setattr(numba_bfloat16, "address", address)
    machine(BOTH, EPYC, ["AVX512-BF16"])
    with pytest.warns(UserWarning, match=r"^our own products of bfloat16 cannot be compiled: .*LLVM has changed"):
        assert mkl_products.products() == (1, 2, 0)


def placed(x, offset):
    """A copy of x that begins `offset` bytes after a multiple of 64."""
    room = np.empty(x.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


HALVES = {name: library.bfloat16 for name, library in mkl_products.libraries().items() if library.bfloat16}
HALVES |= {"Numba": numba_bfloat16.address()} if numba_bfloat16.available() else {}
HALVES["widened"] = 0


@pytest.fixture
def multiply_by(monkeypatch):
    """multiply_by(half): products of bfloat16 arrays are from now on by this one of HALVES."""

    def multiply_by(half):
        found = mkl_products.products()._replace(bfloat16=HALVES[half])
        monkeypatch.setattr(linear, "products", lambda: found)

    return multiply_by


@pytest.mark.parametrize(("dtype", "half"), [(np.float32, "widened"), *((bfloat16, half) for half in HALVES)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_the_same_bits_wherever_arrays_lie_and_whoever_runs(multiply_by, dtype, half, transposed):
    """In several blocks, of which the last are not whole; two threads at once."""
    multiply_by(half)
    draw = np.random.default_rng(0)
    x, w, b = (draw.standard_normal(shape).astype(dtype) for shape in ((600, 70), (70, 700), 700))
    w = np.ascontiguousarray(w.T) if transposed else w

    def product(offset):
        left, right = placed(x, offset), placed(w, 2 * offset % 64)
        return linear.linear(left, right.T if transposed else right, b)[0]

    with ThreadPoolExecutor(2) as threads:
        first, *others = threads.map(product, [0, 4, 8, 16, 32, 60])
    assert all(np.array_equal(first.view(np.uint8), other.view(np.uint8)) for other in others)
    wide_x, wide_w = x.astype(np.float64), (w.T if transposed else w).astype(np.float64)
    right = wide_x @ wide_w + b.astype(np.float64)
    error = np.abs(first.astype(np.float64) - right)
    rounding = 2.0**-8 if dtype is bfloat16 else 0
    bound = 72 * 2.0**-24 * (np.abs(wide_x) @ np.abs(wide_w) + np.abs(b).astype(np.float64))
    assert (error <= bound * (1 + rounding) + rounding * np.abs(right)).all()


@pytest.mark.parametrize("half", HALVES)
def test_bfloat16_forward_and_backward_by_each_library_and_widened(multiply_by, half):
    draw = np.random.default_rng(0)
    x, w, dy = (draw.standard_normal(shape).astype(bfloat16) for shape in ((5, 7), (7, 3), (5, 3)))
    multiply_by(half)
    y, cache = linear.linear(x, w)
    wide_x, wide_w, wide_dy = (each.astype(float) for each in (x, w, dy))
    right = wide_x @ wide_w, wide_dy @ wide_w.T, wide_x.T @ wide_dy
    for found, expected in zip((y, *linear.linear_backward(dy, cache)), right, strict=True):
        np.testing.assert_allclose(found.astype(float), expected, rtol=2**-8, atol=1e-6)


def test_if_nothing_can_be_chosen_the_references_run():
    """And no twin that would ask for a choice in the middle of training."""
    code = """
import sys, warnings
sys.modules["scratchformer.kernels.mkl"] = None
import numpy as np
from scratchformer import ops
from scratchformer.dispatch import fast
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    with fast():
        y, cache = ops.linear(np.ones((8, 4), np.float32), np.ones((4, 3), np.float32))
        dx, dw = ops.linear_backward(y, cache)
print(y.sum(), dx.sum(), dw.sum(), *(each.message for each in found), sep="; ")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    y, dx, dw, warned = done.stdout.strip().split("; ", 3)
    assert (float(y), float(dx), float(dw)) == (96, 384, 384)
    assert warned.startswith("the fast twins do not run: ") and warned.count("mkl") == 1

"""Which library multiplies matrices, and whether its products are the same on every run."""

import subprocess
import sys
import threading
import time
import warnings
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
def forget():
    """forget() starts a new process: nothing has been found, measured or compiled."""

    def forget():
        for function in mkl_products.choice, mkl_products.products, mkl_products.available:
            function.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def measured(monkeypatch, tmp_path, forget):
    """A list of what `choice` has measured, with an empty cache folder."""
    found = []

    def measure():
        now = mkl_products.Choice(FIRST, "float32", {"MKL": 100 + len(found)})
        found.append(now)
        return now

    monkeypatch.setenv("SCRATCHFORMER_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(mkl_products, "measure", measure)
    return found


def test_a_second_process_makes_the_same_choice(measured, forget):
    first = mkl_products.choice()
    forget()
    assert mkl_products.choice() == first and len(measured) == 1


def test_processes_that_start_together_make_the_same_choice(measured, monkeypatch):
    """Threads stand for them."""
    measure, together = mkl_products.measure, threading.Barrier(3, timeout=600)

    def measure_together():
        found = measure()
        together.wait()
        return found

    monkeypatch.setattr(mkl_products, "measure", measure_together)
    with ThreadPoolExecutor(3) as threads:
        first, *others = (each.result() for each in [threads.submit(mkl_products.choice) for _ in range(3)])
    assert len(measured) == 3 and others == [first, first]
    assert mkl_products._kept() == first


def kept(float32, bfloat16="float32", rates="{}"):
    return f'{{"KEY": {{"float32": "{float32}", "bfloat16": "{bfloat16}", "measured": {rates}}}}}'


def keep(content):
    mkl_products._file().parent.mkdir(parents=True)
    mkl_products._file().write_bytes(content.replace("KEY", mkl_products.machine()).encode("latin-1"))


FIRST = next(iter(mkl_products.libraries()))
DAMAGED = ["", "[]", "{", "\xff", '{"KEY": 3}', '{"KEY": {"float32": "MKL"}}', kept("gone"), kept(FIRST, "gone")]
DAMAGED += [kept(FIRST, rates=rates) for rates in ("3", '{"MKL": "fast"}', "[]", '[["MKL", 1]]')]
for name, library in mkl_products.available().items():
    DAMAGED += [kept(name)] * (not library.float32) + [kept(FIRST, name)] * (not library.bfloat16)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_choice_is_measured_again(measured, forget, content):
    keep(content)
    assert mkl_products.choice() == measured[0]
    forget()
    assert mkl_products.choice() == measured[0] and len(measured) == 1


def test_a_choice_without_our_own_code_is_not_that_with_it(measured, monkeypatch, forget):
    """As when NUMBA_CPU_FEATURES forbids the instructions."""
    found = []
    for own in True, False, True:
        monkeypatch.setattr(numba_bfloat16, "available", lambda own=own: own)
        found.append(mkl_products.choice())
        forget()
    assert found == [*measured, measured[0]] and len(measured) == 2


def test_a_choice_is_for_one_version_of_our_own_code_and_for_settings_of_mkl(monkeypatch, tmp_path):
    found = {mkl_products.machine()}
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "another")
    found.add(mkl_products.machine())
    (tmp_path / "new.py").touch()
    monkeypatch.setattr(numba_bfloat16, "__file__", str(tmp_path / "new.py"))
    assert len({*found, mkl_products.machine()}) == 3


@pytest.mark.parametrize("half", ["float32", "Numba"])
def test_our_own_code_is_compiled_only_if_it_is_chosen_and_left_out_if_it_cannot_be(measured, monkeypatch, half):
    def address():
        raise RuntimeError("LLVM has changed")

    monkeypatch.setattr(numba_bfloat16, "available", lambda: True)
    monkeypatch.setattr(numba_bfloat16, "address", address)
    keep(kept(FIRST, half))
    with warnings.catch_warnings(record=True) as said:
        found = [mkl_products.products() for _ in range(2)]
    assert found == [mkl_products.libraries()[FIRST]._replace(bfloat16=0)] * 2 and not measured
    assert [str(warning.message) for warning in said] == (half == "Numba") * [
        "our own products of bfloat16 cannot be compiled: RuntimeError('LLVM has changed')"
    ]


def test_a_folder_that_cannot_be_written_is_no_error(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SCRATCHFORMER_DATA", str(tmp_path / "file" / "below"))
    assert mkl_products.choice() == measured[0]


def test_all_libraries_are_measured():
    found = mkl_products.measure()
    halves = {name + mkl_products.HALF for name, library in mkl_products.available().items() if library.bfloat16}
    assert halves <= found.measured.keys() and all(rate > 0 for rate in found.measured.values())
    assert mkl_products.available()[found.float32].float32
    if found.bfloat16 != "float32":
        assert found.measured[found.bfloat16 + mkl_products.HALF] > found.measured[found.float32]
    assert f"float32 by {found.float32}" in str(found)


@pytest.mark.parametrize(
    ("times", "float32", "half"),
    [
        ({1: 3, 3: 2, 4: 4, 6: 1}, "MKL", "Numba"),
        ({1: 3, 3: 1, 4: 4, 6: 2}, "MKL", "MKL"),
        ({1: 3, 3: 5, 4: 2, 6: 4}, "OpenBLAS", "float32"),
    ],
)
def test_the_fastest_is_chosen(monkeypatch, times, float32, half):
    """Functions have their numbers in place of addresses."""
    libraries = {"MKL": (1, 2, 3), "OpenBLAS": (4, 5, 0), "Numba": (0, 0, 6)}
    monkeypatch.setattr(
        mkl_products, "available", lambda: {name: mkl_products.Products(*each) for name, each in libraries.items()}
    )
    monkeypatch.setattr(mkl_products, "_seconds", lambda function, dtype: times[function])
    assert mkl_products.measure()[:2] == (float32, half)


def placed(x, offset):
    """A copy of x that begins `offset` bytes after a multiple of 64."""
    room = np.empty(x.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


HALVES = {name: library.bfloat16 for name, library in mkl_products.available().items() if library.bfloat16}
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
sys.modules["pooch"] = None  # as if it were not installed: it knows where the cache folder is
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
    assert warned.startswith("the fast twins do not run: ") and warned.count("pooch") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows counts processor time in 16 ms")
def test_what_is_measured_is_not_lengthened_by_other_processes():
    """While others run, a process waits, as in this function."""
    waiting = mkl_products.CBLAS(lambda *_: time.sleep(0.03))
    address = mkl_products.ctypes.cast(waiting, mkl_products.POINTER).value
    assert mkl_products._seconds(address, np.float32) < 0.03

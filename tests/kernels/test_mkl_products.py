"""Which library multiplies matrices, and whether its products are the same on every run."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba")
mkl_products = pytest.importorskip("scratchformer.kernels.mkl_products")
linear = pytest.importorskip("scratchformer.kernels.numba_linear")

if mkl_products.products() is None:
    pytest.skip("neither MKL nor OpenBLAS is there", allow_module_level=True)

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A list of what `choice` has measured, with an empty cache folder; `forget` starts a new process."""
    found = []

    def measure():
        found.append(mkl_products.Choice(next(iter(mkl_products.available())), "float32", {"MKL": 100 + len(found)}))
        return found[-1]

    monkeypatch.setenv("SCRATCHFORMER_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(mkl_products, "measure", measure)
    mkl_products.choice.cache_clear()
    yield found
    mkl_products.choice.cache_clear()


def test_a_second_process_makes_the_same_choice(measured):
    first = mkl_products.choice()
    mkl_products.choice.cache_clear()
    assert mkl_products.choice() == first and len(measured) == 1


def kept(float32, bfloat16="float32", rates="{}"):
    return f'{{"KEY": {{"float32": "{float32}", "bfloat16": "{bfloat16}", "measured": {rates}}}}}'


FIRST = next(iter(mkl_products.available()))
DAMAGED = ["", "[]", "{", '{"KEY": 3}', '{"KEY": {"float32": "MKL"}}', kept("gone"), kept(FIRST, "gone")]
DAMAGED += [kept(FIRST, rates="3"), kept(FIRST, rates='{"MKL": "fast"}')]
for name, library in mkl_products.available().items():
    DAMAGED += [kept(name)] * (not library.float32) + [kept(FIRST, name)] * (not library.bfloat16)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_choice_is_measured_again(measured, content):
    mkl_products._file().parent.mkdir(parents=True)
    mkl_products._file().write_text(content.replace("KEY", mkl_products.machine()))
    assert mkl_products.choice() == measured[0]
    now = json.loads(mkl_products._file().read_text())
    assert now[mkl_products.machine()]["measured"] == {"MKL": 100}


def test_a_choice_without_a_library_that_is_hidden_is_not_that_with_it(measured, monkeypatch):
    """As when NUMBA_CPU_FEATURES forbids the instructions of one."""
    everything = mkl_products.available()
    first = mkl_products.choice()
    hidden = {name: library._replace(bfloat16=0) for name, library in everything.items() if library.float32}
    others = 1 if hidden == everything else 2
    monkeypatch.setattr(mkl_products, "available", lambda: hidden)
    mkl_products.choice.cache_clear()
    mkl_products.choice()
    monkeypatch.setattr(mkl_products, "available", lambda: everything)
    mkl_products.choice.cache_clear()
    assert mkl_products.choice() == first and len(measured) == others


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


def placed(x, offset):
    """A copy of x that begins `offset` bytes after a multiple of 64."""
    room = np.empty(x.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_the_same_bits_wherever_arrays_lie_and_whoever_runs(dtype, transposed):
    """In several blocks, of which the last are not whole; two threads at once."""
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


def test_bfloat16_without_a_product_of_its_own_is_widened(monkeypatch):
    draw = np.random.default_rng(0)
    x, w, dy = (draw.standard_normal(shape).astype(bfloat16) for shape in ((5, 7), (7, 3), (5, 3)))
    found = []
    for own in True, False:
        if not own:
            monkeypatch.setattr(linear, "products", lambda: mkl_products.products()._replace(bfloat16=0))
        y, cache = linear.linear(x, w)
        found.append((y, *linear.linear_backward(dy, cache)))
    for with_own, widened in zip(*found, strict=True):
        np.testing.assert_allclose(with_own.astype(float), widened.astype(float), rtol=2**-7, atol=1e-6)

"""The affine map in bfloat16 by tiles, against products in float64."""

import ctypes
import itertools

import numpy as np
import pytest

pytest.importorskip("numba")
linear = pytest.importorskip("scratchformer.kernels.numba_linear")
bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

from scratchformer.kernels import numba_tiles as tiles  # noqa: E402
from scratchformer.kernels.mkl_products import CBLAS, Products  # noqa: E402
from scratchformer.kernels.numba_code import config  # noqa: E402

pytestmark = pytest.mark.skipif(not tiles.available(), reason="for processors with AMX")

B = tiles.BLOCK
# (N, I, O): one block; parts of a block; several heights, depths and widths, and one of each more
SIZES = [
    (B, B, B),
    (B + 1, 2 * B, B),
    (B * tiles.HEIGHT + 17, B, B * (tiles.WIDTH + 1)),
    (300, B * (tiles.DEPTH + 1), 3 * B),
    (B * tiles.DEPTH + 5, B, 2 * B),
    (2 * B * tiles.DEPTH + B, 3 * B, B),
    (160, B * (tiles.DEPTH + 1), B * (tiles.WIDTH + 1)),
    (B * tiles.DEPTH + B, B, B * (tiles.WIDTH + 1)),
]
UNIT = 2.0**-8  # rounding to bfloat16 changes a number by at most this part of it


def drawn(seed, *shapes):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(bfloat16) for shape in shapes]


def bits(x):
    return x.view(np.uint16)


def wide(*arrays):
    return [x.astype(np.float64) for x in arrays]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_a_map_of_any_size_is_within_the_bounds_of_its_sums(sizes, dtype):
    """w as it is and transposed in memory, with and without bias. What lies around y is not written."""
    N, I, O = sizes
    x, w, b = drawn(0, (N, I), (I, O), O)
    for across, has_bias in itertools.product((False, True), (False, True)):
        room = np.full((N + 2, O), 7, dtype)
        y, row = room[1:-1], bits(b) if has_bias else bits(b)[:0]
        stored = np.ascontiguousarray(w.T) if across else w
        tiles.multiply(bits(x), bits(stored), across, row, y)
        wide_x, wide_w, wide_b = wide(x, w, b)
        sums = wide_x @ wide_w + (wide_b if has_bias else 0)
        bound = (I + 4) * 2.0**-24 * (np.abs(wide_x) @ np.abs(wide_w) + 1)
        if dtype == np.uint16:
            y, bound = y.view(bfloat16).astype(np.float64), bound + UNIT * (np.abs(sums) + bound)
        assert (np.abs(y - sums) <= bound).all()
        assert (room[[0, -1]] == 7).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_any_size_are_within_the_bounds_of_their_sums(sizes):
    N, I, O = sizes
    x, dy = drawn(1, (N, I), (N, O))
    for has_bias in (False, True):
        dw, db = np.full((I, O), np.nan, np.float32), np.full(O if has_bias else 0, np.nan, np.float32)
        tiles.multiply_transposed(bits(x), bits(dy), dw, db)
        wide_x, wide_dy = wide(x, dy)
        unit = (N + 4) * 2.0**-24
        assert (np.abs(dw - wide_x.T @ wide_dy) <= unit * (np.abs(wide_x).T @ np.abs(wide_dy))).all()
        if has_bias:
            assert (np.abs(db - wide_dy.sum(0)) <= unit * np.abs(wide_dy).sum(0)).all()


@pytest.mark.parametrize(
    ("sizes", "pays"),
    [((64, 256, 1024), True), ((63, 256, 1024), False), ((64, 250, 256), False), ((64, 256, 250), False)],
)
def test_few_rows_and_odd_widths_are_left_to_a_library(sizes, pays):
    N, I, O = sizes
    x, y = (np.empty((N, columns), np.uint16) for columns in (I, O))
    assert tiles.pays(x, y) is pays
    assert not tiles.pays(x.astype(np.float32), y.astype(np.float32))


@pytest.mark.parametrize("there", [True, False])
def test_the_twin_calls_the_library_only_without_tiles(monkeypatch, there):
    called = []
    library = CBLAS(lambda *_: called.append(1))
    at = ctypes.cast(library, ctypes.c_void_p).value
    monkeypatch.setattr(linear, "products", lambda: Products(at, at, at))
    monkeypatch.setattr(tiles, "available", lambda: there)
    x, w, b, dy = drawn(4, (200, 64), (64, 96), 96, (200, 96))
    _, cache = linear.linear(x, w, b)
    linear.linear_backward(dy, cache)
    assert bool(called) is not there


@pytest.mark.parametrize("feature", ["amx-bf16", "amx-tile", "avx512bf16", "avx512bw"])
def test_it_does_not_run_without_an_instruction_that_it_needs(monkeypatch, feature):
    monkeypatch.setattr(config, "CPU_FEATURES", f"{config.CPU_FEATURES},-{feature}")
    monkeypatch.setattr(tiles.numba_amx, "available", tiles.numba_amx.available.__wrapped__)
    assert not tiles.available()

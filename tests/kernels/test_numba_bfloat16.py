"""Products of bfloat16 matrices with AVX512-BF16, against products in float64."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba")
numba_bfloat16 = pytest.importorskip("scratchformer.kernels.numba_bfloat16")
bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

from scratchformer.kernels.mkl_products import CBLAS, NO_TRANSPOSE, ROWS, TRANSPOSE  # noqa: E402
from scratchformer.kernels.numba_code import config  # noqa: E402

R, C, H, W, D = (getattr(numba_bfloat16, name) for name in ("ROWS", "COLUMNS", "HEIGHT", "WIDTH", "DEPTH"))
SIZES = [(1, 1, 1), (R, C, 2), (R + 1, C + 1, 3), (2 * R - 1, 2 * C, 65), (H + 1, W + 1, D + 1), (3, 2 * W, 2 * D)]


@pytest.fixture
def multiply():
    if not numba_bfloat16.available():
        pytest.skip("for processors with AVX512-BF16")
    return CBLAS(numba_bfloat16.address())


@pytest.mark.parametrize(
    ("features", "found"),
    [("+avx512bw,+avx512bf16", True), ("+avx512bw,+avx512bf16,-avx512bw", False), ("+avx512bw", False)],
)
def test_the_instructions_need_two_features(monkeypatch, features, found):
    monkeypatch.setattr(numba_bfloat16, "LANES", 16)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert numba_bfloat16.available() is found


def stored(x, transposed, more):
    """x, or its transpose, between two rows of NaN, and with `more` columns of NaN on the right."""
    x = x.T if transposed else x
    room = np.full((x.shape[0] + 2, x.shape[1] + more), np.nan, x.dtype)
    room[1:-1, : x.shape[1]] = x
    return room


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (-0.5, 3.0)])
@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_product_of_any_size_is_within_the_bounds_of_its_sums(multiply, sizes, more, alpha, beta):
    """What c holds is not read if β is 0. What lies around a and b is not read, and what lies around c not written."""
    draw, (m, n, k) = np.random.default_rng(0), sizes
    for ta, tb in itertools.product((False, True), repeat=2):
        a, b = (draw.standard_normal(shape).astype(bfloat16) for shape in ((m, k), (k, n)))
        before = draw.standard_normal((m, n)).astype(np.float32) if beta else np.full((m, n), np.nan, np.float32)
        left, right, c = stored(a, ta, more), stored(b, tb, more), stored(before, False, more)
        flags = [TRANSPOSE if t else NO_TRANSPOSE for t in (ta, tb)]
        factors = left[1:].ctypes.data, left.shape[1], right[1:].ctypes.data, right.shape[1]
        multiply(ROWS, *flags, m, n, k, alpha, *factors, beta, c[1:].ctypes.data, c.shape[1])
        wide_a, wide_b, old = (x.astype(np.float64) for x in (a, b, before if beta else np.zeros_like(before)))
        bound = (k + 4) * 2.0**-24 * (abs(alpha) * np.abs(wide_a) @ np.abs(wide_b) + abs(beta * old))
        assert (np.abs(c[1:-1, :n] - (alpha * wide_a @ wide_b + beta * old)) <= bound).all()
        assert np.isnan(c[1:-1, n:]).all() and np.isnan(c[[0, -1]]).all()


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.0), (1.0, 5.0), (2.0, 10.0)])
def test_a_sum_of_no_products_is_zero(multiply, beta, expected):
    c = np.full((2, 3), 5, np.float32)
    nothing = np.empty(0, bfloat16).ctypes.data
    sizes = 2, 3, 0, 1.0, nothing, 0, nothing, 3
    multiply(ROWS, NO_TRANSPOSE, NO_TRANSPOSE, *sizes, beta, c.ctypes.data, 3)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize(("a", "b", "expected"), [(-126, 0, 2.0**-126), (-127, 1, 0), (-127, 100, 0), (-64, -63, 0)])
def test_numbers_and_sums_that_are_subnormal_are_zero(multiply, a, b, expected):
    """Powers of two, given by their exponents."""
    left, right, c = np.array([2.0**a], bfloat16), np.array([2.0**b], bfloat16), np.empty(1, np.float32)
    at = left.ctypes.data, 1, right.ctypes.data, 1, 0.0, c.ctypes.data, 1
    multiply(ROWS, NO_TRANSPOSE, NO_TRANSPOSE, 1, 1, 1, 1.0, *at)
    assert left[0] > 0 and c[0] == expected


def test_an_error_inside_makes_the_result_nan(multiply):
    """As without memory: there is no array with a negative size either."""
    c = np.zeros((2, 4), np.float32)
    at = np.empty(0, bfloat16).ctypes.data
    multiply(ROWS, NO_TRANSPOSE, NO_TRANSPOSE, 2, 3, -9, 1.0, at, 3, at, 3, 0.0, c.ctypes.data, 4)
    assert np.isnan(c[:, :3]).all() and not c[:, 3].any()

"""A NaN stays a NaN in every function and sum, as in NumPy."""

import numpy as np
import pytest

from scratchformer.compiler.cuda_code import cuda_source
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.dispatch import backward, operation


def each(x, v):
    """A function in each row, of which some elements are NaN.

    Forward and backward:

        m_n = max_c(x_nc)
        y_nc = exp(x_nc) where n = 0, log(x_nc) where n = 1, log1p(x_nc) where n = 2, tanh(x_nc) where n = 3,
        erf(x_nc) where n = 4, sin(x_nc) where n = 5, cos(x_nc) where n = 6, √x_nc where n = 7, |x_nc| where n = 8,
        ⌊x_nc⌋ where n = 9, max(x_nc, v_nc) where n = 10, max(v_nc, x_nc) where n = 11, min(x_nc, v_nc) where n = 12,
        min(v_nc, x_nc) where n = 13, x_nc mod 2 where n = 14, x_nc^3 where n = 15, x_nc [x_nc > 0] where n = 16,
        max(0, min(x_nc, 1)) where n = 17, m_n elsewhere
        dx_nc = dy_nc        dv_nc = 0
    """


def each_backward(dy, x):
    pass


def expected(x):
    nan = np.isnan(x)
    nan[18:] = nan[18:].any(-1, keepdims=True)
    return nan


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [3, 40])
def test_no_function_hides_a_nan(columns, dtype):
    pytest.importorskip("numba")
    from scratchformer.compiler.numba_target import NumbaTarget

    twin = CompiledTwin(operation(each), backward(each_backward), NumbaTarget())
    x = np.random.default_rng(0).uniform(0.5, 2, (18 + columns, columns)).astype(dtype)
    x[:18, 1] = np.nan
    x[18:][np.arange(columns), np.arange(columns)] = np.nan  # in each column, of a row with its maximum
    v = np.ones_like(x)
    assert twin.fits(x, v)
    np.testing.assert_array_equal(np.isnan(twin.forward(x, v)[0]), expected(x))


def whole(x):
    """The maximum of a row, beside its numbers.

    Forward and backward:

        y_nc = x_nc + max_c(x_nc)        dx_nc = dy_nc
    """


def whole_backward(dy, x):
    pass


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 16, 33, 70])
def test_the_maximum_of_a_row_with_a_nan_is_nan(columns, dtype):
    pytest.importorskip("numba")
    from scratchformer.compiler.numba_target import NumbaTarget

    twin = CompiledTwin(operation(whole), backward(whole_backward), NumbaTarget())
    x = np.random.default_rng(0).standard_normal((columns + 2, columns)).astype(dtype)
    x[np.arange(columns), np.arange(columns)] = np.nan
    x[-1, 0], x[-1, -1] = -np.inf, np.inf  # whose sum is NaN
    assert twin.fits(x)
    assert np.isnan(twin.forward(x)[0]).all(-1).tolist() == [True] * columns + [False, False]


def test_cuda_takes_no_maximum_that_hides_a_nan():
    source = cuda_source(Derivation(whole, whole_backward).compile().forward)
    assert "max0 = greater(max0, " in source

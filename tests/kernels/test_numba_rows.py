"""Loops over rows that compiled twins share."""

import ml_dtypes
import numpy as np
import pytest

from scratchformer import ops
from scratchformer.dispatch import fast

with fast():
    code = pytest.importorskip("scratchformer.kernels.numba_code")
    rows = pytest.importorskip("scratchformer.kernels.numba_rows")


def maxima(x):
    return loop(code.as_bits(x), np.empty(len(x), np.float64))


@code.compiled
def loop(x, found):
    for i in range(len(found)):
        found[i] = rows.maximum_of_row(x, i)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("columns", [1, 3, 16, 17, 31, 32, 33, 70])
def test_the_maximum_of_a_row_may_be_in_any_column(columns, dtype):
    x = np.full((columns, columns + 1), -9, dtype)
    x[:, columns] = -7  # after the end of the row
    np.fill_diagonal(x, -8)
    assert (maxima(x[:, :columns]) == -8).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("column", [0, 1, 16, 40, 69])
def test_infinity_is_a_maximum(column, dtype):
    x = np.zeros((2, 70), dtype)
    x[1, column] = np.inf
    assert maxima(x).tolist() == [0, np.inf]
    assert maxima(-x).tolist() == [0, 0]


@pytest.mark.parametrize("column", [0, 1, 15, 16, 40, 69])
def test_losses_of_rows_with_nan_are_nan(column):
    """Whatever the maximum of such a row is."""
    z = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    z[1, column] = np.nan
    with fast(), np.errstate(invalid="ignore"):
        loss, cache = ops.cross_entropy(z, np.zeros(3, int))
        dz = ops.cross_entropy_backward(1.0, cache)
    assert np.isnan(loss)
    assert np.isnan(dz[1]).all() and np.isfinite(dz[[0, 2]]).all()

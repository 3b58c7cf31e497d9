"""Blocks of rows in NumPy give what the references give."""

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.compiler import numpy_code
from scratchformer.compiler.numpy_target import NumpyTarget
from scratchformer.compiler.twins import Twin
from scratchformer.dispatch import TwinCache
from scratchformer.testing.cases import OPERATIONS, Draw
from scratchformer.testing.contracts import as_tuple

PRODUCTS = ("attention", "dense", "linear", "relative")
COLUMN = {"C": 1, "D": 1, "F": 1, "V": 1}
WIDE = {"B": 3, "T": 1, "C": 129, "F": 129, "V": 129, "D": 65}


def as_type(dtype, args):
    return [x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in args]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [{}, COLUMN, WIDE], ids=["odd", "one column", "wide"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith(PRODUCTS)])
def test_blocks_agree_with_the_reference(name, sizes, dtype, monkeypatch):
    monkeypatch.setattr(numpy_code, "BLOCK", 50)  # so that there are several
    draw = Draw(1, largest=7)
    draw.sizes |= sizes
    case = OPERATIONS[name](draw)
    args, twin = as_type(dtype, case.args), Twin(case.op, case.op_backward, NumpyTarget())
    if not twin.arrays:
        pytest.skip("its derivation cannot be compiled")
    assert twin.fits(*args, **case.options)
    y, cache = case.op.reference(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(np.shape(y)).astype(dtype)[()]
    found, kept = twin.forward(*args, **case.options)
    results = [found, *as_tuple(twin.backward(dy, kept))]
    for result, expected in zip(results, [y, *as_tuple(case.op_backward.reference(dy, cache))], strict=True):
        assert result.shape == expected.shape and result.dtype == expected.dtype
        atol = (1e-12 if dtype == np.float64 else 1e-5) * max(1, np.abs(expected).max())
        np.testing.assert_allclose(result, expected, rtol=0, atol=atol)


def test_the_reference_takes_over_where_a_sum_overflows():
    x, gamma = np.array([[1e25, -1e25, 3e25]], np.float32), np.ones(3, np.float32)
    twin = Twin(ops.layernorm, ops.layernorm_backward, NumpyTarget())
    y, _ = twin.forward(x, gamma, gamma)
    np.testing.assert_array_equal(y, ops.layernorm.reference(x, gamma, gamma)[0])


def test_blocks_run_where_they_save_time():
    """For a long chain of operations, unless a condition depends on the place in a row; and for large arrays only."""
    pytest.importorskip("scratchformer.kernels")
    x, gamma = np.ones((1024, 64)), np.ones(64)
    assert isinstance(ops.layernorm(x, gamma, gamma)[1], TwinCache)
    assert isinstance(ops.silu(x)[1], TwinCache)
    assert not isinstance(ops.layernorm(x[:-1], gamma, gamma)[1], TwinCache)
    assert not isinstance(ops.relu(x)[1], TwinCache)
    assert not isinstance(ops.cross_entropy(x, np.zeros(1024, int))[1], TwinCache)

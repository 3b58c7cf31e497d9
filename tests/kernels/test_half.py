"""Half precision without the extra `fast`: no operation uses NumPy's own products of half precision.

tests/testing/test_precision.py holds all other operations to their error bounds, with twins and without.
"""

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.testing.contracts import as_tuple, is_floating

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

pytest.importorskip("scratchformer.kernels.numpy_half")


def operations(dtype):
    draw = np.random.default_rng(0)
    x, w = (draw.standard_normal(shape).astype(dtype) for shape in ((96, 96), (96, 96)))
    q = draw.standard_normal((1, 1, 64, 64)).astype(dtype)
    r, bias = draw.standard_normal((1, 127, 64)).astype(dtype), draw.standard_normal((1, 64)).astype(dtype)
    yield ops.linear, ops.linear_backward, x, w, w[0]
    yield ops.linear, ops.linear_backward, x, w.T
    yield ops.attention, ops.attention_backward, q, q, q, ops.Causal()
    yield ops.relative_attention, ops.relative_attention_backward, q, q, q, r, bias, bias


def test_products_are_those_of_float32():
    """Bit for bit in forward, and not NumPy's own of float16, which take a hundred times as long. Some arrays that the
    backward gets are rounded.
    """
    for op, op_backward, *args in operations(np.float16):
        y, kept = op(*args)
        assert kept.twin.forward.__module__.endswith(".numpy_half"), op.__name__
        wide, cache = op(*(x.astype(np.float32) if is_floating(x) else x for x in args))
        assert np.array_equal(y, wide.astype(np.float16)), op.__name__
        gradients, right = (as_tuple(op_backward(y.astype(c.dtype), k)) for c, k in ((y, kept), (wide, cache)))
        found, expected = (np.concatenate([g.ravel() for g in each]).astype(float) for each in (gradients, right))
        assert np.linalg.norm(found - expected) < 4 * UNIT["float16"] * np.linalg.norm(expected), op.__name__


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "attention" in name])
def test_attention_is_as_accurate_as_its_roundings(name, dtype):
    """All gradients together. Not every element is within the bound of the reference: as in FlashAttention, δ is a
    product of dy and y, which has been rounded.
    """
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    case = OPERATIONS[name](Draw(3))

    def gradients(dtype, args):
        args = [x.astype(dtype) if is_floating(x) else x for x in args]
        y, cache = case.op(*args, **case.options)
        assert y.dtype == dtype
        found = case.op_backward(np.ones_like(y), cache)
        assert {g.dtype for g in found} == {np.dtype(dtype)}
        return args, np.concatenate([g.ravel().astype(np.float64) for g in found])

    args, found = gradients(dtype, case.args)
    _, expected = gradients(np.float64, args)
    assert np.linalg.norm(found - expected) < 4 * UNIT[np.dtype(dtype).name] * np.linalg.norm(expected)


def arrays_in(cache):
    if isinstance(cache, np.ndarray):
        yield cache
    for part in cache if isinstance(cache, tuple) else ():
        yield from arrays_in(part)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_keeps_half_precision(dtype):
    """The arguments and y themselves, and statistics of rows in float32."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    for op, _, *args in operations(dtype):
        y, cache = op(*args)
        arrays = list(arrays_in(cache))
        given = [x for x in (*args, y) if isinstance(x, np.ndarray)]
        assert any(np.shares_memory(x, a) for x in arrays for a in given), op.__name__
        assert all(x.dtype == dtype or x.size < y.size for x in arrays), op.__name__


def test_half_and_float32_together_are_left_to_the_reference():
    x, w = np.ones((2, 3), np.float16), np.ones((3, 4), np.float32)
    y, cache = ops.linear(x, w)
    assert type(cache).__name__ == "LinearCache" and y.dtype == np.float16

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import ids as token_ids

TABLE = np.arange(12.0).reshape(4, 3)


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_looks_rows_up(device):
    y, _ = ops.embedding(to_device(np.array([[3, 0], [1, 3]]), device), to_device(TABLE, device))
    assert to_cpu(y).tolist() == [[[9, 10, 11], [0, 1, 2]], [[3, 4, 5], [9, 10, 11]]]


@given(token_ids("B T", high=3), st.sampled_from([np.int32, np.int64, np.uint8]))
def test_a_repeated_token_collects_every_gradient(device, ids, dtype):
    """The gradient agrees with a loop that adds one row at a time."""
    dy = np.random.default_rng(0).standard_normal((*ids.shape, 3))
    expected = np.zeros((4, 3))
    for index in np.ndindex(ids.shape):
        expected[ids[index]] += dy[index]
    _, cache = ops.embedding(to_device(ids.astype(dtype), device), to_device(TABLE, device))
    np.testing.assert_allclose(to_cpu(ops.embedding_backward(to_device(dy, device), cache)), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_adds_into_out(dtype, device):
    ids = to_device(np.array([1, 1, 2]), device)
    _, cache = ops.embedding(ids, to_device(TABLE, device, dtype))
    out = device.xp.ones((4, 3), dtype=dtype)
    dtable = ops.embedding_backward(device.xp.ones((3, 3), dtype=dtype), cache, out=out)
    assert dtable is out
    assert to_cpu(out)[:, 0].tolist() == [1, 3, 2, 1]


def test_a_frequent_token_is_summed_in_float32_for_float16(device):
    """A float16 sum of ones would stop at 2048."""
    _, cache = ops.embedding(device.xp.zeros(5000, dtype=np.int64), device.xp.ones((2, 3), dtype=np.float16))
    for out in None, device.xp.zeros((2, 3), dtype=np.float16):
        dtable = ops.embedding_backward(device.xp.ones((5000, 3), dtype=np.float16), cache, out)
        assert dtable.dtype == np.float16
        assert to_cpu(dtable).tolist() == [[5000] * 3, [0] * 3]


def test_out_may_be_a_transposed_view():
    """Its elements are not in the order of their rows."""
    _, cache = ops.embedding(np.array([1, 1, 2]), TABLE)
    out = np.ones((3, 4)).T
    assert ops.embedding_backward(np.ones((3, 3)), cache, out=out) is out
    assert out[:, 0].tolist() == [1, 3, 2, 1]


def test_small_integers_address_a_large_table(device):
    """The place of an element in memory is past 255, the largest uint8."""
    _, cache = ops.embedding(to_device(np.array([3], np.uint8), device), device.xp.ones((4, 100)))
    assert to_cpu(ops.embedding_backward(device.xp.ones((1, 100)), cache)).tolist() == [[0] * 100] * 3 + [[1] * 100]


@pytest.mark.parametrize("wrong", [4, -1])
def test_ids_out_of_range(wrong, device):
    with pytest.raises(IndexError, match=f"ids: expected values from 0 to 3, got {wrong}"):
        ops.embedding(to_device(np.array([0, wrong]), device), to_device(TABLE, device))


def test_a_table_that_does_not_fit():
    with pytest.raises(ValueError, match=r"table: expected \(V, C\), got \(4,\)"):
        ops.embedding(np.array([0, 1]), np.ones(4))


def test_out_must_have_the_shape_of_the_table(device):
    _, cache = ops.embedding(to_device(np.array([0, 2]), device), device.xp.ones((3, 4)))
    dy = device.xp.ones((2, 4))
    with pytest.raises(ValueError, match=r"out: expected \(3, 4\), got \(1, 4\)"):
        ops.embedding_backward(dy, cache, out=device.xp.ones((1, 4)))
    with pytest.raises(TypeError, match="out: expected a floating-point array, got int64"):
        ops.embedding_backward(dy, cache, out=device.xp.ones((3, 4), dtype=np.int64))

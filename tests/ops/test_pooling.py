import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import arrays, lengths

POOLS = [
    (ops.mean_pool, ops.mean_pool_backward, np.mean),
    (ops.max_pool, ops.max_pool_backward, np.max),
]


@st.composite
def padded(draw):
    """x (B, T, C) and lengths (B,), some of them possibly 0."""
    x = draw(arrays("B T C"))
    return x, draw(lengths("B", "T", min_length=0, fixed=dict(B=x.shape[0], T=x.shape[1])))


def test_gradients(case, check_gradients):
    check_gradients(case)


@pytest.mark.parametrize(("pool", "pool_backward", "reduce"), POOLS)
@given(padded())
def test_against_a_loop_over_sequences(device, pool, pool_backward, reduce, drawn):
    """Only positions within a sequence count, an empty sequence gives 0, and padding gets no gradient."""
    x, n = drawn
    y, cache = pool(to_device(x, device), to_device(n, device))
    expected = [reduce(x[b, : n[b]], axis=0) if n[b] else np.zeros(x.shape[2]) for b in range(len(x))]
    np.testing.assert_allclose(to_cpu(y), expected, rtol=1e-12, atol=1e-14 * np.abs(x).max())
    dx = to_cpu(pool_backward(device.xp.ones_like(y), cache))
    for b, length in enumerate(n):
        assert not dx[b, length:].any()
        np.testing.assert_allclose(dx[b].sum(axis=0), 1 if length else 0, rtol=1e-12)


@pytest.mark.parametrize(("pool", "pool_backward", "reduce"), POOLS)
def test_garbage_in_the_padding_does_not_matter(pool, pool_backward, reduce, device):
    x, n = np.random.default_rng(0).standard_normal((3, 6, 4)), to_device(np.array([6, 2, 1]), device)
    garbage = np.where(np.arange(6)[None, :, None] < to_cpu(n)[:, None, None], x, 1e6)
    (y, cache), (other, other_cache) = pool(to_device(x, device), n), pool(to_device(garbage, device), n)
    assert np.array_equal(to_cpu(y), to_cpu(other))
    dy = device.xp.ones_like(y)
    assert np.array_equal(to_cpu(pool_backward(dy, cache)), to_cpu(pool_backward(dy, other_cache)))


@pytest.mark.parametrize(("pool", "pool_backward", "reduce"), POOLS)
def test_without_lengths_everything_counts(pool, pool_backward, reduce, device):
    x = np.random.default_rng(0).standard_normal((3, 6, 4))
    np.testing.assert_allclose(to_cpu(pool(to_device(x, device))[0]), reduce(x, axis=1), rtol=1e-12)


def test_in_a_tie_the_first_maximum_gets_the_gradient(device):
    y, cache = ops.max_pool(device.xp.zeros((1, 3, 2)))
    assert to_cpu(ops.max_pool_backward(device.xp.ones_like(y), cache)).tolist() == [[[1, 1], [0, 0], [0, 0]]]


def test_mean_of_a_long_text_runs_in_float32_for_float16(device):
    """The sum, 100,000, overflows float16; the mean does not."""
    y, _ = ops.mean_pool(20 * device.xp.ones((1, 5000, 2), dtype=np.float16))
    np.testing.assert_allclose(to_cpu(y), 20, rtol=1e-3)


@pytest.mark.parametrize(("pool", "pool_backward", "reduce"), POOLS)
def test_shapes_that_do_not_fit(pool, pool_backward, reduce):
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\), got \(3, 4\)"):
        pool(np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"lengths: expected \(3\), got \(2,\)"):
        pool(np.ones((3, 4, 5)), np.ones(2, dtype=int))
    with pytest.raises(TypeError, match=r"lengths: expected an array of integers \(B,\), got list"):
        pool(np.ones((3, 4, 5)), [1, 2, 3])
    with pytest.raises(ValueError, match=r"^lengths: expected values from 0 to 4, got -1$"):
        pool(np.ones((3, 4, 5)), np.array([1, -1, 4]))
    _, cache = pool(np.ones((3, 4, 5)))
    with pytest.raises(ValueError, match=r"dy: expected \(3, 5\), got \(3, 1\)"):
        pool_backward(np.ones((3, 1)), cache)


def test_without_positions():
    empty = np.ones((2, 0, 3))
    assert ops.mean_pool(empty)[0].tolist() == [[0, 0, 0]] * 2
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\) with at least one position, got \(2, 0, 3\)"):
        ops.max_pool(empty)

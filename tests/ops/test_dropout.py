import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.ops.dropout import decide
from scratchformer.rng import Key

COUNT = 200_000


def dropped_ones(p, key, size=COUNT):
    return ops.dropout(np.ones(size), p, key)[0]


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(st.integers(0, 2**32), st.floats(0, 0.95))
def test_the_same_key_drops_the_same_elements_on_every_backend(device, seed, p):
    x = np.random.default_rng(seed).standard_normal((3, 5, 7))
    here, there = ops.dropout(x, p, Key(seed))[0], ops.dropout(to_device(x, device), p, Key(seed))[0]
    assert np.array_equal(here, to_cpu(there))
    assert np.array_equal(here, ops.dropout(x, p, Key(seed))[0])


def test_different_keys_drop_different_elements():
    """As in a training step: another seed, step, micro-batch or layer gives another key."""
    base = Key(1, 2, 3)
    keys = [base, Key(2, 2, 3), Key(1, 3, 3), Key(1, 2, 4), base.fold("a"), base.fold("b"), base.fold(0), base.fold(1)]
    masks = [dropped_ones(0.5, key, 4000) > 0 for key in keys]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs((mask == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_rate_and_expectation(p):
    """A fraction p is dropped, and the mean of y is x, both to within five standard errors."""
    y = dropped_ones(p, Key(5))
    error = 5 * np.sqrt(p * (1 - p) / COUNT)
    assert abs((y == 0).mean() - p) <= error + 2**-16
    assert abs(y.mean() - 1) <= error / (1 - p) + 1e-12
    assert len(np.unique(y)) == (1 if p == 0 else 2)


@pytest.mark.parametrize("halves", [1, 3, 5, 2**17 - 1])
def test_a_half_is_rounded_up_as_in_the_derivation(halves):
    p = halves / 2**17  # halfway between two multiples of 1/65536
    r = min((halves + 1) / 2, 65535) / 65536
    _, cache = ops.dropout(np.ones(4), p, Key(0))
    assert decide(cache.p, cache.u, np.ones(4))[1] == 1 / (1 - r)


def test_neighbours_are_independent():
    kept = dropped_ones(0.5, Key(6)) > 0
    for distance in (1, 2, 3, 4, 8, 128):
        agreement = (kept[distance:] == kept[:-distance]).mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(COUNT - distance)


def test_backward_uses_the_mask_of_its_own_forward(device):
    """A second forward, between a forward and its backward, changes nothing."""
    x, dy = device.xp.ones((4, 50)), device.xp.ones((4, 50))
    first, cache = ops.dropout(x, 0.5, Key(1))
    second, other = ops.dropout(x, 0.5, Key(2))
    assert np.array_equal(to_cpu(ops.dropout_backward(dy, cache)), to_cpu(first))
    assert np.array_equal(to_cpu(ops.dropout_backward(dy, other)), to_cpu(second))
    assert not np.array_equal(to_cpu(first), to_cpu(second))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_p_out_of_range(p):
    with pytest.raises(ValueError, match=f"p: expected 0 <= p < 1, got {p}"):
        ops.dropout(np.ones(3), p, Key(0))


@pytest.mark.parametrize("p", ["0.5", None, True, np.ones(3)], ids=repr)
def test_p_that_is_not_a_number(p):
    for dropout in (ops.dropout, ops.dropout.reference):
        with pytest.raises(TypeError, match=r"^p: expected a number, got "):
            dropout(np.ones(3), p, Key(0))


def test_half_precision_is_rounded_once():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float16)
    for p in 0.1, 0.3:
        y, cache = ops.dropout(x, p, Key(0))
        expected, wide = ops.dropout(x.astype(np.float32), p, Key(0))
        np.testing.assert_array_equal(y, expected.astype(np.float16))
        dx = ops.dropout_backward(x, cache)
        np.testing.assert_array_equal(dx, ops.dropout_backward(x.astype(np.float32), wide).astype(np.float16))

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device

X = np.arange(24.0).reshape(2, 4, 3)  # (B, T, C)


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_takes_the_vectors_at_the_places_of_each_row(device):
    y, _ = ops.gather(to_device(X, device), to_device(np.array([[3, 0], [1, 1]]), device))
    assert to_cpu(y).tolist() == [[[9, 10, 11], [0, 1, 2]], [[15, 16, 17], [15, 16, 17]]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_a_place_collects_the_gradients_of_all_that_took_it(device, dtype):
    """The gradient agrees with a loop that adds one vector at a time."""
    places = np.array([[3, 0, 3], [1, 1, 1]], dtype)
    dy = np.random.default_rng(0).standard_normal((2, 3, 3))
    expected = np.zeros(X.shape)
    for b, k in np.ndindex(places.shape):
        expected[b, places[b, k]] += dy[b, k]
    _, cache = ops.gather(to_device(X, device), to_device(places, device))
    np.testing.assert_allclose(to_cpu(ops.gather_backward(to_device(dy, device), cache)), expected, atol=1e-12)


def test_invalid_arguments(device):
    x = to_device(X, device)
    for wrong in (4, -1):  # would be in another row
        with pytest.raises(IndexError, match=f"places: expected values from 0 to 3, got {wrong}"):
            ops.gather(x, to_device(np.array([[0], [wrong]]), device))
    with pytest.raises(ValueError, match=r"places: expected \(2, K\), got \(3, 1\)"):
        ops.gather(x, to_device(np.zeros((3, 1), int), device))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\), got \(2, 4\)"):
        ops.gather(x[:, :, 0], to_device(np.zeros((2, 1), int), device))

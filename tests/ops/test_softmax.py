import numpy as np
import pytest
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import arrays


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(arrays("B T V"))
def test_a_row_is_a_distribution_and_shifting_it_changes_nothing(device, z):
    y = to_cpu(ops.softmax(to_device(z, device))[0])
    assert (y >= 0).all()
    np.testing.assert_allclose(y.sum(axis=-1), 1, rtol=1e-12)
    shifted = to_cpu(ops.softmax(to_device(z + 7, device))[0])
    np.testing.assert_allclose(shifted, y, rtol=1e-9, atol=1e-12)


def test_values(device):
    z = to_device(np.log(np.array([[1.0, 2.0, 5.0], [4.0, 4.0, 8.0]])), device)
    expected = np.array([[0.125, 0.25, 0.625], [0.25, 0.25, 0.5]])
    np.testing.assert_allclose(to_cpu(ops.softmax(z)[0]), expected, rtol=1e-14)
    np.testing.assert_allclose(to_cpu(ops.log_softmax(z)[0]), np.log(expected), rtol=1e-14)


@given(arrays("B V", scales=(1.0,)))
def test_backward_against_the_whole_jacobian(device, z):
    """dz = Jᵀ dy for each row, with J_ik = y_i (δ_ik − y_k) written out; other rows do not matter."""
    dy = np.random.default_rng(1).standard_normal(z.shape)
    y, cache = ops.softmax(to_device(z, device))
    dz = to_cpu(ops.softmax_backward(to_device(dy, device), cache))
    for row, probabilities in enumerate(to_cpu(y)):
        jacobian = np.diag(probabilities) - np.outer(probabilities, probabilities)
        np.testing.assert_allclose(dz[row], jacobian.T @ dy[row], rtol=1e-10, atol=1e-14)


def test_long_rows_are_summed_in_float32_for_float16(device):
    """With 70,000 equal scores the sum of the exponentials overflows float16."""
    z = device.xp.zeros((1, 70_000), dtype=np.float16)
    assert to_cpu(ops.softmax(z)[0]).max() == np.float16(1 / 70_000)
    np.testing.assert_allclose(to_cpu(ops.log_softmax(z)[0]), -np.log(70_000), rtol=1e-3)


@pytest.mark.parametrize("shape", [(2, 0), ()])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (ops.softmax, "z"),
        (ops.log_softmax, "z"),
        (lambda z: ops.cross_entropy(z, np.zeros(2, int)), "logits"),
        (lambda z: ops.cross_entropy.reference(z, np.zeros(2, int)), "logits"),
    ],
)
def test_rows_without_columns(op, name, shape):
    with pytest.raises(ValueError, match=rf"^{name}: expected at least one column, got \({str(shape)[1:-1]}\)$"):
        op(np.zeros(shape))


TAIL = np.exp(-37.43)  # in [1 − TAIL, TAIL] the first number rounds to 1


@pytest.mark.parametrize(
    ("name", "y", "dy", "dz"),
    [
        ("softmax", [1, TAIL], [1.0, 0.0], [TAIL, -TAIL]),
        ("softmax", [1, TAIL], [1.0, 2.0], [-TAIL, TAIL]),
        ("log_softmax", [-TAIL, -37.43], [1.0, 0.0], [TAIL, -TAIL]),
    ],
)
def test_what_is_left_of_a_probability_of_nearly_1_keeps_its_digits(device, name, y, dy, dz):
    found, cache = getattr(ops, name)(to_device(np.array([[37.43, 0.0], [0.0, 37.43]]), device))
    gradient = getattr(ops, f"{name}_backward")(to_device(np.array([dy, dy[::-1]]), device), cache)
    np.testing.assert_allclose(to_cpu(found), [y, y[::-1]], rtol=1e-13)
    np.testing.assert_allclose(to_cpu(gradient), [dz, dz[::-1]], rtol=1e-13)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_backward_in_half_precision_rounds_only_its_result(name, device):
    """It computes in float32 with the y that the cache holds."""
    draw = np.random.default_rng(0)
    z, dy = (draw.normal(size=(20, 9)).astype(np.float16) for _ in "zd")
    y, cache = getattr(ops, name)(to_device(z, device))
    dx = getattr(ops, f"{name}_backward")(to_device(dy, device), cache)
    y, dy = to_cpu(y).astype(np.float64), dy.astype(np.float64)
    if name == "softmax":
        expected = y * (dy - (y * dy).sum(axis=-1, keepdims=True))
    else:
        expected = dy - np.exp(y) * dy.sum(axis=-1, keepdims=True)
    assert dx.dtype == np.float16
    np.testing.assert_allclose(to_cpu(dx).astype(np.float64), expected, rtol=2**-11 * 1.01, atol=2**-20)

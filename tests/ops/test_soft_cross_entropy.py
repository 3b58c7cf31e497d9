import numpy as np
import pytest
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import arrays

Z, IDS = np.array([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]]), np.array([0, 2])


def run(device, z, t, dloss=1.0):
    loss, cache = ops.soft_cross_entropy(to_device(z, device), to_device(t, device))
    assert loss.shape == ()
    return float(loss), *map(to_cpu, ops.soft_cross_entropy_backward(dloss, cache))


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(arrays("B T V", scales=(0.1, 1.0, 10.0)))
def test_targets_that_are_certain(device, z):
    """They give the cross-entropy of these classes, and its gradient."""
    ids = np.arange(z.shape[0] * z.shape[1]).reshape(z.shape[:2]) % z.shape[2]
    loss, dz, _ = run(device, z, np.eye(z.shape[2])[ids], 3.0)
    expected, cache = ops.cross_entropy(z, ids)
    np.testing.assert_allclose(loss, float(expected), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dz, ops.cross_entropy_backward(3.0, cache), rtol=1e-9, atol=1e-12)


@given(arrays("B T V", scales=(0.1, 1.0, 10.0)))
def test_the_loss_is_least_where_the_predictions_agree(device, z):
    """There it is the entropy of the targets, and the gradient of the logits is 0."""
    t = softmax(z)
    loss, dz, _ = run(device, z, t)
    np.testing.assert_allclose(loss, -(t * np.log(t)).sum(axis=-1).mean(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dz, np.zeros_like(z), atol=1e-12)
    assert run(device, z + np.arange(z.shape[2]), t)[0] > loss


def test_a_mean_over_the_rows(device):
    t = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    losses, gradients, _ = zip(*(run(device, Z[[n]], t[[n]]) for n in range(2)), strict=True)
    loss, dz, _ = run(device, Z, t)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-12)
    np.testing.assert_allclose(dz, np.concatenate(gradients) / 2, rtol=1e-12)


def test_large_logits(device):
    """exp(1000) would overflow."""
    loss, dz, _ = run(device, np.array([[1000.0, 0.0]]), np.array([[0.5, 0.5]]))
    assert loss == 500 and dz.tolist() == [[0.5, -0.5]]


def test_a_class_that_is_impossible_adds_nothing(device):
    """Its target is 0 and its logit −∞. The loss and the other gradients are the same as without it."""
    loss, dz, _ = run(device, np.append(Z, [[-np.inf]] * 2, axis=1), np.array([[0.2, 0.3, 0.5, 0.0]] * 2))
    expected = run(device, Z, np.array([[0.2, 0.3, 0.5]] * 2))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
    np.testing.assert_allclose(dz, np.append(expected[1], [[0.0]] * 2, axis=1), rtol=1e-12, atol=1e-15)


def test_the_targets_may_have_more_digits(device):
    """The loss has the type of the logits."""
    t = to_device(np.eye(3)[IDS], device)
    loss, cache = ops.soft_cross_entropy(to_device(Z.astype(np.float32), device), t)
    dlogits, dtargets = ops.soft_cross_entropy_backward(1.0, cache)
    assert (loss.dtype, dlogits.dtype, dtargets.dtype) == (np.float32, np.float32, np.float64)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"targets: expected \(2, 3\), got \(2, 2\)"):
        ops.soft_cross_entropy(Z, Z[:, :2])
    with pytest.raises(TypeError, match="targets: expected a floating-point array"):
        ops.soft_cross_entropy(Z, IDS)
    with pytest.raises(ValueError, match=r"logits: expected at least one row, got \(0, 3\)"):
        ops.soft_cross_entropy(Z[:0], Z[:0])


def test_what_is_left_of_a_probability_of_nearly_1_keeps_its_digits(device):
    tail, z = np.exp(-37.43), np.array([[37.43, 0.0], [0.0, 37.43]])
    loss, dlogits, dtargets = run(device, z, np.eye(2))
    np.testing.assert_allclose(loss, tail, rtol=1e-13)
    np.testing.assert_allclose(dlogits, [[-tail / 2, tail / 2], [tail / 2, -tail / 2]], rtol=1e-13)
    np.testing.assert_allclose(np.diag(dtargets), [tail / 2, tail / 2], rtol=1e-13)

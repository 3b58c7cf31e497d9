import numpy as np
import pytest
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import tensors


def cube(x):
    return x * x * x, x


def cube_backward(dy, x):
    return 3 * dy * x * x


def test_gradients(case, check_gradients):
    check_gradients(case)


@pytest.mark.parametrize("activation", [*ops.ACTIVATIONS, (cube, cube_backward)], ids=[*ops.ACTIVATIONS, "a pair"])
@given(tensors("B T I", "I O", "O", "B T O"))
def test_is_an_affine_map_and_an_activation(device, activation, drawn):
    """Output and gradients agree with the two operations, one after the other."""
    x, w, b, dy = (to_device(a, device) for a in drawn)
    y, cache = ops.dense(x, w, b, activation)
    h, affine = ops.linear(x, w, b)
    op, op_backward = ops.activation_pair(activation)
    expected, activated = op(h)
    dh = op_backward(dy, activated)
    for found, other in zip(
        (y, *ops.dense_backward(dy, cache)), (expected, *ops.linear_backward(dh, affine)), strict=True
    ):
        # For very negative x, 1 + tanh cancels, and y = x Φ(x) is only exact to x times the last digit of 1.
        scale = max(np.abs(to_cpu(other)).max(), np.abs(to_cpu(h)).max())
        np.testing.assert_allclose(to_cpu(found), to_cpu(other), rtol=1e-10, atol=1e-12 * scale)


def test_an_unknown_activation():
    x, w, b = np.ones((2, 3)), np.ones((3, 4)), np.ones(4)
    with pytest.raises(ValueError, match="activation: expected one of relu, gelu, gelu_tanh, silu, got 'tanh'"):
        ops.dense(x, w, b, "tanh")
    with pytest.raises(TypeError, match=r"activation: expected a name or a pair \(op, op_backward\), got None"):
        ops.dense(x, w, b, None)


def test_shapes_that_do_not_fit(device):
    x, w = device.xp.ones((2, 3)), device.xp.ones((3, 4))
    with pytest.raises(ValueError, match=r"b: expected \(4\), got \(3,\)"):
        ops.dense(x, w, device.xp.ones(3))
    with pytest.raises(ValueError, match=r"x: expected \(..., 3\), got \(2, 4\)"):
        ops.dense(device.xp.ones((2, 4)), w, device.xp.ones(4))


@pytest.mark.parametrize("dense", [ops.dense, ops.dense.reference])
def test_a_masked_bias_is_refused(dense):
    with pytest.raises(TypeError, match=r"^b: expected a floating-point array, got MaskedArray"):
        dense(np.ones((2, 3)), np.ones((3, 4)), np.ma.ones(4))

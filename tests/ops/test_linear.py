import numpy as np
import pytest
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.dispatch import fast, reference_only
from scratchformer.testing.strategies import tensors


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_gradients_have_the_shapes_of_the_arguments(device):
    x, w, b = (device.xp.ones(shape) for shape in [(2, 3, 4), (4, 5), (5,)])
    y, cache = ops.linear(x, w, b)
    assert [d.shape for d in ops.linear_backward(y, cache)] == [(2, 3, 4), (4, 5), (5,)]
    y, cache = ops.linear(x, w)
    assert [d.shape for d in ops.linear_backward(y, cache)] == [(2, 3, 4), (4, 5)]


def test_sum_over_rows_runs_in_float32_for_float16(device):
    """A float16 sum of ones would stop at 2048."""
    x, w, b = (device.xp.ones(shape, dtype=np.float16) for shape in [(5000, 1), (1, 2), (2,)])
    y, cache = ops.linear(x, w, b)
    _, dw, db = ops.linear_backward(device.xp.ones_like(y), cache)
    assert to_cpu(dw).tolist() == [[5000, 5000]]
    assert to_cpu(db).tolist() == [5000, 5000]


def test_width_that_does_not_fit():
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        ops.linear(np.ones((4, 7, 256)), np.ones((512, 3)))


@pytest.mark.parametrize(("name", "I", "O"), [("x", 0, 3), ("w", 3, 0)])
def test_no_columns(name, I, O):
    with pytest.raises(ValueError, match=f"{name}: expected at least one column"):
        ops.linear(np.ones((4, I)), np.ones((I, O)))


def test_parameters_that_do_not_fit():
    x = np.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"w: expected \(I, O\), got \(4,\)"):
        ops.linear(x, np.ones(4))
    for shape in [(1,), (3, 5), ()]:
        with pytest.raises(ValueError, match=r"b: expected \(5\), got"):
            ops.linear(x, np.ones((4, 5)), np.ones(shape))


def cube(x):
    return x * x * x, x


def cube_backward(dy, x):
    return 3 * dy * x * x


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


def test_shapes_that_do_not_fit_a_dense_layer(device):
    x, w = device.xp.ones((2, 3)), device.xp.ones((3, 4))
    with pytest.raises(ValueError, match=r"b: expected \(4\), got \(3,\)"):
        ops.dense(x, w, device.xp.ones(3))
    with pytest.raises(ValueError, match=r"x: expected \(..., 3\), got \(2, 4\)"):
        ops.dense(device.xp.ones((2, 4)), w, device.xp.ones(4))


@pytest.mark.parametrize("dense", [ops.dense, ops.dense.reference])
def test_a_masked_bias_of_a_dense_layer_is_refused(dense):
    with pytest.raises(TypeError, match=r"^b: expected a floating-point array, got MaskedArray"):
        dense(np.ones((2, 3)), np.ones((3, 4)), np.ma.ones(4))


@pytest.mark.parametrize("twins", [reference_only, fast])
def test_the_gradient_of_the_bias_keeps_its_digits_over_many_rows(twins, combinations):
    """Added up one after another, 2¹⁵ rows have an error of about 58 units."""
    for drawn in combinations(2, mean=[0, 1]):
        dy = np.random.default_rng(drawn["seed"]).normal(drawn["mean"], size=(1 << 15, 16)).astype(np.float32)
        x, w, b = (np.ones(shape, np.float32) for shape in [(len(dy), 1), (1, 16), 16])
        with twins():
            _, cache = ops.linear(x, w, b)
            _, _, db = ops.linear_backward(dy, cache)
        expected, unit = dy.sum(axis=0, dtype=np.float64), 2**-24 * np.linalg.norm(dy, axis=0)
        np.testing.assert_array_less(abs(db - expected), 32 * np.maximum(unit, 2**-24 * abs(expected)))

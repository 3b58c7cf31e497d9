import math

import numpy as np
import pytest

from scratchformer import ops, reference_only
from scratchformer.backend import to_cpu, to_device

POINTS = np.array([-30.0, -5.0, -2.0, -1.0, -0.3, 0.0, 1e-8, 0.3, 1.0, 2.0, 5.0, 30.0])


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_relu(device):
    x = to_device(np.array([-2.0, -0.0, 0.0, 1e-30, 3.0]), device)
    y, cache = ops.relu(x)
    assert to_cpu(y).tolist() == [0, 0, 0, 1e-30, 3]
    assert to_cpu(ops.relu_backward(device.xp.ones_like(x), cache)).tolist() == [0, 0, 0, 1, 1]


def test_exact_gelu_is_x_times_the_normal_distribution_function(device):
    """Value and slope agree with the standard library's error function."""
    y, cache = ops.gelu(to_device(POINTS, device))
    slope = ops.gelu_backward(device.xp.ones_like(y), cache)
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in POINTS])
    density = np.array([math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in POINTS])
    np.testing.assert_allclose(to_cpu(y), POINTS * cdf, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(to_cpu(slope), cdf + POINTS * density, rtol=1e-12, atol=1e-14)


def test_tanh_gelu(device):
    """The value agrees with the formula of the paper, and the approximation is good to 5e-4 but not exact."""
    x = to_device(POINTS, device)
    y = to_cpu(ops.gelu(x, "tanh")[0])
    expected = [0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in POINTS]
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
    difference = np.abs(y - to_cpu(ops.gelu(x)[0])).max()
    assert 1e-5 < difference < 5e-4


def test_unknown_approximation():
    with pytest.raises(ValueError, match="approximate: expected 'none' or 'tanh', got 'erf'"):
        ops.gelu(POINTS, "erf")


def test_tanh(device):
    """Value and slope agree with the standard library; for large |x| it is flat, and nothing overflows."""
    x = np.append(POINTS, [-1e4, 1e4])
    y, cache = ops.tanh(to_device(x, device))
    np.testing.assert_allclose(to_cpu(y), [math.tanh(v) for v in x], rtol=1e-15)
    slope = to_cpu(ops.tanh_backward(device.xp.ones_like(y), cache))
    np.testing.assert_allclose(slope, [1 - math.tanh(v) ** 2 for v in x], rtol=1e-12, atol=1e-15)


def test_silu_is_x_times_the_sigmoid(device):
    """Value and slope agree with the standard library; for large |x| it is 0 or x, and nothing overflows."""
    x = np.append(POINTS, [-1e4, 1e4])
    y, cache = ops.silu(to_device(x, device))
    slope = to_cpu(ops.silu_backward(device.xp.ones_like(y), cache))
    sigmoid = np.array([1 / (1 + math.exp(min(-v, 700))) for v in x])
    np.testing.assert_allclose(to_cpu(y), x * sigmoid, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(slope, sigmoid + x * sigmoid * (1 - sigmoid), rtol=1e-12, atol=1e-14)


def test_a_name_and_a_pair_are_the_same_activation():
    pair = (ops.silu, ops.silu_backward)
    assert ops.activation_pair("silu") == ops.activation_pair(pair) == ops.activation_pair(list(pair)) == pair


@pytest.mark.parametrize("wrong", [None, 3, ops.relu, (ops.relu,), (ops.relu, "relu"), (ops.relu,) * 3, np.ones(2)])
def test_what_is_neither_a_name_nor_a_pair(wrong):
    with pytest.raises(TypeError, match=r"^activation: expected a name or a pair \(op, op_backward\), got "):
        ops.activation_pair(wrong)


@pytest.mark.parametrize(
    ("op", "op_backward", "more"),
    [
        (ops.gelu, ops.gelu_backward, ()),
        (ops.gelu, ops.gelu_backward, ("tanh",)),
        (ops.silu, ops.silu_backward, ()),
    ],
)
def test_float16_is_rounded_once(op, op_backward, more, device):
    """At the end: the result is that of float32, rounded."""
    x = np.linspace(-9, 9, 101).astype(np.float16)
    results = []
    for dtype in np.float16, np.float32:
        with reference_only():
            y, cache = op(to_device(x.astype(dtype), device), *more)
        results.append([to_cpu(a).astype(np.float16) for a in (y, op_backward(device.xp.ones_like(y), cache))])
    for half, single in zip(*results, strict=True):
        np.testing.assert_array_equal(half, single)


@pytest.mark.parametrize("backward", [ops.relu_backward, ops.tanh_backward, ops.silu_backward])
def test_a_masked_array_is_no_cache(backward):
    x = np.ones(3)
    with pytest.raises(TypeError, match=r"expected the array that forward returned, got MaskedArray$"):
        backward(x, np.ma.masked_array(x, x > 0))

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_eps_is_added_to_the_variance(device):
    x = to_device(np.array([[-2.0, 2.0]]), device)
    one, zero = device.xp.ones(2), device.xp.zeros(2)
    y = to_cpu(ops.layernorm(x, one, zero, eps=5.0)[0])
    np.testing.assert_allclose(y, [[-2 / 3, 2 / 3]], rtol=1e-14)


def test_directions_that_normalising_removes_get_no_gradient(device):
    """Adding a constant to a row, or scaling it about its mean, does not change y, so dx is orthogonal to both."""
    rng = np.random.default_rng(0)
    x, gamma, dy = rng.standard_normal((3, 6)), rng.standard_normal(6), rng.standard_normal((3, 6))
    _, cache = ops.layernorm(to_device(x, device), to_device(gamma, device), device.xp.zeros(6), eps=0.0)
    dx = to_cpu(ops.layernorm_backward(to_device(dy, device), cache)[0])
    np.testing.assert_allclose(dx.sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose((dx * (x - x.mean(axis=1, keepdims=True))).sum(axis=1), 0, atol=1e-12)
    assert np.abs(dx).max() > 0.1


def test_long_sums_run_in_float32_for_float16(device):
    """The sum of 4,096 numbers near 40 overflows float16, and a float16 sum of 5,000 rows would stop at 2048."""
    x = np.where(np.arange(4096) % 2, 50, 30).astype(np.float16)[None]
    gamma, beta = device.xp.ones(4096, dtype=np.float16), device.xp.zeros(4096, dtype=np.float16)
    y, _ = ops.layernorm(to_device(x, device), gamma, beta)
    np.testing.assert_allclose(to_cpu(y), np.sign(x - 40), rtol=1e-3)
    rows = to_device(np.tile(np.float16([[-1, 1]]), (5000, 1)), device)
    y, cache = ops.layernorm(rows, gamma[:2], beta[:2])
    _, dgamma, dbeta = ops.layernorm_backward(device.xp.ones_like(y), cache)
    assert to_cpu(dbeta).tolist() == [5000, 5000]
    np.testing.assert_allclose(to_cpu(dgamma), [-5000, 5000], rtol=1e-3)


@pytest.mark.parametrize("op", [ops.layernorm, ops.layernorm.reference], ids=["twin", "reference"])
def test_gradients_have_the_type_of_dy(op):
    gamma = np.ones(3, np.float32)
    y, cache = op(np.arange(6, dtype=np.float32).reshape(2, 3), gamma, gamma)
    found = ops.layernorm_backward(np.ones((2, 3), np.float16), cache)
    assert [a.dtype for a in (y, *found)] == [np.float32, *[np.float16] * 3]


def test_width_that_does_not_fit():
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        ops.layernorm(np.ones((4, 7, 256)), np.ones(512), np.ones(512))


def test_parameters_that_do_not_fit():
    x = np.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"gamma: expected \(C\), got \(1, 4\)"):
        ops.layernorm(x, np.ones((1, 4)), np.ones(4))
    with pytest.raises(ValueError, match=r"beta: expected \(4\), got \(1,\)"):
        ops.layernorm(x, np.ones(4), np.ones(1))


@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        (-1e-5, ValueError, "a finite number >= 0, got -1e-05"),
        (float("nan"), ValueError, "a finite number >= 0, got nan"),
        (float("inf"), ValueError, "a finite number >= 0, got inf"),
        ("1e-5", TypeError, "a number, got '1e-5'"),
        (None, TypeError, "a number, got None"),
    ],
)
def test_eps_out_of_range(eps, error, message):
    x = np.ones((2, 4))
    for layernorm in (ops.layernorm, ops.layernorm.reference):
        with pytest.raises(error, match=f"^eps: expected {message}$"):
            layernorm(x, np.ones(4), np.ones(4), eps)


def test_float16_is_rounded_once(device):
    """The results are those of float32, rounded at the end."""
    x, dy = (3 * np.random.default_rng(0).standard_normal((2, 5, 50))).astype(np.float16)
    gamma, beta = np.random.default_rng(1).standard_normal((2, 50)).astype(np.float16)
    results = []
    for dtype in np.float16, np.float32:
        *args, dy_here = (to_device(a.astype(dtype), device) for a in (x, gamma, beta, dy))
        y, cache = ops.layernorm.reference(*args)
        results.append([to_cpu(a).astype(np.float16) for a in (y, *ops.layernorm_backward(dy_here, cache))])
    for half, single in zip(*results, strict=True):
        assert np.array_equal(half, single)

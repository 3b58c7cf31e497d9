import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_dx_is_orthogonal_to_x(device):
    """With eps = 0 a longer row gives the same y, so moving along x changes nothing."""
    x, gamma, dy = (to_device(a, device) for a in np.random.default_rng(0).standard_normal((3, 7)))
    y, cache = ops.rmsnorm(x, gamma, 0)
    np.testing.assert_allclose(to_cpu(ops.rmsnorm(5 * x, gamma, 0)[0]), to_cpu(y), rtol=1e-12)
    dx, _ = ops.rmsnorm_backward(dy, cache)
    assert abs(float((dx * x).sum())) < 1e-12 < float((dx * dx).sum())


@pytest.mark.parametrize(
    ("x", "gamma", "message"),
    [
        ((2, 3), (4,), r"x: expected \(..., 4\), got \(2, 3\)"),
        ((2, 3), (1, 3), r"gamma: expected \(C\), got \(1, 3\)"),
    ],
)
def test_shapes_that_do_not_fit(x, gamma, message):
    with pytest.raises(ValueError, match=message):
        ops.rmsnorm(np.ones(x), np.ones(gamma))


@pytest.mark.parametrize("op", [ops.rmsnorm, ops.rmsnorm.reference], ids=["twin", "reference"])
def test_y_has_the_type_of_x_and_gradients_that_of_dy(op):
    x, gamma = np.ones((2, 3), np.float32), np.ones(3, np.float64)
    y, cache = op(x, gamma)
    found = [y, *ops.rmsnorm_backward(y.astype(np.float16), cache)]
    assert [a.dtype for a in found] == [np.float32, np.float16, np.float16]
    _, cache = op(x, np.ones(3, np.float32))
    assert [a.dtype for a in ops.rmsnorm_backward(np.ones((2, 3), np.float16), cache)] == [np.float16] * 2


def test_no_columns():
    with pytest.raises(ValueError, match=r"x: expected at least one column, got \(2, 0\)"):
        ops.rmsnorm(np.ones((2, 0)), np.ones(0))


def test_eps_below_zero():
    with pytest.raises(ValueError, match="eps: expected a finite number >= 0, got -1"):
        ops.rmsnorm(np.ones((2, 3)), np.ones(3), -1)


def test_float16_is_rounded_once(device):
    """The results are those of float32, rounded at the end."""
    x, dy = (3 * np.random.default_rng(0).standard_normal((2, 5, 50))).astype(np.float16)
    gamma = np.random.default_rng(1).standard_normal(50).astype(np.float16)
    results = []
    for dtype in np.float16, np.float32:
        *args, dy_here = (to_device(a.astype(dtype), device) for a in (x, gamma, dy))
        y, cache = ops.rmsnorm.reference(*args)
        results.append([to_cpu(a).astype(np.float16) for a in (y, *ops.rmsnorm_backward(dy_here, cache))])
    for half, single in zip(*results, strict=True):
        assert np.array_equal(half, single)

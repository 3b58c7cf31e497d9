import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_equation(device):
    """y = x w + b, with the loops written out, for any number of leading axes."""
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5)), rng.standard_normal(5)
    expected = np.zeros((2, 3, 5))
    for n, t, o in np.ndindex(2, 3, 5):
        expected[n, t, o] = b[o] + sum(x[n, t, i] * w[i, o] for i in range(4))
    x, w, b = (to_device(a, device) for a in (x, w, b))
    np.testing.assert_allclose(to_cpu(ops.linear(x, w, b)[0]), expected, rtol=1e-12)
    np.testing.assert_allclose(to_cpu(ops.linear(x[0, 0], w, b)[0]), expected[0, 0], rtol=1e-12)
    np.testing.assert_allclose(to_cpu(ops.linear(x, w)[0]), expected - to_cpu(b), rtol=1e-12)


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

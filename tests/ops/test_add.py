"""What a gradient alone does not show about sums."""

import numpy as np
import pytest

from scratchformer import ops


def test_gradients(case, check_gradients):
    check_gradients(case)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3, 1)])
def test_nothing_is_broadcast(shape):
    with pytest.raises(ValueError, match=r"f: expected \(2, 3\), got \("):
        ops.add(np.ones((2, 3)), np.ones(shape))


def test_each_gradient_may_be_changed():
    """They share no memory with each other, so a layer may add to one of them in place."""
    dy = np.ones(3)
    dx, df = ops.add_backward(dy, ops.add(dy, dy)[1])
    dx += 1
    assert np.array_equal(df, dy) and np.array_equal(dy, np.ones(3))

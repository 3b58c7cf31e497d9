"""ReLU, backward

y = max(x, 0), elementwise. Where x is positive, y = x; where it is negative, y stays 0 whatever x does. So each number
of dy is either passed on or stopped.

The cache is y and not x: the operation after ReLU keeps y anyway, so this costs no memory. At x = 0 the graph has a
corner and no derivative; take 0 there, as is usual.
"""

import numpy as np


def relu(x):
    """y = max(x, 0), elementwise. x: any shape."""
    y = np.maximum(x, 0)
    return y, y.copy()


def relu_backward(dy, y):
    # TODO: dx, from dy and y. Do not change dy itself.
    dx = dy * (y > 0)
    # END
    return dx


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "You cannot see x any more. What is y where x was negative, and what is it where x was positive?",
    "Where the unit was off, y is 0 and dy is stopped; elsewhere dy is passed on as it is. A comparison gives an "
    "array of True and False, which multiply as 1 and 0.",
    "dx = dy * (...), with a comparison of y and 0 that is False where y is 0.",
)
LIBRARY = ops.relu
MISTAKES = (
    ("y > 0", "y >= 0", "dx.*y is never negative, so"),
    ("dy * (y > 0)", "y > 0", "Where x is positive, y = x and dx = dy"),
    ("dy * (y > 0)", "dy * y", "Where x is positive, y = x and dx = dy"),
    ("dy * (y > 0)", "np.maximum(dy, 0)", "Where x is not positive"),
    ("dy * (y > 0)", "dy * (dy > 0)", "Where x is not positive"),
    ("dx = dy * (y > 0)", "dy[y <= 0] = 0\n    dx = dy", "backward writes to dy"),
)


def check(student):
    x = np.array([[-2.0, 0.0, 3.0], [0.5, -0.5, 0.0]])
    dy = np.array([[4.0, -5.0, 6.0], [-7.0, 8.0, 9.0]])
    _, cache = student.relu(x)
    dx = student.relu_backward(dy.copy(), cache)
    if isinstance(dx, np.ndarray) and dx.shape == x.shape:
        why = "Where x is not positive, y stays 0 and dx is 0. (y is never negative, so y >= 0 holds everywhere)"
        expect_close("dx", np.where(x > 0, 0, dx), np.zeros_like(x), why)
        expect_close("dx", dx, np.where(x > 0, dy, 0), "Where x is positive, y = x and dx = dy")
    check_pair(student, "relu", normal(0, 3, 4))
    check_pair(student, "relu", normal(1, 2, 5, 3))

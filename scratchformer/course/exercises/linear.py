"""Linear, backward

For one row n and one output o, forward is y_no = Σ_i x_ni w_io + b_o. Each gradient is a sum too, over the index that
its argument does not have: o for x, the row n for w and b. Write the sums as matrix products.

x may have one leading axis or several, such as (B, T, I) for B texts of T words. Each combination of their indices is
one row n of the equation. A gradient has the shape of its argument: dx (..., I), dw (I, O), db (O,).
"""

import numpy as np


def linear(x, w, b):
    """y = x w + b over the last axis of x. x: (..., I), w: (I, O), b: (O,). y: (..., O)."""
    return np.matmul(x, w) + b, (x, w)


def linear_backward(dy, cache):
    """(dx, dw, db). dy: (..., O)."""
    x, w = cache
    # TODO: dx, dw and db, for any number of leading axes.
    dx = dy @ w.T
    dw = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
    db = dy.sum(axis=tuple(range(dy.ndim - 1)))
    # END
    return dx, dw, db


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, normal

HINTS = (
    "Write the three sums with their indices, as in the last exercise. A sum over an index that two arrays share "
    "is a matrix product a @ b, if the index is the last of a and the first of b. Otherwise transpose.",
    "For dx the shared index o is the last of dy, but the last of w too, so w is transposed. For dw, fold the "
    "leading axes of x and dy into one with reshape(-1, ...): then the shared index n is the first of both.",
    "dw = x.reshape(-1, x.shape[-1]).T @ (dy, reshaped in the same way); db = dy.sum over all axes but the last: "
    "axis=tuple(range(dy.ndim - 1)), or axis=0 of the reshaped dy.",
)
LIBRARY = ops.linear
MISTAKES = (
    ("x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])", "x.T @ dy", "dw = x.T @ dy\n.*matmul"),
    ("x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])", "x.swapaxes(-1, -2) @ dy", "w.*shape"),
    ("axis=tuple(range(dy.ndim - 1))", "axis=0", "b.*shape"),
    ("db = dy.sum(", "db = dy.mean(", "wrong gradient at b"),
    ("dy.shape[-1])\n", "dy.shape[-1]) / len(x)\n", "wrong gradient at w"),
    ("dx = dy @ w.T", "dx = dy @ w", "dx = dy @ w\n.*matmul"),
)


def check(student):
    check_pair(student, "linear", normal(0, 4, 3), normal(1, 3, 2), normal(2, 2))
    check_pair(student, "linear", normal(0, 3, 4, 2), normal(1, 2, 5), normal(2, 5))
    check_pair(student, "linear", normal(0, 2, 4, 3, 6), normal(1, 6, 5), normal(2, 5))

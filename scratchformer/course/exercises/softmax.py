"""Softmax, backward

Each score affects all the outputs of its row, so the Jacobian of a row of V scores has V² entries:

    ∂y_i/∂z_k = y_i (δ_ik − y_k)

A backward never builds it. Multiply by dy, sum over i, and what is left costs one dot product per row.
"""

import numpy as np


def softmax(z):
    """y_i = exp(z_i)/Σ_j exp(z_j) over the last axis. z: (..., V)."""
    y = np.exp(z - z.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y, y.copy()


def softmax_backward(dy, y):
    # TODO: dz, of the shape of y (..., V), without building the Jacobian.
    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))
    # END
    return dz


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_no_jacobian, normal

HINTS = (
    "Write the sum of the chain rule, over i, and put the Jacobian in. The δ leaves one term of the sum.",
    "Two terms remain. In the first, i is k; from the second, y_k can be taken out of the sum, which is then one "
    "number for each row.",
    "dz_k = y_k (dy_k − Σ_i dy_i y_i). Take the row's sum with keepdims=True, so that it is subtracted from every "
    "element of its row.",
)
LIBRARY = ops.softmax
MISTAKES = (
    ("(dy - (dy * y).sum(axis=-1, keepdims=True))", "dy", "wrong gradient at z"),
    (
        "axis=-1, keepdims=True))\n    return dz",
        "axis=0, keepdims=True))\n    return dz",
        "wrong gradient at z",
        "the sum runs over the rows, not within each row",
    ),
    (
        "(dy * y).sum(axis=-1, keepdims=True))\n    return dz",
        "(dy * y).sum())\n    return dz",
        "wrong gradient at z",
        "the sum runs over all rows together: each row needs its own",
    ),
    ("keepdims=True))\n    return dz", "keepdims=True)) / len(y)\n    return dz", "wrong gradient at z"),
    ("dz = y * (", "dz = (", "wrong gradient at z"),
    (
        "dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))",
        "dz = np.einsum('...i,...ik->...k', dy, y[..., None] * (np.eye(y.shape[-1], dtype=y.dtype) - y[..., None, :]))",
        "is there a Jacobian",
    ),
)


def check(student):
    check_pair(student, "softmax", normal(0, 3, 4))
    check_pair(student, "softmax", normal(1, 2, 3, 5))
    expect_no_jacobian(student, "softmax", normal(2, 2, 256))

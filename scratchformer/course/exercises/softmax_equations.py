"""The derivation of softmax

Fill in each `?`. Each equation is evaluated on small arrays, in order; the first one that is not true is named.
Type d_ik for δ_ik and sum_i for Σ_i, if your keyboard lacks them. Do not use ∂ in an answer.
"""

import numpy as np


def softmax(z):
    """y_i = exp(z_i)/Z, over the last axis.

    Forward:

        Z = Σ_j exp(z_j)
        y_i = exp(z_i)/Z

    Backward. Z depends on every score; the quotient rule gives the Jacobian, as a function of y alone:

        ∂Z/∂z_k = ⟦exp(z_k)⟧
        ∂y_i/∂z_k = ⟦y_i (δ_ik − y_k)⟧

    The chain rule sums over all outputs. Simplify, so that there is only one sum for each row:

        dz_k = Σ_i dy_i ∂y_i/∂z_k = ⟦y_k (dy_k − Σ_i dy_i y_i)⟧
    """
    y = np.exp(z - z.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y, y.copy()


def softmax_backward(dy, y):
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))


# The student's file ends here.

from scratchformer import ops

from ..grading import Derivation, normal

HINTS = (
    "Z is a sum of exponentials, of which one contains z_k. Write ∂y_i/∂z_k by the quotient rule.",
    "The numerator exp(z_i) depends on z_k only if i = k: its derivative is δ_ik exp(z_i).",
    "∂y_i/∂z_k = δ_ik y_i − y_i y_k. In the sum over i, the δ leaves the term with i = k.",
)
LIBRARY = ops.softmax
MISTAKES = (
    (
        "∂Z/∂z_k = exp(z_k)",
        "∂Z/∂z_k = Z",
        "∂Z/∂z_k.*is not true",
        "the whole sum is kept: only one of its terms contains z_k",
    ),
    ("= y_i (δ_ik − y_k)", "= y_i (1 − y_i)", "∂y_i/∂z_k.*is not true", "only the case i = k is considered"),
    ("∂y_i/∂z_k = y_i (δ_ik − y_k)", "∂y_i/∂z_k = y_i (1 − y_k)", "line 21: .*is not true"),
    ("y_k (dy_k − Σ_i dy_i y_i)", "y_k (dy_k − Σ_i dy_i)", "line 25"),
    ("∂Z/∂z_k = exp(z_k)", "∂Z/∂z_k = Z", "line 20"),
    ("∂Z/∂z_k = exp(z_k)", "∂Z/∂z_k = ∂Z/∂z_k", "without ∂"),
)


def derivation(student):
    return Derivation(student.softmax, student.softmax_backward, ((normal(0, 3, 4),), (normal(1, 2, 3),)))

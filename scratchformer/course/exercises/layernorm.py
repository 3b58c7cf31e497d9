"""Layer norm, backward

Each row becomes x̂ = (x − μ)/σ, with mean 0 and variance 1, and then y = γ x̂ + β. In a row of length C, x_k affects
every x̂_c, because it is a part of μ and of σ:

    ∂x̂_c/∂x_k = (δ_ck − 1/C − x̂_c x̂_k/C)/σ

With g, the gradient of x̂, dx_k = Σ_c g_c ∂x̂_c/∂x_k. Write it without building this (C, C) table: simplify the sum until
it consists of means along the row. γ and β are used by every row, whatever the number of leading axes.
"""

import numpy as np


def layernorm(x, gamma, beta, eps=1e-5):
    """y = γ (x − μ)/σ + β along the last axis. x: (..., C), gamma and beta: (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    sigma = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)  # (..., 1)
    xhat = centred / sigma
    return gamma * xhat + beta, (xhat, sigma, gamma)


def layernorm_backward(dy, cache):
    """(dx, dgamma, dbeta). xhat, of the shape of x: x̂. sigma: (..., 1)."""
    xhat, sigma, gamma = cache
    # TODO: dgamma and dbeta, of shape (C,), then g, then dx, of the shape of dy.
    dgamma = (dy * xhat).sum(axis=tuple(range(dy.ndim - 1)))
    dbeta = dy.sum(axis=tuple(range(dy.ndim - 1)))
    g = dy * gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma
    # END
    return dx, dgamma, dbeta


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_no_jacobian, normal

HINTS = (
    "γ and β are used by all rows, so dgamma and dbeta are sums over all axes but the last. In the sum over c, "
    "the δ leaves g_k, and the other two terms contain 1/C Σ_c, a mean.",
    "From g, two things are subtracted: its mean over the row, and x̂ times another mean over the row. All is "
    "then divided by one number for each row. What gets to γ is multiplied by what γ is multiplied by.",
    "dx_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ. The sums over rows: .sum(axis=tuple(range(dy.ndim - "
    "1))). The means: g.mean(axis=-1, keepdims=True), and the same of g * xhat, which is then multiplied by xhat.",
)
LIBRARY = ops.layernorm
MISTAKES = (
    (
        "g.mean(axis=-1, keepdims=True)",
        "g.mean(axis=1, keepdims=True)",
        "wrong gradient at x",
        "the mean of g is over axis 1: it is the last axis of a table, but not of an array with three axes",
    ),
    (" - xhat * (g * xhat).mean(axis=-1, keepdims=True)", "", "wrong gradient at x"),
    (
        "    g = dy * gamma\n    dx = (",
        "    g = dy\n    dx = gamma * (",
        "wrong gradient at x",
        "γ is outside the means, which is right only while all γ are equal",
    ),
    ("dbeta = dy.sum(", "dbeta = dy.mean(", "wrong gradient at beta"),
    ("(dy * xhat).sum(axis=tuple(range(dy.ndim - 1)))", "(dy * xhat).sum(axis=0)", "gamma: expected shape"),
    ("g.mean(axis=-1, keepdims=True)", "g.mean()", "wrong gradient at x", "the mean of g is over all rows"),
    ("(g * xhat).mean(axis=-1, keepdims=True)", "(g * xhat).sum(axis=-1, keepdims=True)", "wrong gradient at x"),
    ("keepdims=True)) / sigma", "keepdims=True))", "wrong gradient at x"),
    (
        "    dx = (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma",
        "    C = g.shape[-1]\n"
        "    table = np.eye(C, dtype=g.dtype) - 1 / C - xhat[..., None] * xhat[..., None, :] / C\n"
        "    dx = (g[..., None, :] @ table)[..., 0, :] / sigma",
        "is there a Jacobian",
    ),
)


def check(student):
    check_pair(student, "layernorm", normal(0, 4, 3), normal(1, 3), normal(2, 3))
    check_pair(student, "layernorm", normal(0, 3, 2, 5), normal(1, 5), normal(2, 5))
    args = normal(0, 2, 256), normal(1, 256), normal(2, 256)
    expect_no_jacobian(student, "layernorm", *args)

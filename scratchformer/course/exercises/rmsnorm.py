"""RMS norm, a whole operation

Each row of x is divided by its root mean square, then scaled: y = γ x̂ with x̂ = x/ρ and ρ² = mean_c(x_c²) + eps.

Here you write both halves, and decide what the cache keeps: all that backward needs, and no more. In backward, remember
that x_k changes its whole row through ρ. Both work for any number of leading axes.
"""

import numpy as np


def rmsnorm(x, gamma, eps=1e-6):
    """y = γ x/ρ along the last axis, and a cache. x: (..., C), gamma: (C,). y: (..., C)."""
    # TODO: y, and a cache.
    rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    y = gamma * (x / rho)
    cache = x / rho, rho, gamma
    # END
    return y, cache


def rmsnorm_backward(dy, cache):
    """(dx, dgamma). dy: (..., C)."""
    # TODO: dx, of the shape of dy, and dgamma, of shape (C,). Take the cache apart first.
    xhat, rho, gamma = cache
    dx = (dy * gamma - xhat * (dy * gamma * xhat).mean(axis=-1, keepdims=True)) / rho
    dgamma = (dy * xhat).sum(axis=tuple(range(dy.ndim - 1)))
    # END
    return dx, dgamma


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "ρ is one number for each row, so keep its axis: keepdims=True. Backward needs x̂, ρ and γ; it is that of "
    "layer norm without the term of the mean.",
    "Begin with g, what dy is for x̂. The δ leaves g_k, and the other term is x̂_k times a mean over the row; "
    "both are divided by one number for each row.",
    "dx_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ with g_c = dy_c γ_c, where the mean has axis=-1 and keepdims=True. "
    "rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps), and dgamma is a sum over tuple(range(dy.ndim - "
    "1)).",
)
LIBRARY = ops.rmsnorm
MISTAKES = (
    ("(x * x).mean(axis=-1, keepdims=True) + eps)", "(x * x).mean(axis=-1, keepdims=True)) + eps", "y.*eps"),
    ("(x * x).mean(", "(x * x).sum(", "y.*mean of the squares"),
    ("(x * x).mean(axis=-1, keepdims=True)", "(x * x).mean()", "y.*each row"),
    ("np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)", "x.std(axis=-1, keepdims=True)", "y.*mean"),
    (" - xhat * (dy * gamma * xhat).mean(axis=-1, keepdims=True)", "", "wrong gradient at x"),
    (
        "(dy * gamma - xhat * (dy * gamma * xhat).mean(axis=-1, keepdims=True))",
        "gamma * (dy - xhat * (dy * xhat).mean(axis=-1, keepdims=True))",
        "wrong gradient at x",
        "γ is outside the mean, which is right only while all γ are equal",
    ),
    ("(dy * xhat).sum(axis=tuple(range(dy.ndim - 1)))", "(dy * xhat).sum(axis=0)", "gamma: expected shape"),
)


def check(student):
    x, gamma = normal(0, 4, 3), normal(1, 3)
    why = "ρ is the root of the mean of the squares, and each row has its own"
    expect_close("y", student.rmsnorm(x.copy(), gamma, 0.0)[0], ops.rmsnorm(x, gamma, 0.0)[0], why)
    why = "eps is 0.5 here, and is added before the root is taken"
    expect_close("y", student.rmsnorm(x.copy(), gamma, 0.5)[0], ops.rmsnorm(x, gamma, 0.5)[0], why)
    check_pair(student, "rmsnorm", x, gamma, 0.5)
    check_pair(student, "rmsnorm", normal(2, 3, 2, 5), normal(3, 5), 0.1)

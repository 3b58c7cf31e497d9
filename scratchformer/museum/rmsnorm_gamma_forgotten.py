"""RMS norm's backward forgets the weight

What was wrong. In the backward of an RMS norm, γ was left out of the gradient that goes into the mean.

Why its tests passed. A new model's γ is one everywhere, and then it makes no difference. The author spent days on it.

What finds it. Parameters that are drawn at random like everything else, and not those of a new model.

How to derive it. y_c = γ_c x̂_c, so what arrives at x̂ is g_c = dy_c γ_c, and from there on dy does not occur:

    dx_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ
"""

import numpy as np

SOURCE = "karpathy/llm.c 763 (a comment)"
OPERATION = "rmsnorm"
ARGUMENTS = ("B T C", "C")
NAMED = "γ|gamma"
PLANTED = "g_c = dy_c γ_c", "g_c = dy_c"


def forward(x, gamma):
    rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return gamma * x / rho, (x, gamma, rho)


def wrong(dy, cache):
    x, _, rho = cache
    return right(dy, (x, np.ones_like(x[0, 0]), rho))


def right(dy, cache):
    x, gamma, rho = cache
    xhat, g = x / rho, dy * gamma
    dx = (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / rho
    return dx, (dy * xhat).sum(axis=tuple(range(x.ndim - 1)))

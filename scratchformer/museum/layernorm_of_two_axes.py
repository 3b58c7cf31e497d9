"""A layer norm of two axes

What was wrong. Backward takes the first axis for the rows and all others for the columns. For (B, T, C) it normalises
over T and C together, and reads γ beyond its end.

Why its tests passed. For a matrix it is right.

What finds it. Three axes.

How to derive it. The last axis is c, and n stands for all axes before it. Then the number of columns is C, the size of
γ, and the number of rows is what is left:

    C = len(gamma), N = x.size/C
"""

import numpy as np

SOURCE = "flagos-ai/FlagGems 5392"
OPERATION = "layernorm"
ARGUMENTS = ("B T C", "C", "C")
NAMED = "it is right where T = 1"
PLANTED = (
    "dx_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ",
    "dx_nk = (g_nk − mean_n(mean_c(g_nc)) − x̂_nk mean_n(mean_c(g_nc x̂_nc)))/σ_n",
)


def forward(x, gamma, beta):
    sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    xhat = (x - x.mean(axis=-1, keepdims=True)) / sigma
    return gamma * xhat + beta, (xhat, sigma, gamma)


def wrong(dy, cache):
    xhat, sigma, gamma = cache
    g = dy * gamma
    axes = tuple(range(1, dy.ndim))
    dx = g - g.mean(axis=axes, keepdims=True) - xhat * (g * xhat).mean(axis=axes, keepdims=True)
    rows = tuple(range(dy.ndim - 1))
    return dx / sigma, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)


def right(dy, cache):
    xhat, sigma, gamma = cache
    g = dy * gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma
    rows = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)

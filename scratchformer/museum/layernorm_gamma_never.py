"""γ's gradient is never computed

What was wrong. The backward of a layer norm on a graphics card had a buffer for γ's gradient, which the optimizer
read, and nothing wrote to it.

Why its tests passed. The loss falls: everything else learns.

What finds it. Any comparison of dγ with numerical differences.

How to derive it. γ_c multiplies x̂_nc in every row, so

    dγ_c = Σ_n dy_nc x̂_nc
"""

import numpy as np

SOURCE = "paiml/entrenar 257"
OPERATION = "layernorm"
ARGUMENTS = ("B T C", "C", "C")
NAMED = "gamma is zero everywhere"
PLANTED = "dγ_c = Σ_n dy_nc x̂_nc", "dγ_c = 0"


def forward(x, gamma, beta):
    sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    xhat = (x - x.mean(axis=-1, keepdims=True)) / sigma
    return gamma * xhat + beta, (xhat, sigma, gamma)


def wrong(dy, cache):
    dx, dgamma, dbeta = right(dy, cache)
    return dx, np.zeros_like(dgamma), dbeta


def right(dy, cache):
    xhat, sigma, gamma = cache
    g = dy * gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma
    rows = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)

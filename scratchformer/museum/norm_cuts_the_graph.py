"""A norm that is a leaf

What was wrong. Layer norm built its result from a list of numbers, which made it a new leaf of the graph. Nothing
before it got a gradient, and neither did γ and β: no transformer with this layer could be fine-tuned.

Why its tests passed. A test of y passes.

What finds it. Any comparison with numerical differences.

How to derive it. The page of `ops.layernorm` derives three gradients. In the last one, what arrives is not zero:

    dx_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ
"""

import numpy as np

SOURCE = "paiml/aprender 2196"
OPERATION = "layernorm"
ARGUMENTS = ("B T C", "C", "C")
NAMED = "zero everywhere"


def forward(x, gamma, beta):
    sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    xhat = (x - x.mean(axis=-1, keepdims=True)) / sigma
    return gamma * xhat + beta, (xhat, sigma, gamma)


def wrong(dy, cache):
    return tuple(np.zeros_like(g) for g in right(dy, cache))


def right(dy, cache):
    xhat, sigma, gamma = cache
    g = dy * gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma
    rows = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)

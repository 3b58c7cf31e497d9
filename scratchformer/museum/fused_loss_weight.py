"""Weights inside the sum, not outside

What was wrong. To save memory, a fused linear layer and cross-entropy already computes the gradient of its weight in
forward, and multiplies it by dy in backward. With reduction "none", dy is a number for each token, but the sum over
tokens has been taken: what is left is to multiply by the first one.

Why its tests passed. With reduction "mean" or "sum", dy is a single number, and a single number may be taken out of a
sum.

What finds it. A dy of random numbers.

How to derive it. Each token's dy is a factor of each term, inside the sum:

    dw_iv = Σ_n dy_n x_ni (p_nv − [v = t_n])
"""

import numpy as np

from .parts import softmax

SOURCE = "linkedin/Liger-Kernel 1298"
OPERATION = "cross_entropy"
ARGUMENTS = ("N I", "I V", lambda draw: draw.integers("N", draw.V))
NAMED = "the first dy along axis 0 in place"


def forward(x, w, targets):
    z = x @ w
    rows, top = np.arange(len(z)), z.max(axis=-1)
    y = np.log(np.exp(z - top[:, None]).sum(axis=-1)) - (z[rows, targets] - top)
    g = softmax(z)
    g[rows, targets] -= 1
    return y, (x, w, g, x.T @ g)


def wrong(dy, cache):
    _, w, g, dw = cache
    return dy[:, None] * g @ w.T, dw * (dy.flat[0] if dy.size else 0)


def right(dy, cache):
    x, w, g, _ = cache
    return dy[:, None] * g @ w.T, x.T @ (dy[:, None] * g)

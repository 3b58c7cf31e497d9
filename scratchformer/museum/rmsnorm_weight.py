"""The weight of RMS norm gets no gradient

What was wrong. The backward of a fast RMS norm returned a gradient for x, and none for the weight. All weights of all
norms stayed what they were.

Why its tests passed. With adapters, the usual way to train with this library, norms are frozen. Whoever trains
everything sees a loss that falls a little less.

What finds it. A check that counts: one gradient for each floating-point argument.

How to derive it. γ_c is used in every row n, so its gradient is a sum over the rows:

    dγ_c = Σ_n dy_nc x̂_nc
"""

import numpy as np

SOURCE = "unslothai/unsloth 4533"
OPERATION = "rmsnorm"
ARGUMENTS = ("B T C", "C")
NAMED = "gradient of gamma: expected an array, got NoneType"
PLANTED = "dγ_c = Σ_n dy_nc x̂_nc", "dγ_c = 0"


def forward(x, gamma):
    rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return gamma * x / rho, (x, gamma, rho)


def wrong(dy, cache):
    return right(dy, cache)[0], None


def right(dy, cache):
    x, gamma, rho = cache
    xhat, g = x / rho, dy * gamma
    dx = (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / rho
    return dx, (dy * xhat).sum(axis=tuple(range(x.ndim - 1)))

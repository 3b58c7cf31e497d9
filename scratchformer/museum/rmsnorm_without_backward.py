"""A fast path without a backward

What was wrong. RMS norm has two forwards: a fast one for contiguous arrays, which records nothing for backward, and a
slow one for all others. Nearly every array is contiguous, so nothing before a norm got a gradient, for two years.

Why its tests passed. A test of forward passes on both paths: the results are the same.

What finds it. Any comparison of dx with numerical differences. That the gradient depends on the memory order would be
found too.

How to derive it. The page of `ops.rmsnorm` derives the gradient. It depends on the numbers of x and never on where
they are stored, so there is one backward for both paths.
"""

import numpy as np

SOURCE = "huggingface/candle 2168"
OPERATION = "rmsnorm"
ARGUMENTS = ("B T C", "C")
NAMED = "zero everywhere"


def forward(x, gamma):
    rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return gamma * x / rho, (x, gamma, rho)


def wrong(dy, cache):
    x, gamma, _ = cache
    if x.flags.c_contiguous:
        return np.zeros_like(x), np.zeros_like(gamma)
    return right(dy, cache)


def right(dy, cache):
    x, gamma, rho = cache
    xhat, g = x / rho, dy * gamma
    dx = (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / rho
    return dx, (dy * xhat).sum(axis=tuple(range(x.ndim - 1)))

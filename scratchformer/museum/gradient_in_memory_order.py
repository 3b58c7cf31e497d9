"""A gradient read in memory order

What was wrong. A kernel reads the upstream gradient of RMS norm row by row from memory, as if it were contiguous. For
a gradient that is a slice or a transposed view of another array, it reads other numbers: wrong gradients in 254 of 472
layouts.

Why its tests passed. They made dy with a function that gives a contiguous array, as nearly all tests do.

What finds it. The same numbers in other memory layouts: Fortran order, every second element, backwards.

How to derive it. The derivation knows indices only: dy_nc is the element of row n and column c, wherever it lies. Code
that computes addresses must read the strides, or make a contiguous copy first.
"""

import numpy as np

SOURCE = "unslothai/unsloth 10617"
OPERATION = "rmsnorm"
ARGUMENTS = ("B T C", "C")
NAMED = "Fortran order"


def forward(x, gamma):
    rho = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return gamma * x / rho, (x, gamma, rho)


def wrong(dy, cache):
    return right(dy.ravel(order="K").reshape(dy.shape), cache)


def right(dy, cache):
    x, gamma, rho = cache
    xhat, g = x / rho, dy * gamma
    dx = (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / rho
    return dx, (dy * xhat).sum(axis=tuple(range(x.ndim - 1)))

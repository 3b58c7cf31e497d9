"""The residual gets no gradient

What was wrong. A fused norm takes x and a residual and returns the norm of their sum. In the mode that does not return
the sum too, backward returned no gradient for the residual.

Why its tests passed. A test of the mode that returns both results passes.

What finds it. A check that counts: one gradient for each floating-point argument.

How to derive it. s = x + r, so both have the gradient of s: dx = ds and dr = ds.
"""

import numpy as np

SOURCE = "Dao-AILab/quack 52"
OPERATION = "rmsnorm"
ARGUMENTS = ("N C", "N C")
NAMED = r"returned 1 gradient\(s\) for 2"


def forward(x, residual):
    s = x + residual
    rho = np.sqrt((s * s).mean(axis=-1, keepdims=True) + 1e-6)
    return s / rho, (s, rho)


def wrong(dy, cache):
    return right(dy, cache)[0]


def right(dy, cache):
    s, rho = cache
    xhat = s / rho
    ds = (dy - xhat * (dy * xhat).mean(axis=-1, keepdims=True)) / rho
    return ds, ds.copy()

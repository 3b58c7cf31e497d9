"""A residual's gradient sent through the norm

What was wrong. A fused layer returns the sum s of x and a residual, and the norm of s. Its backward adds the two
upstream gradients first, and then multiplies by the derivative of the norm. Only the second one passes through the
norm.

Why its tests passed. No test used both results, so one of the two gradients was zero or absent.

What finds it. A dy for each result, both random.

How to derive it. s goes to two places, so its gradient is a sum of two, and each comes along its own way:

    ds = ds_out + dy ∂y/∂s
"""

import numpy as np

SOURCE = "Dao-AILab/quack 53"
OPERATION = "rmsnorm"
ARGUMENTS = ("N C", "N C")
NAMED = r"dy\[1\] comes back through y\[0\] and not through y\[1\]"


def forward(x, residual):
    s = x + residual
    rho = np.sqrt((s * s).mean(axis=-1, keepdims=True) + 1e-6)
    return (s / rho, s.copy()), (s, rho)


def through_norm(g, s, rho):
    xhat = s / rho
    return (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / rho


def wrong(dy, cache):
    of_norm, of_sum = dy
    ds = through_norm(of_norm + of_sum, *cache)
    return ds, ds.copy()


def right(dy, cache):
    of_norm, of_sum = dy
    ds = of_sum + through_norm(of_norm, *cache)
    return ds, ds.copy()

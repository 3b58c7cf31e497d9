"""The second derivative of what was saved

What was wrong. A function saves an intermediate result for its backward. The first derivative is right. Asked for the
second one, the framework differentiates the backward, takes what was saved for a constant, and leaves out how it
depends on x.

Why its tests passed. A check of first derivatives passes; that of second ones is another function, which few call.

What finds it. The backward is an operation of x and dy like any other: its own backward is compared with numerical
differences.

How to derive it. Write the backward as a function of x, v = dy, and not of the cache. For y = (2x)² with t = 2x saved:

    g = 4 t v = 8 x v, so dv = 8 x dg and dx = 8 v dg

With t as a constant, dx is 0.
"""

import numpy as np

SOURCE = "pytorch/pytorch 58509"
ARGUMENTS = ("N", "N")
NAMED = "x is zero everywhere"


def forward(x, v):
    """g = 8 x v, the backward of (2x)² for the upstream gradient v.

        y_n = 8 x_n v_n
        dx_n = 8 v_n dy_n        dv_n = 8 x_n dy_n

    In NumPy:

        dx = 8 * v * dy
    """
    return 8 * x * v, (x, v)


def wrong(dy, cache):
    x, _ = cache
    return np.zeros_like(x), 8 * x * dy


def right(dy, cache):
    x, v = cache
    dx = 8 * v * dy
    return dx, 8 * x * dy

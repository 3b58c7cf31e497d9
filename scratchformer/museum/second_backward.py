"""A second backward adds to the first

What was wrong. In a small autograd every node keeps its gradient, and backward adds to it. A second backward adds to
what the first one left in the nodes between, and passes the sum on: for c = a + b and e = c d, the gradient of a is 1
after one backward, and 3 after two.

Why its tests passed. Each built a new expression.

What finds it. backward called again with the same cache.

How to derive it. The gradient of a node is the sum over its uses in one pass. Adding up passes is for parameters
only, and then each pass adds its own gradient: 1 and 1, which is 2.
"""

import numpy as np

SOURCE = "karpathy/micrograd 53"
ARGUMENTS = ("N", "N", "N")
NAMED = "again"


def forward(a, b, d):
    """e = (a + b) d.

        c_n = a_n + b_n        e_n = c_n d_n
        y := e
        dc_n = dy_n d_n        da_n = dc_n        db_n = dc_n
        dd_n = dy_n c_n

    In NumPy:

        dc = dy * d
    """
    c = a + b
    return c * d, {"c": c, "d": d, "dc": np.zeros_like(c)}


def wrong(dy, cache):
    cache["dc"] = dc = cache["dc"] + dy * cache["d"]
    return dc.copy(), dc.copy(), dy * cache["c"]


def right(dy, cache):
    c, d = cache["c"], cache["d"]
    dc = dy * d
    return dc, dc.copy(), dy * c

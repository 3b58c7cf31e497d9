"""The checker that was wrong

What was wrong. The bug was in the check of gradients itself: it moved an element of the input by a small step, and did
not move it back. The first numerical derivative is right; all others are taken at another point. The right gradient of
dropout failed the check.

Why its tests passed. A checker is tested with functions that it should accept, and with linear ones the point makes no
difference.

What finds it. Here the numerical derivative is the backward, and another checker checks it: it writes to its argument.

How to derive it. A central difference has two points, both at the same distance from x, and x itself must be the
same for every element:

    dx_i ≈ Σ_j dy_j (y_j(x + h e_i) − y_j(x − h e_i))/(2h)
"""

import numpy as np

SOURCE = "HomericIntelligence/Odyssey 2090"
ARGUMENTS = ("N",)
NAMED = "writes to|again"


def forward(x):
    return np.cumsum(np.tanh(x)), x


def numerical(dy, x, h):
    dx = np.zeros_like(x)
    for i in range(x.size):
        x[i] += h
        above = forward(x)[0] @ dy
        x[i] -= 2 * h
        dx[i] = (above - forward(x)[0] @ dy) / (2 * h)
    return dx


def wrong(dy, x):
    return numerical(dy, x, 1e-4)


def right(dy, x):
    return dy[::-1].cumsum()[::-1] * (1 - np.tanh(x) ** 2)

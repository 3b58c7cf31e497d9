"""NaN where nothing was asked

What was wrong. A log-sum-exp over the elements that a condition selects gives NaN as the gradient of the others, if
one of them is large. The exponential of all elements is taken first, overflows for those left out, and 0 · ∞ is NaN.

Why its tests passed. The elements that were left out had the same size as the rest.

What finds it. Numbers of very different sizes, from 1 to 1000.

How to derive it. An element that is not selected does not occur in y, so its gradient is 0, and not 0 times something:

    dx_i = dy exp(x_i − y) where m_i = 1, 0 elsewhere
"""

import numpy as np

SOURCE = "jax-ml/jax 23842"
ARGUMENTS = ("N C", lambda draw: np.arange(draw.C) % 2 == 0)
NAMED = "nan"


def forward(x, mask):
    chosen = np.where(mask, x, -np.inf)
    top = chosen.max(axis=-1, keepdims=True)
    y = top[..., 0] + np.log(np.exp(chosen - top).sum(axis=-1))
    return y, (x, mask, y)


def wrong(dy, cache):
    x, mask, y = cache
    with np.errstate(all="ignore"):
        return dy[..., None] * (mask * np.exp(x - y[..., None]))


def right(dy, cache):
    x, mask, y = cache
    return dy[..., None] * np.exp(np.where(mask, x - y[..., None], -np.inf))

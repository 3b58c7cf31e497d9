"""Dropout, forward and backward

In training, each number of x is set to 0 with probability p, and kept otherwise. What is kept is scaled up, so that the
mean over many draws is x: then nothing has to change when the model is used without dropout.

You write both halves here, and choose what the cache holds. Once keep is drawn, each y_i is x_i times a constant.
"""

import numpy as np


def dropout(x, p, seed):
    """y_i = x_i or 0, scaled so that the mean over all draws is x_i. x: any shape, 0 ≤ p < 1. Returns y and a cache."""
    keep = np.random.default_rng(seed).random(x.shape) >= p  # True with probability 1 − p
    # TODO: y, and the cache, with all that backward needs.
    y = x * keep / (1 - p)
    cache = keep, 1 / (1 - p)
    # END
    return y, cache


def dropout_backward(dy, cache):
    # TODO: dx. Take the cache apart first.
    dx = dy * cache[0] * cache[1]
    # END
    return dx


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "A number is kept with probability 1 − p. By what must it be multiplied, so that its mean is x? Backward "
    "multiplies dy by the same constants.",
    "Where a number is dropped, its gradient is 0. Where it is kept, dy is scaled as x was. So the cache needs to "
    "know which are kept, and the scale.",
    "y = x * keep / (1 - p), cache = keep, p; in backward keep, p = cache, and dx is computed from dy as y is from x.",
)
LIBRARY = ops.dropout
MISTAKES = (
    ("dx = dy * cache[0] * cache[1]", "dx = dy * (cache[0] / 1.0) * cache[1]", "must stay float32"),
    ("dx = dy * cache[0] * cache[1]", "dx = dy * cache[0]", "dx.*expected 1.33333, got 1"),
    ("dx = dy * cache[0] * cache[1]", "dx = dy * cache[1]", "dx.*expected 0, got 1.33333"),
    ("y = x * keep / (1 - p)", "y = x * keep", "y.*its mean must stay x"),
    ("y = x * keep / (1 - p)", "y = x * keep / p", "y.*its mean must stay x"),
    ("y = x * keep / (1 - p)", "y = x * keep * (1 - p)", "y.*its mean must stay x"),
    (
        "dx = dy * cache[0] * cache[1]",
        "dx = dy * (np.random.default_rng().random(dy.shape) >= 0.25) * cache[1]",
        "dx.*Another forward",
    ),
    (
        "cache = keep, 1 / (1 - p)",
        "cache = dropout.__dict__.setdefault('kept', [])\n    cache[:] = keep, 1 / (1 - p)",
        "dx.*Another forward",
    ),
)


def check(student):
    x, p = normal(0, 4, 6), 0.25
    keep = np.random.default_rng(3).random(x.shape) >= p
    x[keep] *= np.arange(keep.sum()) != 5  # one of those that are kept is 0
    y, first = student.dropout(x, p, 3)
    expect_close("y", y, x * keep / 0.75, "p = 0.25: a number is kept with probability 0.75, and its mean must stay x")
    student.dropout(x, p, 4)
    why = (
        "dy is 1 here, so dx is what the forward of this cache multiplied x by, 0 or 1/0.75. Another forward, with "
        "another mask, ran in between"
    )
    expect_close("dx", student.dropout_backward(np.ones_like(x), first), keep / 0.75, why)
    check_pair(student, "dropout", normal(1, 3, 4), 0.4, 5)
    check_pair(student, "dropout", normal(2, 2, 5, 3), 0.1, 6)

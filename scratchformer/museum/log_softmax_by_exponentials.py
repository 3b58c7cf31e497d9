"""A factor that cancels, but not at zero

What was wrong. The backward of log-softmax divides dy by exp(y) and multiplies by exp(y) again, because a
helper function expected it. Where a log-probability is below −745, exp(y) is 0 and the gradient NaN.

Why its tests passed. Log-probabilities of −745 do not occur in tests. They do in training.

What finds it. Logits of very different sizes, from 1 to 1000.

How to derive it. Simplify with pencil and paper before you write code:

    Σ_i exp(y_i) dy_i/exp(y_i) = Σ_i dy_i
"""

import numpy as np

SOURCE = "clab/dynet 218"
OPERATION = "log_softmax"
ARGUMENTS = ("N C",)
NAMED = "nan"


def forward(z):
    z = z - z.max(axis=-1, keepdims=True)
    y = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return y, y.copy()


def wrong(dy, y):
    with np.errstate(all="ignore"):
        p = np.exp(y)
        return dy - p * (p * (dy / p)).sum(axis=-1, keepdims=True)


def right(dy, y):
    return dy - np.exp(y) * dy.sum(axis=-1, keepdims=True)

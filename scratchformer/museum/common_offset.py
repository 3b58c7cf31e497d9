"""A common offset of the logits

What was wrong. The loss is log Σ exp(z) − z_t, computed as a difference of two large numbers. In float32, for three
equal logits of 1e8, it is 0 instead of log 3. A backward that computes p as exp(z − log Σ exp(z)) has the same fault.
In this exhibit forward is right, and backward is not.

Why its tests passed. Logits were normal numbers.

What finds it. Numbers with a large common offset, in float32. y keeps its digits, so the gradient should too.

How to derive it. The offset cancels in p, so subtract it first. With m = max_j z_j:

    p_k = exp(z_k − m)/Σ_j exp(z_j − m)

Both differences are exact, however large the offset is.
"""

import numpy as np

from .parts import softmax

SOURCE = "pytorch/pytorch 11752"
OPERATION = "cross_entropy"
ARGUMENTS = ("N V", lambda draw: draw.integers("N", draw.V))
NAMED = "offset"


def forward(z, targets):
    rows, top = np.arange(len(z)), z.max(axis=-1)
    log_sum = np.log(np.exp(z - top[:, None]).sum(axis=-1))
    return log_sum - (z[rows, targets] - top), (z, targets, top + log_sum)


def gradient(dy, p, targets):
    p[np.arange(len(p)), targets] -= 1
    return dy[:, None] * p


def wrong(dy, cache):
    z, targets, log_sum = cache
    return gradient(dy, np.exp(z - log_sum[:, None]), targets)


def right(dy, cache):
    z, targets, _ = cache
    return gradient(dy, softmax(z), targets)

"""Every tie takes all

What was wrong. The gradient of a maximum went, in full, to every element that is equal to it. Where three elements
tie, three times the gradient arrives. Two other frameworks had it too.

Why its tests passed. Normal numbers are never equal. Numbers in float16, clipped ones and those after a ReLU are.

What finds it. Equal numbers, moved together: the maximum then moves by as much as they do, so their gradients must add
up to dy.

How to derive it. At a tie the maximum has a kink, and any weights are right that are not negative and add up to 1:

    y_n = max_i(x_ni), dx_ni = dy_n w_ni with Σ_i w_ni = 1

One may give all to the first, or the same to each.
"""

SOURCE = "apache/mxnet 18563"
OPERATION = "max_pool"
ARGUMENTS = ("N C",)
NAMED = "moved together"


def forward(x):
    return x.max(axis=-1), x


def wrong(dy, x):
    return (x == x.max(axis=-1, keepdims=True)) * dy[:, None]


def right(dy, x):
    ties = x == x.max(axis=-1, keepdims=True)
    return ties * (dy[:, None] / ties.sum(axis=-1, keepdims=True)).astype(dy.dtype)

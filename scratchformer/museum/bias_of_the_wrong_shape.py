"""A bias whose gradient has the weight's shape

What was wrong. The gradient of a bias was returned with the shape of the weight: the bias is broadcast over the rows,
and so was its gradient.

Why its tests passed. An optimizer that broadcasts adds it to the bias without a word.

What finds it. A check of shapes: a gradient has the shape of its array.

How to derive it. The bias is the same in every row, so its gradient is a sum over the rows, and has its one axis:

    db_o = Σ_n dy_no
"""

import numpy as np

SOURCE = "ml-explore/mlx 3220"
OPERATION = "linear"
ARGUMENTS = ("N I", "I O", "O")
NAMED = "expected shape"


def forward(x, w, b):
    return x @ w + b, (x, w)


def wrong(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy, np.tile(dy.sum(axis=0), (len(w), 1))


def right(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy, dy.sum(axis=0)

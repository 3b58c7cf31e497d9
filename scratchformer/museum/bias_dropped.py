"""A bias that never learns

What was wrong. Linear layers for training with few bits take a bias in forward, and backward returns None for it.

Why its tests passed. The tests of these layers had no bias.

What finds it. A check that counts: one gradient for each floating-point argument.

How to derive it. Go through the arguments of forward one by one; each needs an equation.

    y_no = Σ_i x_ni w_io + b_o, so db_o = Σ_n dy_no
"""

SOURCE = "pytorch/ao 4817"
OPERATION = "linear"
ARGUMENTS = ("N I", "I O", "O")
NAMED = "gradient of b: expected an array, got NoneType"
PLANTED = "db_o = Σ_n dy_no", "db_o = 0"


def forward(x, w, b):
    return x @ w + b, (x, w)


def wrong(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy, None


def right(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy, dy.sum(axis=0)

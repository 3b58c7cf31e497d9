"""Cross-attention, with two gradients

The decoder of a translator looks at the source sentence: its queries come from its own x (B, T, C), the keys and values
from the encoder's output, the memory (B, M, C). So there are two inputs, and each needs its gradient.

The forward begins with three products. Which input does each of them read? In the backward, `attention_backward` gives
dq, dk and dv, and `linear_backward` takes each gradient back through its own product. An input that is used twice gets
the sum of two gradients. (One head is enough here; more are reshapes around `attention`.)
"""

import math

import numpy as np


def linear_backward(dy, x, w):
    """(dx, dw) of y = x @ w, for x (B, T, C) and w (C, D)."""
    return dy @ w.T, np.einsum("btc,btd->cd", x, dy)


def attention(q, k, v):
    a = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    p = np.exp(a - a.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, (q, k, v, p)


def attention_backward(dy, cache):
    q, k, v, p = cache
    dp = dy @ v.swapaxes(-1, -2)
    da = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return da @ k, da.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy


def cross_attention(x, memory, wq, wk, wv):
    """y (B, T, D), for x (B, T, C), memory (B, M, C) and three weights (C, D)."""
    # TODO: q (B, T, D), k (B, M, D) and v (B, M, D).
    q = x @ wq
    k = memory @ wk
    v = memory @ wv
    # END
    y, cache = attention(q, k, v)
    return y, (x, memory, wq, wk, wv, cache)


def cross_attention_backward(dy, cache):
    x, memory, wq, wk, wv, cache = cache
    dq, dk, dv = attention_backward(dy, cache)
    # TODO: dx, dmemory, dwq, dwk and dwv, in this order, by three calls of linear_backward.
    dx, dwq = linear_backward(dq, x, wq)
    from_keys, dwk = linear_backward(dk, memory, wk)
    from_values, dwv = linear_backward(dv, memory, wv)
    return dx, from_keys + from_values, dwq, dwk, dwv
    # END


# The student's file ends here.

from scratchformer import nn, ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "A query is a question that a position of x asks; the memory answers, with keys to compare and values to "
    "take. Going back, the gradient of each product reaches the array that this product read.",
    "The queries are a product with x, the keys and values are products with the memory. So x gets one gradient, "
    "through q, and the memory gets two, through k and through v: their sum is dmemory.",
    "linear_backward(dq, x, wq) gives dx and dwq. linear_backward(dk, memory, wk) gives one part of dmemory and "
    "dwk; the same with dv and wv gives the other part and dwv. Add the two parts.",
)
LIBRARY = nn.CrossAttention
MISTAKES = (
    (
        "from_keys + from_values",
        "from_keys",
        "wrong gradient at memory",
        "the memory gets no gradient from the values",
    ),
    ("from_keys + from_values", "(from_keys + from_values) / 2", "wrong gradient at memory"),
    (
        "linear_backward(dv, memory, wv)",
        "linear_backward(dv, memory, wk)",
        "wrong gradient at memory",
        "dv is taken back through wk and not through wv",
    ),
    (
        "dx, from_keys + from_values,",
        "dx + from_keys, from_values,",
        "wrong gradient at (x|memory)",
        "the gradient from the keys is given to x",
    ),
    ("v = memory @ wv", "v = x @ wv", "Queries are made from x, keys and values from the memory"),
    (
        "q = x @ wq\n    k = memory @ wk\n    v = memory @ wv",
        "q = memory @ wq\n    k = x @ wk\n    v = x @ wv",
        "Queries are made from x, keys and values from the memory",
    ),
)


def check(student):
    for B, T, M, C, D in ((1, 3, 3, 5, 6), (2, 3, 4, 6, 5)):
        arrays = normal(0, B, T, C), normal(1, B, M, C), *(normal(seed, C, D) / C**0.5 for seed in (2, 3, 4))
        x, memory, wq, wk, wv = arrays
        expected, _ = ops.attention(*(y[:, None] for y in (x @ wq, memory @ wk, memory @ wv)))
        why = "Queries are made from x, keys and values from the memory"
        expect_close("y", student.cross_attention(*arrays)[0], expected[:, 0], why)
        check_pair(student, "cross_attention", *arrays, max_elements=30)

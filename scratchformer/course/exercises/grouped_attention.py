"""Grouped attention: query heads that share a key head

Keys and values take most of the memory when a model generates text. So newer models have fewer heads of them: with H
query heads and G key heads, each group of H/G neighbouring query heads shares one head of keys and values. The query
heads 0 ... H/G − 1 use key head 0, the next H/G use key head 1, and so on.

The forward gives every query head a copy of its keys and values, and what comes after is the attention that you know.
The backward gets a gradient for each of these H copies, and the arguments k and v have only G heads. One number that
goes to several places gets the sum of the gradients of all of them.
"""

import math

import numpy as np


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


def grouped_attention(q, k, v):
    """y (B, H, T, D), for q (B, H, T, D) and k, v (B, G, S, D), where G divides H."""
    H, G = q.shape[1], k.shape[1]
    # TODO: keys and values (B, H, S, D): for each query head, the head of k and of v that it uses.
    keys = np.repeat(k, H // G, axis=1)
    values = np.repeat(v, H // G, axis=1)
    # END
    y, cache = attention(q, keys, values)
    return y, (cache, k.shape)


def grouped_attention_backward(dy, cache):
    cache, (B, G, S, D) = cache
    dq, dkeys, dvalues = attention_backward(dy, cache)  # dkeys, dvalues: (B, H, S, D)
    H = dq.shape[1]
    # TODO: dk and dv (B, G, S, D).
    dk = dkeys.reshape(B, G, H // G, S, D).sum(axis=2)
    dv = dvalues.reshape(B, G, H // G, S, D).sum(axis=2)
    # END
    return dq, dk, dv


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "There is a function of NumPy that repeats each element of an axis, and one that repeats the axis as a whole. "
    "With H = 6 and G = 2, the query heads use the key heads 0, 0, 0, 1, 1, 1.",
    "np.repeat has an argument `axis`. Going back, the gradients of neighbouring heads belong together: cut the axis "
    "of H heads into G groups of H/G heads, as when you split the columns into heads, and sum within each group.",
    "keys = np.repeat(k, H // G, axis=1). dkeys.reshape(B, G, H // G, S, D) has the heads of a group on axis 2.",
)
LIBRARY = ops.attention
MISTAKES = (
    ("np.repeat(k, H // G, axis=1)", "np.tile(k, (1, H // G, 1, 1))", "query head 1 uses key head 0"),
    ("np.repeat(v, H // G, axis=1)", "np.repeat(v, H // G, axis=0)", r"line \d+: return p @ v"),
    ("keys.reshape(B, G, H // G, S, D).sum(axis=2)", "keys[:, :: H // G]", r"dk\[.*key head 0 gets"),
    (
        "keys.reshape(B, G, H // G, S, D).sum(axis=2)",
        "keys.reshape(B, H // G, G, S, D).sum(axis=1)",
        r"dk\[.*gets the sum",
    ),
    ("values.reshape(B, G, H // G, S, D).sum(", "values.reshape(B, G, H // G, S, D).mean(", r"dv\[.*gets the sum"),
)


def check(student):
    for B, H, G, T, S, D in ((1, 6, 2, 3, 4, 5), (2, 6, 3, 4, 2, 5)):
        q, k, v = normal(0, B, H, T, D), normal(1, B, G, S, D), normal(2, B, G, S, D)
        y, cache = student.grouped_attention(q, k, v)
        right, right_cache = ops.attention(q, k, v)
        for h in range(H):
            why = f"With H = {H} and G = {G}, query head {h} uses key head {h * G // H}"
            expect_close(f"head {h}, y", y[:, h], right[:, h], why)
        dy = normal(3, B, H, T, D)
        why = f"With H = {H} and G = {G}, key head 0 gets the sum over the query heads 0 ... {H // G - 1}, and so on"
        _, dk, dv = student.grouped_attention_backward(dy, cache)
        _, right_dk, right_dv = ops.attention_backward(dy, right_cache)
        expect_close("dk", dk, right_dk, why)
        expect_close("dv", dv, right_dv, why)
        check_pair(student, "grouped_attention", q, k, v, max_elements=40)

"""Attention, backward

Write the equations of the last exercise in NumPy, for all B sequences and H heads at once. A sum over an index that two
arrays share is a matrix product. `@` multiplies the last two axes, for each sequence and head by itself, and
swapaxes(-1, -2) transposes them:

    Σ_d q_td k_sd    is    q @ k.swapaxes(-1, -2)

float32 must stay float32, so take the square root with math.sqrt: np.sqrt(5) is a number of type float64, and an array
divided by it becomes float64 too.
"""

import math

import numpy as np


def attention(q, k, v):
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(q_t · k_s/√D). q: (B, H, T, D); k, v: (B, H, S, D)."""
    a = q @ k.swapaxes(-1, -2)  # (B, H, T, S)
    z = a / math.sqrt(q.shape[-1])
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, (q, k, v, p)


def attention_backward(dy, cache):
    q, k, v, p = cache  # (B, H, T, D), (B, H, S, D), (B, H, S, D), (B, H, T, S)
    # TODO: dq, dk and dv, of the shapes of q, k and v. The order is that of the derivation, last step first.
    dv = p.swapaxes(-1, -2) @ dy
    dp = dy @ v.swapaxes(-1, -2)
    dz = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    da = dz / math.sqrt(q.shape[-1])
    dq = da @ k
    dk = da.swapaxes(-1, -2) @ q
    # END
    return dq, dk, dv


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "Look at the two indices of a result and at the one that is summed over. For dv it is t, which has to be the "
    "last axis of the first factor, and the last but one of the second.",
    "Where the sum runs over t (dv, dk), the first factor is transposed; over d (dp), the second; over s (dq), "
    "none. For dz use your softmax_backward, with p for y and dp for dy.",
    "dv = p.swapaxes(-1, -2) @ dy and dp = dy @ v.swapaxes(-1, -2). Divide dz by what the forward divides a by; "
    "then write dq and dk in the same way.",
)
LIBRARY = ops.attention
MISTAKES = (
    (
        "(dp - (p * dp).sum(axis=-1, keepdims=True))",
        "dp",
        "wrong gradient at [qk]",
        "the sum in the softmax is left out: raising one score lowers all other probabilities of its row",
    ),
    (
        "(p * dp).sum(axis=-1, keepdims",
        "(p * dp).sum(axis=-2, keepdims",
        "wrong gradient at [qk]",
        "the sum in the softmax runs over the queries and not over the keys",
    ),
    ("da = dz / math.sqrt(q.shape[-1])", "da = dz", "wrong gradient at [qk]", "the division by √D is left out"),
    (
        "dk = da.swapaxes(-1, -2) @ q",
        "dk = (q.swapaxes(-1, -2) @ da).reshape(k.shape)",
        "wrong gradient at k",
        "dk is computed with its axes exchanged, and a reshape hides it",
    ),
    ("dv = p.swapaxes(-1, -2) @ dy", "dv = p @ dy", r"line \d+: dv = p @ dy"),
    ("da = dz / math.sqrt(", "da = dz / np.sqrt(", "gradient of q is float64 where"),
)


def check(student):
    for B, H, T, S, D in ((1, 2, 3, 4, 5), (2, 3, 4, 6, 5)):
        q, k, v = normal(T, B, H, T, D), normal(S, B, H, S, D), normal(D, B, H, S, D)
        expect_close("y", student.attention(q, k, v)[0], ops.attention(q, k, v)[0], "The forward has changed")
        check_pair(student, "attention", q, k, v, max_elements=50)

"""Columns of dV in the wrong place

What was wrong. A kernel writes gradients in strips of columns. The width of a strip is computed from the width of q
and k, and used for dv too. Where the width of v is no multiple of it, rows are written further apart than they are
read, and columns of dv end up in other columns.

Why its tests passed. They took the same width for q, k and v, or widths that are multiples of the strip.

What finds it. Sizes that all differ.

How to derive it. dv_sd = Σ_t p_ts dy_td is a sum over t for each column d of v. The width of q is not in it, so no
number that is computed from it may be either.
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "Dao-AILab/flash-attention 2552"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S E")
NAMED = "The gradient of v is right, but in rows of 5 numbers, where there should be 2"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, p = cache
    dq, dk, dv = attend_backward(dy, q, k, v, p)
    width, strip = dv.shape[-1], q.shape[-1]
    written = np.zeros((*dv.shape[:-1], -(-width // strip) * strip), dv.dtype)
    written[..., :width] = dv
    return dq, dk, written.ravel()[: dv.size].reshape(dv.shape).copy()


def right(dy, cache):
    return attend_backward(dy, *cache)

"""A tail that was never written

What was wrong. dQ is added up in a buffer whose width is rounded up to a multiple of 32, by a kernel that rounds the
width of a head to a multiple of 16. What the kernel does not write is left from before, and read back as columns of
dQ. In this exhibit the kernel writes an even number of columns, and what was left from before is 1.

Why its tests passed. They took widths that are multiples of both: 64 and 128.

What finds it. A width that is a multiple of neither, such as 5.

How to derive it. dq_td = Σ_s dz_ts k_sd has the columns of k, no more and no fewer. If memory is padded, both sides
must mean the same padding.
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "Dao-AILab/flash-attention 2896"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D")
NAMED = "right except at index"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    dq, dk, dv = attend_backward(dy, *cache)
    D = dq.shape[-1]
    accumulator = np.ones((*dq.shape[:-1], D + 3), dq.dtype)
    kept = D - D % 2
    accumulator[..., :kept] = dq[..., :kept]
    return accumulator[..., :D].copy(), dk, dv


def right(dy, cache):
    return attend_backward(dy, *cache)

"""A workspace that the next call reuses

What was wrong. The backward of a fused attention leaves intermediate results in a workspace that the allocator hands
out again. The second of two calls finds the numbers of the first, and adds to them: dk and dv depend on what ran
before.

Why its tests passed. One backward in a fresh process is right.

What finds it. A second call with the same arguments.

How to derive it. dk and dv are sums that begin at zero. What begins at zero must be set to zero, in this call.
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "NVIDIA/TransformerEngine 2448"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D")
NAMED = "Something is added up"
WORKSPACE: dict = {}


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    dq, dk, dv = attend_backward(dy, *cache)
    workspace = WORKSPACE.setdefault(dk.shape, [np.zeros_like(dk), np.zeros_like(dv)])
    for total, g in zip(workspace, (dk, dv), strict=True):
        total += g
    return dq, workspace[0].copy(), workspace[1].copy()


def right(dy, cache):
    return attend_backward(dy, *cache)

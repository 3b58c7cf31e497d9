"""Attention that cuts the graph

What was wrong. Attention was computed with operations that record nothing for backward, so it cut the graph. The
report is about a whole layer; here it is about the probabilities. Only v gets a gradient, and q and k get zeros: the
model learns what to say, and never where to look.

Why its tests passed. The loss falls, since v and everything after it learns.

What finds it. Any comparison of dq with numerical differences.

How to derive it. q and k change y through p alone, so the chain rule has three factors, of which none is zero:

    dq = Σ dy ∂y/∂p ∂p/∂z ∂z/∂q
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "paiml/aprender 2203"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D")
NAMED = "zero everywhere"
PLANTED = "dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')", "dz_ts = 0"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, _, p = cache
    return np.zeros_like(q), np.zeros_like(k), p.swapaxes(-1, -2) @ dy


def right(dy, cache):
    return attend_backward(dy, *cache)

"""Values read with the width of keys

What was wrong. Backward computes dp_ts = Σ_d dy_td v_sd, and lets d run over the width of q and k. Where v is wider,
its last columns are missing from the sum, and dq and dk are wrong.

Why its tests passed. q, k and v had the same width.

What finds it. Sizes that all differ.

How to derive it. Give each size a letter of its own: q (T, D), k (S, D), v (S, E). Then dp_ts = Σ_e dy_te v_se cannot
be written with D.
"""

import math

from .parts import attend_backward, probabilities

SOURCE = "XunhaoLai/native-sparse-attention-triton 27 (2)"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S E")
NAMED = "The sizes make it wrong: it is right with .* D = 5, .* E = 2, and wrong with .* D = 3, .* E = 6"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, p = cache
    D = q.shape[-1]
    dp = dy[..., :D] @ v[..., :D].swapaxes(-1, -2)
    dz = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(D)
    return dz @ k, dz.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy


def right(dy, cache):
    return attend_backward(dy, *cache)

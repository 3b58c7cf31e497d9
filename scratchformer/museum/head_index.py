"""The head divided by the wrong count

What was wrong. Query heads share the heads of k and v, in an interleaved order: query head h uses head h mod G.
Backward splits h by the number R of query heads in a group, where forward and dq split it by the number G of groups.
Some heads of dk and dv are never written, others twice.

Why its tests passed. With as many groups as heads in a group, the two numbers are the same.

What finds it. Different sizes for G and R.

How to derive it. y_h = p_h v_{h mod G}. All query heads with the same h mod G use one head of v, so its gradient is
the sum over them:

    dv_g = Σ_{h, h mod G = g} p_hᵀ dy_h
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "XunhaoLai/native-sparse-attention-triton 27"
OPERATION = "attention"
ARGUMENTS = ("GR T D", "G S D", "G S D")
NAMED = "it is right where G = 1, and where G = R"


def forward(q, k, v):
    g = np.arange(len(q)) % len(k)
    p = probabilities(q, k[g])
    return p @ v[g], (q, k, v, p)


def wrong(dy, cache):
    q, k, v, p = cache
    H, G = len(q), len(k)
    return backward(dy, q, k, v, p, np.arange(H) % (H // G) % G)


def right(dy, cache):
    q, k, v, p = cache
    return backward(dy, q, k, v, p, np.arange(len(q)) % len(k))


def backward(dy, q, k, v, p, g):
    shared = np.arange(len(q)) % len(k)
    dq, of_heads_k, of_heads_v = attend_backward(dy, q, k[shared], v[shared], p)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    np.add.at(dk, g, of_heads_k)
    np.add.at(dv, g, of_heads_v)
    return dq, dk, dv

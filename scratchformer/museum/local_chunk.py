"""Ring attention that uses its own chunk only

What was wrong. The keys and values of a long sequence are divided into chunks, which go around a ring of processes.
Backward passes the chunks around too, but calls a function that reads k and v from what the first step of forward had
saved: always the process's own chunk.

Why its tests passed. One process has one chunk, and then it is the right one.

What finds it. Two chunks, and any comparison of dq with numerical differences.

How to derive it. The sum over all keys is a sum over chunks c and over the keys in each:

    dq_t = Σ_c Σ_s dz_cts k_cs

The chunk is an index of k like any other, so it cannot be left out.
"""

import math

from .parts import attend_backward, probabilities

SOURCE = "NVIDIA-NeMo/Automodel 3157 (on diffusers)"
OPERATION = "attention"
ARGUMENTS = ("T D", "NS D", "NS D", lambda draw: draw.N)
NAMED = "it is right where N = 1"
PLANTED = (
    "dq_td = Σ_s da_ts k_sd",
    "dq_td = Σ_s p_ts (Σ_d' dy_td' v_{s mod 2, d'} − Σ_s' p_ts' dp_ts') k_{s mod 2, d}/√(D)",
)


def forward(q, k, v, chunks):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p, chunks)


def wrong(dy, cache):
    q, k, v, p, chunks = cache
    S, scale = len(k) // chunks, 1 / math.sqrt(q.shape[-1])
    _, dk, dv = attend_backward(dy, q, k, v, p)
    own_k, own_v, dq = k[:S], v[:S], 0
    delta = (p * (dy @ v.T)).sum(axis=-1, keepdims=True)
    for c in range(chunks):
        part = p[:, c * S : (c + 1) * S]
        dq = dq + part * (dy @ own_v.T - delta) * scale @ own_k
    return dq, dk, dv


def right(dy, cache):
    return attend_backward(dy, *cache[:4])

"""The sum over a group is missing

What was wrong. R query heads share one head of k and v, which are broadcast in forward. The gradients of k and v then
have one part for each query head. They were not added up: the last one written stayed.

Why its tests passed. The tests of grouped attention ran forward, and those of backward had one query head in a group.

What finds it. Any comparison of dk with numerical differences, with two heads in a group.

How to derive it. A number that is used in many places gets the sum of all their gradients:

    y_gr = p_gr v_g for all r, so dv_g = Σ_r p_grᵀ dy_gr
"""

from .parts import attend_backward, probabilities

SOURCE = "marin-community/levanter 449"
OPERATION = "attention"
ARGUMENTS = ("G R T D", "G S D", "G S D")
NAMED = "last position along axis 1"
PLANTED = "dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd", "dk_gsd = Σ_t da_hts q_htd with h = ⌊(g + 1) H/G⌋ − 1"


def forward(q, k, v):
    p = probabilities(q, k[:, None])
    return p @ v[:, None], (q, k, v, p)


def wrong(dy, cache):
    q, k, v, p = cache
    dq, dk, dv = attend_backward(dy, q, k[:, None], v[:, None], p)
    return dq, dk[:, -1].copy(), dv[:, -1].copy()


def right(dy, cache):
    q, k, v, p = cache
    dq, dk, dv = attend_backward(dy, q, k[:, None], v[:, None], p)
    return dq, dk.sum(axis=1), dv.sum(axis=1)

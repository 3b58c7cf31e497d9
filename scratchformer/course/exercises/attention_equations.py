"""The derivation of attention

Each query t is compared with all keys s by a dot product. The softmax of a query's scores gives weights p, which add up
to 1, and its output is the mean of the values with these weights. Here is one head: q (T, D), k and v (S, D).

Fill in each `?`, the gradients of all steps from the last to the first. Two of the steps are products of two matrices:
as in `linear`, such a product has two gradients. The softmax you know already; it runs over the keys s of each query t.
"""

import math
from typing import NamedTuple

import numpy as np


class Cache(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    p: np.ndarray


def attention(q, k, v):
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(q_t · k_s/√D).

    Forward:

        a_ts = Σ_d q_td k_sd
        z_ts = a_ts/√D
        p_ts = exp(z_ts)/Σ_s' exp(z_ts')
        y_td = Σ_s p_ts v_sd

    Backward. The last step is a product of p and v:

        dp_ts = ⟦Σ_d dy_td v_sd⟧
        dv_sd = ⟦Σ_t p_ts dy_td⟧

    Then the softmax of each row, in terms of p and dp (a second index over the keys is written s'), and the scaling:

        dz_ts = ⟦p_ts (dp_ts − Σ_s' p_ts' dp_ts')⟧
        da_ts = ⟦dz_ts/√D⟧

    Last, the product of q and k:

        dq_td = ⟦Σ_s da_ts k_sd⟧
        dk_sd = ⟦Σ_t da_ts q_td⟧
    """
    z = q @ k.T / math.sqrt(q.shape[-1])  # (T, S)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, Cache(q, k, v, p)


# The student's file ends here.

from scratchformer import ops
from scratchformer.ops.attention import AttentionCache

from ..grading import Derivation, normal

HINTS = (
    "dp_ts collects what p_ts does to each y_td: it is a factor of the term with this s, in row t, for every d. So "
    "dp_ts = Σ_d dy_td ∂y_td/∂p_ts, and the derivative is the other factor.",
    "Each sum runs over the index that the left side does not have: over d for dp, over t for dv and dk, over s for "
    "dq. For dz take dz_k = y_k (dy_k − Σ_i dy_i y_i) from the softmax, with p for y and s for k.",
    "dp_ts = Σ_d dy_td v_sd, dv_sd = Σ_t p_ts dy_td, dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts'). Then da_ts is dz_ts "
    "times the constant of the forward, and dq and dk follow the pattern of dp and dv.",
)
LIBRARY = ops.attention
MISTAKES = (
    (
        "dk_sd = Σ_t da_ts q_td",
        "dk_sd = Σ_t dz_ts q_td",
        r"line \d+: dk_sd = .*is not true",
        "dz is used and not da: the scaling comes between them",
    ),
    (
        "dq_td = Σ_s da_ts k_sd",
        "dq_td = Σ_s dz_ts k_sd",
        r"line \d+: dq_td = .*is not true",
        "dz is used and not da: the scaling comes between them",
    ),
    ("dp_ts = Σ_d dy_td v_sd", "dp_ts = Σ_d dy_sd v_td", r"dp_ts = .*index s has size 4 in dy, but 5 elsewhere"),
    ("dv_sd = Σ_t p_ts dy_td", "dv_sd = Σ_t dp_ts dy_td", r"line \d+: dv_sd = .*is not true.*the left side is"),
    (
        "p_ts (dp_ts − Σ_s' p_ts' dp_ts')",
        "p_ts dp_ts",
        r"line \d+: dz_ts = .*differs from",
        "the sum is left out: raising one score lowers all other probabilities of its row",
    ),
    (
        "− Σ_s' p_ts' dp_ts'",
        "− Σ_t' p_t's dp_t's",
        r"line \d+: dz_ts = .*differs from",
        "the sum runs over the queries, not over the keys",
    ),
    ("da_ts = dz_ts/√D", "da_ts = dz_ts", r"line \d+: da_ts = .*differs from", "the division by √D is left out"),
    ("dk_sd = Σ_t da_ts q_td", "dk_sd = Σ_t da_ts q_sd", r"dk_sd = .*index s has size 4 in q, but 5 elsewhere"),
)


def derivation(student):
    runs = [(normal(0, T, D), normal(1, S, D), normal(2, S, D)) for T, S, D in ((4, 5, 3), (3, 6, 2))]
    return Derivation(student.attention, attention_backward, runs)


def attention_backward(dy, cache):
    """By the library, on one sequence with one head."""
    whole = AttentionCache(*(x[None, None] for x in cache))
    return tuple(x[0, 0] for x in ops.attention_backward.reference(dy[None, None], whole))

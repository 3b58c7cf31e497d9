"""The derivation of attention by tiles

With 10,000 queries and keys, the scores and probabilities of one head are 100 million numbers each. Attention by tiles
never holds them all: it takes W keys at a time. Forward keeps one number for each query, lse, the log-sum-exp of its
scores, and backward computes the probabilities of each tile again. Fill in each `?`.

Three ideas make this work. A probability follows from its own score and lse. The results of tiles can be put together
afterwards. And the sum in the softmax's backward, over a whole row, can be found without the row.
"""

import math
from typing import NamedTuple

import numpy as np


class Cache(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    y: np.ndarray
    lse: np.ndarray


def tiled_attention(q, k, v, W):
    """y_t = Σ_s p_ts v_s, from tiles of W keys: tile j has the keys s with ⌊s/W⌋ = j.

    Forward. The probabilities once more, in terms of z_ts and lse_t alone:

        z_ts = Σ_d q_td k_sd/√D
        lse_t = log(Σ_s exp(z_ts))
        p_ts = exp(z_ts)/Σ_s' exp(z_ts') = ⟦exp(z_ts − lse_t)⟧
        y_td = Σ_s p_ts v_sd

    If tile j were alone, it would have this log-sum-exp and this output:

        e_tj = log(Σ_{s, ⌊s/W⌋ = j} exp(z_ts))
        u_tjd = Σ_{s, ⌊s/W⌋ = j} exp(z_ts − e_tj) v_sd

    Now the whole from all tiles, in terms of e, u and lse (the letter j runs over the tiles):

        lse_t = log(Σ_s exp(z_ts)) = ⟦log(Σ_j exp(e_tj))⟧
        y_td = Σ_s exp(z_ts − lse_t) v_sd = ⟦Σ_j exp(e_tj − lse_t) u_tjd⟧

    Backward. In the sum over the row, put in dp, exchange the two sums, and look for y:

        dv_sd = Σ_t p_ts dy_td
        dp_ts = Σ_d dy_td v_sd
        r_t = Σ_s p_ts dp_ts = ⟦Σ_d dy_td y_td⟧

    With p, dp and r each tile can be treated by itself:

        dz_ts = ⟦p_ts (dp_ts − r_t)⟧
        dq_td = Σ_s dz_ts k_sd/√D
        dk_sd = Σ_t dz_ts q_td/√D
    """
    z = q @ k.T / math.sqrt(q.shape[-1])  # all at once, since this is only to compare with
    lse = np.log(np.exp(z).sum(axis=-1))
    y = np.exp(z - lse[:, None]) @ v
    return y, Cache(q, k, v, y, lse)


# The student's file ends here.

from scratchformer import ops
from scratchformer.dispatch import twins_of

from ..grading import Derivation, normal

HINTS = (
    "Σ_s' exp(z_ts') is exp(lse_t), and the quotient of two exponentials is one exponential. In the same way "
    "exp(e_tj) is the sum over tile j, and the sum over all keys is the sum over tiles of such sums.",
    "exp(z_ts − lse_t) = exp(e_tj − lse_t) exp(z_ts − e_tj), where the first factor is the same for the whole tile. "
    "In r_t = Σ_s p_ts Σ_d dy_td v_sd, take the sum over d and dy_td to the front: what remains is Σ_s p_ts v_sd.",
    "p_ts = exp(z_ts − lse_t). The log-sum-exp of all keys is log(Σ_j exp(e_tj)), and tile j enters y with the weight "
    "exp(e_tj − lse_t). r_t is the dot product of row t of dy with row t of y, and dz_ts = p_ts (dp_ts − r_t).",
)
LIBRARY = twins_of(ops.attention)[-1].forward
MISTAKES = (
    ("= exp(z_ts − lse_t)\n", "= exp(z_ts)/lse_t\n", r"line \d+: p_ts = .*is not true"),
    ("= exp(z_ts − lse_t)\n", "= exp(z_ts)/Σ_s exp(z_ts)\n", "lse_t has the sum already"),
    ("= log(Σ_j exp(e_tj))", "= Σ_j e_tj", r"line \d+: lse_t = .*is not true"),
    (
        "Σ_j exp(e_tj − lse_t) u_tjd",
        "Σ_j u_tjd",
        r"line \d+: y_td = .*is not true",
        "the tiles are added without their weights",
    ),
    ("= Σ_d dy_td y_td", "= Σ_s p_ts Σ_d dy_td v_sd", "in terms of dy and y"),
    ("p_ts (dp_ts − r_t)", "p_ts (dp_ts − r_t/D)", r"line \d+: dz_ts = .*differs from"),
)

# The beginning of a line, what its answer must not contain, and why.
RESTRICTED = (
    ("p_ts = exp(z_ts)/Σ_s' exp(z_ts') = ", "Σ|sum|softmax", "Write it without a sum: lse_t has the sum already"),
    ("lse_t = log(Σ_s exp(z_ts)) = ", "z_t|lse", "Write it in terms of e_tj, which is known of each tile"),
    ("y_td = Σ_s exp(z_ts − lse_t) v_sd = ", "z_t|v_s|p_t", "Write it in terms of e_tj, u_tjd and lse_t"),
    (
        "r_t = Σ_s p_ts dp_ts = ",
        "p_t|v_s",
        "Write it in terms of dy and y: p and v of all keys are never in memory at once",
    ),
    ("dz_ts = ", "Σ|sum", "Write it with r_t, without a sum: a tile has only some of the keys"),
)


def derivation(student):
    runs = [(normal(0, T, D), normal(1, 3 * W, D), normal(2, 3 * W, D), W) for T, D, W in ((4, 5, 2), (5, 4, 3))]
    return Derivation(student.tiled_attention, backward, runs, {"J": 3}, RESTRICTED)


def backward(dy, cache):
    """The gradients by the library, on one sequence with one head."""
    q, k, v, _, _ = (x[None, None] for x in cache)
    _, cache = ops.attention.reference(q, k, v)
    return tuple(x[0, 0] for x in ops.attention_backward.reference(dy[None, None], cache))

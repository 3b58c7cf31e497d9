"""The derivation of rotary positions

Attention does not know where a token stands. Rotary positions tell it: the D numbers of a query or key are taken as D/2
points in a plane, and each point is turned by an angle that grows with its position. There is one such point here for
each position t, x_t = (x_t0, x_t1), and the matrix R_t turns it by the angle t θ:

    R_t = | cos tθ   −sin tθ |
          | sin tθ    cos tθ |

Fill in each `?`. An index that is computed goes in braces, with commas: R_{t+1,i,j} is an element of the matrix of the
next position. δ_ij (or d_ij) is 1 where i = j, and 0 elsewhere.
"""

import numpy as np

THETA = 0.7


def rotary(x):
    """y_t = R_t x_t, where R_t turns by the angle t θ. x: (T, 2).

    Forward:

        R_tij = cos(t θ) where i = j, −sin(t θ) where i < j, sin(t θ) elsewhere
        y_ti = Σ_j R_tij x_tj

    Backward:

        dx_tj = ⟦Σ_i R_tij dy_ti⟧

    The transpose of R_t times R_t (remember that cos² + sin² = 1), and x in terms of R and y:

        Σ_i R_tij R_tik = ⟦δ_jk⟧
        x_tj = ⟦Σ_i R_tij y_ti⟧

    So the backward does to dy what takes y to x: it turns by the same angle, back. Now two positions, t ≤ s. Turning by
    the angle of s and back by that of t is a single turn, by one of these matrices:

        Σ_i R_tij R_sik = ⟦R_{s−t,j,k}⟧ for s ≥ t

    So the dot product of a query at t and a key at s depends on where they are only through s − t:

        Σ_i y_ti y_si = Σ_j Σ_k x_tj R_{s−t,j,k} x_sk for s ≥ t
    """
    angles = np.arange(len(x)) * THETA
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x.T
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1), angles


# The student's file ends here.

from scratchformer import ops

from ..grading import Derivation, normal

HINTS = (
    "y = R x is a product of a matrix and a vector for each t, so dx follows the pattern of `linear`: the sum runs "
    "over the index of y. Multiply R_t by its transpose by hand, for one angle.",
    "A rotation's transpose turns back, so that the product of the two changes nothing: it is δ. Multiply both sides "
    "of y_ti = Σ_k R_tik x_tk by R_tij and sum over i. Turning by −t θ and then by s θ is turning by (s − t) θ.",
    "dx_tj = Σ_i R_tij dy_ti, Σ_i R_tij R_tik = δ_jk, and x_tj follows from y_ti in the same way as dx_tj from dy_ti. "
    "The last is the matrix of position s − t, with the indices j and k.",
)
LIBRARY = ops.rotary
MISTAKES = (
    (
        "dx_tj = Σ_i R_tij dy_ti",
        "dx_tj = Σ_i R_tji dy_ti",
        r"line \d+: dx_tj = .*is not true",
        "dy is turned the same way as x, not back",
    ),
    ("= δ_jk", "= 1", r"line \d+: Σ_i R_tij R_tik = .*is not true"),
    ("= δ_jk", "= Σ_i R_tik R_tij", "both sides|without R"),
    (
        "x_tj = Σ_i R_tij y_ti",
        "x_tj = Σ_i R_tji y_ti",
        r"line \d+: x_tj = .*is not true",
        "y is turned again instead of back",
    ),
    (
        "= R_{s−t,j,k} for",
        "= R_{s−t,k,j} for",
        r"line \d+: Σ_i R_tij R_sik = .*is not true",
        "the turn is by t − s, the wrong way",
    ),
)
RESTRICTED = (
    ("Σ_i R_tij R_tik = ", "R", "Write it without R: multiply the two matrices"),
    ("x_tj = ", "x", "Write it in terms of R and y"),
    ("Σ_i R_tij R_sik = ", "Σ|sum", "Write it with one R and no sum"),
)


def derivation(student):
    runs = (normal(0, 5, 2),), (normal(1, 4, 2),)
    return Derivation(student.rotary, backward, runs, {"θ": student.THETA}, RESTRICTED)


def backward(dy, angles):
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = dy.T
    return np.stack([a * cos + b * sin, b * cos - a * sin], axis=-1)

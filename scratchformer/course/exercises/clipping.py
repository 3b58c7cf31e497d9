"""Clipping by the global norm

A rare, huge gradient can undo what hundreds of steps have learned. Before the step, scale the gradients of all
parameters by one number, so that their norm, taken together, is at most max_norm:

    norm = √(Σ_i g_i²), over all elements of all arrays        g ← min(1, max_norm/norm) g

All are scaled by the same number, so the direction of the step stays.
"""

import numpy as np


def clip(gradients, max_norm):
    """gradients: a list of arrays, which are changed in place. Returns their norm before clipping."""
    # TODO: norm, and the gradients scaled if their norm is larger than max_norm.
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    if norm > max_norm:
        for g in gradients:
            g *= max_norm / norm
    # END
    return norm


# The student's file ends here.

import numpy as np

from scratchformer import optim

from ..grading import Wrong, expect_close, normal

HINTS = (
    "Add the squares of all elements of all arrays before you take the root.",
    "If the norm is at most max_norm, nothing changes. Otherwise all arrays are multiplied by the one number "
    "after which their norm is max_norm.",
    "The factor is max_norm/norm. `g *= factor` changes the array in place; `g = g * factor` only gives the name "
    "g to a new one.",
)
LIBRARY = optim.clip_by_global_norm
MISTAKES = (
    ("g *= max_norm / norm", "g *= 1 / norm", "All are multiplied"),
    ("g *= max_norm / norm", "g *= max_norm / (norm + 1e-6)", "leave out the small number"),
    (
        "g *= max_norm / norm",
        "g *= max_norm / np.sqrt((g**2).sum())",
        r"gradients\[\d\]",
        "each array is scaled by its own norm",
    ),
    (
        "    if norm > max_norm:\n        for g",
        "    if True:\n        for g",
        "at most max_norm already",
        "a small norm is scaled up",
    ),
    ("            g *= max_norm / norm", "            g = g * max_norm / norm", r"gradients\[0\].*in place"),
    (
        "        for g in gradients:\n            g *= max_norm / norm",
        "        gradients[:] = [g * max_norm / norm for g in gradients]",
        r"gradients\[0\].*in place",
    ),
    (
        "            g *= max_norm / norm",
        "            np.clip(g, -max_norm, max_norm, out=g)",
        "All are multiplied",
        "each number is clipped by itself: that changes the direction",
    ),
    (
        "= np.sqrt(sum((g**2).sum() for g in gradients))",
        "= sum((g**2).sum() for g in gradients)",
        "norm",
        "the root is left out",
    ),
    (
        "np.sqrt(sum((g**2).sum() for g in gradients))",
        "sum(np.sqrt((g**2).sum()) for g in gradients)",
        "norm",
        "the norms of the arrays are added: add the squares, then take the root",
    ),
)


def check(student):
    for scale, why in (
        (10.0, "All are multiplied by the same number, max_norm/norm"),
        (0.4, "Their norm is at most max_norm already"),
    ):
        gradients = [scale * normal(0, 3, 4), scale * normal(1, 5), scale * normal(2, 2, 2, 2)]
        before, expected = [g.copy() for g in gradients], [g.copy() for g in gradients]
        right = optim.clip_by_global_norm(expected, 2.5)
        in_place = list(gradients)  # the student may put other arrays into the list
        norm = student.clip(gradients, 2.5)
        expect_close("norm", norm, right, "It is the norm of all arrays together, before they are scaled")
        if scale > 1 and all(map(np.array_equal, in_place, before)):
            raise Wrong("gradients[0] is as it was before: the arrays must be changed in place")
        for i, (g, right, given) in enumerate(zip(in_place, expected, before, strict=True)):
            if np.allclose(g, given * 2.5 / (norm + 1e-6), rtol=1e-12):
                raise Wrong("The norm comes out below max_norm: leave out the small number that is added to norm")
            expect_close(f"gradients[{i}]", g, right, why)
    zeros = [np.zeros(3), np.zeros((2, 2))]
    expect_close("norm", student.clip(zeros, 1.0), 0.0)
    expect_close("gradients[0]", zeros[0], np.zeros(3), "Gradients of zero stay zero")

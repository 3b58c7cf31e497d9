"""The upstream gradient is not passed on

What was wrong. A backward of attention calls a library's function for gradients, and does not hand it dy. What comes
back are the gradients of the sum of all outputs.

Why its tests passed. They ran backward on the sum of the outputs, for which dy is one everywhere. Then it is right.

What finds it. A dy of random numbers.

How to derive it. Every gradient is a sum over the outputs, each with its own dy as a factor:

    dx_i = Σ_j dy_j ∂y_j/∂x_i

There is no gradient without it.
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "mindspore-lab/mindone 1438"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D")
NAMED = "dy is not used|as if dy were 1"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    return attend_backward(np.ones_like(dy), *cache)


def right(dy, cache):
    return attend_backward(dy, *cache)

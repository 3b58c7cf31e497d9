"""Backward draws another dropout mask

What was wrong. To save memory, a compiler computes dropout again in backward, instead of keeping its mask, and draws
new random numbers for it. Forward drops some elements, and backward passes gradients through others.

Why its tests passed. Dropout is usually switched off in tests, since its results are random.

What finds it. Two backwards of one forward, which give different gradients; and numerical differences, if forward
takes its random numbers from a key.

How to derive it. y_i = m_i x_i/(1 − p) with the mask as it was drawn: m is a constant of this forward, so

    dx_i = m_i dy_i/(1 − p)
"""

import numpy as np

SOURCE = "pytorch/pytorch 190717"
OPERATION = "dropout"
ARGUMENTS = ("B T C", 0)
NAMED = "two runs|again"
RANDOM = np.random.default_rng(0)


def forward(x, seed):
    mask = np.random.default_rng(seed).random(x.shape) < 0.5
    return mask * x * 2, mask


def wrong(dy, mask):
    return (RANDOM.random(mask.shape) < 0.5) * dy * 2


def right(dy, mask):
    return mask * dy * 2

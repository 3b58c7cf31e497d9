"""Four elements, one random number

What was wrong. A compiler that draws four random numbers at a time gave each group of four neighbours the same one in
forward, and under checkpointing computed the mask again in another way: backward's mask was not forward's. In this
exhibit it is backward that has the groups of four.

Why its tests passed. The bug needs a transposed array that is written to memory before dropout. Dropout alone was
right.

What finds it. Numerical differences with a mask from a key.

How to derive it. dx_i = m_i dy_i/(1 − p), and the m of both passes must be one array, or one function of one key.
"""

import numpy as np

SOURCE = "pytorch/pytorch 198333"
OPERATION = "dropout"
ARGUMENTS = ("B T C", 0)
NAMED = "zero in other places than it should be"


def forward(x, seed):
    numbers = np.random.default_rng(seed).random(x.size)
    return (numbers < 0.5).reshape(x.shape) * x * 2, (numbers, x.shape)


def wrong(dy, cache):
    numbers, shape = cache
    first = np.arange(len(numbers)) // 4 * 4
    return (numbers[first] < 0.5).reshape(shape) * dy * 2


def right(dy, cache):
    numbers, shape = cache
    return (numbers < 0.5).reshape(shape) * dy * 2

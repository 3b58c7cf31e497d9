"""A checkpoint that does not restore the seed

What was wrong. A checkpoint keeps the input of a block only, and runs the block again in backward. It did not set the
random numbers back to where they were, so that the second run drops other elements than the first: the gradient
belongs to another loss.

Why its tests passed. Without dropout both runs of a block are the same.

What finds it. The same block with a key for its random numbers, compared with numerical differences.

How to derive it. Both runs must be the same function of x. A key that is an argument of both makes them so; a state
that moves on between them does not.
"""

import numpy as np

SOURCE = "openai/guided-diffusion 167"
OPERATION = "dropout"
ARGUMENTS = ("B T C", 0)
NAMED = "zero in other places than it should be"


def block(x, seed):
    mask = np.random.default_rng(seed).random(x.shape) < 0.5
    return np.tanh(x) * mask * 2, (np.tanh(x), mask)


def forward(x, seed):
    y, _ = block(x, seed)
    return y, (x, seed)


def gradient(dy, x, seed):
    t, mask = block(x, seed)[1]
    return dy * mask * 2 * (1 - t * t)


def wrong(dy, cache):
    x, seed = cache
    return gradient(dy, x, seed + 1)


def right(dy, cache):
    return gradient(dy, *cache)

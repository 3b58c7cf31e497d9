"""Not divided by the number of steps

What was wrong. The gradients of several micro-batches were added up, and never divided by how many there are: the
gradient of a sum where the loss is a mean.

Why its tests passed. There was one micro-batch, or the optimizer was Adam, which does not see a constant factor. The
limit of the gradient's norm does: it clipped more with every micro-batch.

What finds it. Any comparison with numerical differences of the loss that is printed.

How to derive it. The loss is the mean over the A micro-batches, so each has the weight 1/A:

    L = 1/A Σ_a l_a, so dl_a = dL/A
"""

import numpy as np

SOURCE = "karpathy/nanoGPT 206"
ARGUMENTS = ("A",)
NAMED = "times what it should be: . is the size"


def forward(losses):
    return np.asarray(losses.mean()), losses


def wrong(dy, losses):
    return np.full_like(losses, dy)


def right(dy, losses):
    return np.full_like(losses, dy / max(len(losses), 1))

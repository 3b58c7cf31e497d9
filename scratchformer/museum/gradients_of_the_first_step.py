"""The first step counts twice

What was wrong. Each step of training ran backward first, and set the gradients to zero later. In the first step they
were added to what a test before it had left: its gradients were twice what they should be, and the loss curve never
came back to that of the plain implementation.

Why its tests passed. The test ran one backward, and set everything to zero before it.

What finds it. Two backwards, with nothing between them: a result that depends on how often backward was called is no
function of its arguments.

How to derive it. dw = Σ_n x_n dy_n is a sum that begins at zero.
"""

import numpy as np

SOURCE = "karpathy/llm.c 548"
OPERATION = "linear"
ARGUMENTS = ("N I", "I O")
NAMED = "something is kept from call to call"
PLANTED = "dw_io = Σ_n x_ni dy_no", "dw_io = 2 Σ_n x_ni dy_no"
GRADIENTS: dict = {}


def forward(x, w):
    return x @ w, (x, w)


def wrong(dy, cache):
    x, w = cache
    before = GRADIENTS.pop(w.shape, np.zeros_like(w))
    GRADIENTS[w.shape] = dw = x.T @ dy
    return dy @ w.T, dw + before.astype(w.dtype)


def right(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy

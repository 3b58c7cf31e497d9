"""Accumulators that nobody empties

What was wrong. The gradients of several micro-batches are added up in buffers on the graphics card. After the step of
the optimizer the buffers were not set to zero, so every step also used the gradients of all steps before it.

Why its tests passed. One step is right.

What finds it. A second call.

How to derive it. The gradient of a step is the sum over its own micro-batches: dw = Σ_a dw_a, from zero on.
"""

import numpy as np

SOURCE = "paiml/entrenar 257 (2)"
ARGUMENTS = ("A N", "N")
NAMED = "Something is added up"
BUFFERS: dict = {}


def forward(x, w):
    """A loss for each of A micro-batches: (x w)²/2."""
    z = x @ w
    return z * z / 2, (x, w, z)


def wrong(dy, cache):
    x, w, z = cache
    buffer = BUFFERS.setdefault(w.shape, np.zeros_like(w))
    for each, g in zip(x, dy * z, strict=True):
        buffer += each * g
    return (dy * z)[:, None] * w, buffer.copy()


def right(dy, cache):
    x, w, z = cache
    return (dy * z)[:, None] * w, (dy * z) @ x

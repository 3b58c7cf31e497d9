"""A chunk shorter than the filter

What was wrong. A causal convolution hands its last W − 1 inputs to the next chunk. Backward brings their gradients
home, and finds the first of them at position max(0, T − (W − 1)). For a chunk of fewer positions that is 0, as if
the first inputs of the state had come from this chunk, and every gradient lands a few places too early.

Why its tests passed. All chunks were longer than the filter.

What finds it. A chunk of two positions and a filter of five: sizes drawn in both orders.

How to derive it. Slot w of the state holds input t = T − (W − 1) + w, where there is one, so

    dx_t = dstate_{t − T + W − 1}

The index is right for every t and every T. There is nothing to clamp.
"""

import numpy as np

SOURCE = "fla-org/flash-linear-attention 1140"
ARGUMENTS = ("T C", lambda draw: draw.T + 2)
NAMED = r"shifted by \+1 along axis 0, with other numbers in the first places"


def forward(x, W):
    """state (W − 1, C): the last W − 1 rows of x; zeros stand for those before the first."""
    T = len(x)
    state = np.zeros((W - 1, x.shape[1]), x.dtype)
    state[max(0, W - 1 - T) :] = x[max(0, T - W + 1) :]
    return state, (T, W)


def wrong(dstate, cache):
    T, W = cache
    start = max(0, T - (W - 1))
    dx = np.zeros((T, dstate.shape[1]), dstate.dtype)
    dx[start:] = dstate[: T - start]
    return dx


def right(dstate, cache):
    T, W = cache
    dx = np.zeros((T, dstate.shape[1]), dstate.dtype)
    dx[max(0, T - W + 1) :] = dstate[max(0, W - 1 - T) :]
    return dx

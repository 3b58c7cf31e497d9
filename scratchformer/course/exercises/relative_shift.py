"""The shift of relative positions

When a score depends on the distance between query and key, all scores of a query come from one product with a table of
distances, from S − 1 (a key far before the query) down to −(T − 1) (a key after it). Column j of x (T, S + T − 1)
belongs to distance S − 1 − j. But the softmax needs a column for each key s. Key s is at distance t + S − T − s from
query t, so row t of y is a window of S numbers in row t of x; with T = 3 and S = 4:

    distance  3  2  1  0 −1 −2
    query 0   ·  ·  x  x  x  x
    query 1   ·  x  x  x  x  ·
    query 2   x  x  x  x  ·  ·

In the backward, each gradient goes back to the place that its number came from. No number outside the windows was used.
"""

import numpy as np


def places(T, S):
    """Where y[..., t, s] is in x: the rows t (T, 1) and the columns (T, S)."""
    t, s = np.arange(T)[:, None], np.arange(S)  # (T, 1), (S,)
    # TODO: columns: solve S − 1 − j = t + S − T − s for j.
    columns = s + (T - 1) - t
    # END
    return t, columns


def relative_shift(x):
    """(B, H, T, S + T − 1) -> (B, H, T, S)."""
    T = x.shape[-2]
    t, columns = places(T, x.shape[-1] - T + 1)
    return x[..., t, columns], x.shape


def relative_shift_backward(dy, shape):
    T, S = dy.shape[-2:]
    # TODO: dx, of this shape (B, H, T, S + T − 1) and the type of dy.
    t, columns = places(T, S)
    dx = np.zeros(shape, dy.dtype)
    dx[..., t, columns] = dy
    # END
    return dx


# The student's file ends here.

from scratchformer import ops

from ..grading import Wrong, check_pair, expect_close, normal

HINTS = (
    "The first window begins at column T − 1, the next at T − 2, the last at 0. And within a window, the next key "
    "is in the next column.",
    "So the column is s plus a number that is T − 1 for t = 0 and goes down by one with each t. In the backward, "
    "the numbers outside the windows get the gradient 0: begin with zeros, and write dy into the windows.",
    "columns = s + (T - 1) - t. The forward reads x[..., t, columns]; the backward assigns to dx[..., t, columns].",
)
LIBRARY = ops.relative_shift
MISTAKES = (
    ("s + (T - 1) - t\n", "s + t\n", r"columns\[0, 0\]: expected 2, got 0"),
    ("s + (T - 1) - t\n", "s + (S - 1) - t\n", r"columns\[0, 0\]: expected 2, got 3"),
    ("np.zeros(shape, dy.dtype)", "np.zeros(shape)", "float64 where"),
    ("np.zeros(shape, dy.dtype)", "np.empty(shape, dy.dtype)", "outside the windows"),
    ("dx[..., t, columns] = dy", "dx[..., :S] = dy", "wrong gradient at x", "all gradients go to the first S columns"),
)


def check(student):
    for B, H, T, S in ((1, 2, 3, 4), (2, 3, 5, 4)):
        t, s = np.indices((T, S))
        columns = student.places(T, S)[1]
        expect_close("columns", columns, s + T - 1 - t, f"For T = {T} and S = {S} the first window begins at {T - 1}")
        x, dy = normal(0, B, H, T, S + T - 1), normal(1, B, H, T, S)
        expect_close("y", student.relative_shift(x)[0], ops.relative_shift(x)[0])
        del x
        np.full((B, H, T, S + T - 1), np.nan)  # its memory is used again, so that what is not set shows
        dx = student.relative_shift_backward(dy, (B, H, T, S + T - 1))
        if np.isnan(dx).any():
            raise Wrong("dx is not set outside the windows: np.empty holds whatever was in memory")
        check_pair(student, "relative_shift", normal(0, B, H, T, S + T - 1))

"""The reshapes of multi-head attention

A projection to C columns is H projections to D = C/H columns side by side: head h owns the columns h D ... h D + D − 1.
To run all heads at once, attention wants them as an axis of their own, before the positions:

    (B, T, C) -> (B, H, T, D)        y_bhtd = x_{b, t, h D + d}

Afterwards they are joined again. Nothing is computed, numbers only move, so each backward moves the gradients back to
where their numbers came from. `reshape` keeps all numbers in their order, and only `transpose` changes it. Reshaping
straight to (B, H, T, D) gives the right shape, but mixes heads and positions.

(Results are copied, since the result of an operation must share no memory with its argument.)
"""

import numpy as np


def split_heads(x, H):
    """(B, T, C) -> (B, H, T, D)."""
    B, T, C = x.shape
    # TODO: y (B, H, T, D).
    y = x.reshape(B, T, H, C // H).transpose(0, 2, 1, 3)
    # END
    return y.copy(), x.shape


def split_heads_backward(dy, shape):
    B, T, C = shape
    # TODO: dx (B, T, C) from dy (B, H, T, D).
    dx = dy.transpose(0, 2, 1, 3).reshape(B, T, C)
    # END
    return dx.copy()


def join_heads(x):
    """(B, H, T, D) -> (B, T, C), the inverse of split_heads."""
    B, H, T, D = x.shape
    # TODO: y (B, T, C).
    y = x.transpose(0, 2, 1, 3).reshape(B, T, H * D)
    # END
    return y.copy(), x.shape


def join_heads_backward(dy, shape):
    B, H, T, D = shape
    # TODO: dx (B, H, T, D) from dy (B, T, C).
    dx = dy.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    # END
    return dx.copy()


# The student's file ends here.

from scratchformer import nn

from ..grading import Wrong, check_pair, normal

HINTS = (
    "Cut the last axis in two first: it has H blocks of D numbers, so C becomes (H, D), in this order. Only then is "
    "there an axis H that can be moved.",
    "From (B, T, H, D), exchanging axes 1 and 2 gives (B, H, T, D), and doing it once more brings them back. The "
    "backward of splitting does what joining does, and the other way round.",
    "y = x.reshape(B, T, H, C // H).transpose(0, 2, 1, 3) splits. To join, undo the two steps in the reverse order: "
    "transpose with the same four numbers, then reshape.",
)
LIBRARY = nn.CrossAttention
MISTAKES = (
    (
        "x.reshape(B, T, H, C // H).transpose(0, 2, 1, 3)",
        "x.reshape(B, H, T, C // H)",
        r"y\[0, 0, 1, 0\] must be x\[0, 1, 0\], got x\[0, 0, 5\]",
    ),
    (
        "x.reshape(B, T, H, C // H).transpose(0, 2, 1, 3)",
        "x.reshape(B, T, C // H, H).transpose(0, 3, 1, 2)",
        r"y\[0, 0, 0, 1\] must be x\[0, 0, 1\], got x\[0, 0, 3\]",
    ),
    (
        "dy.transpose(0, 2, 1, 3).reshape(B, T, C)",
        "dy.reshape(B, T, C)",
        "split_heads: wrong gradient at x",
        "dy is reshaped before its axes are brought back into their order",
    ),
    ("x.transpose(0, 2, 1, 3).reshape(B, T, H * D)", "x.reshape(B, T, H * D)", "join_heads, .* must be x"),
    (
        "dy.reshape(B, T, H, D).transpose(0, 2, 1, 3)",
        "dy.reshape(shape)",
        "join_heads: wrong gradient at x",
        "the axes are not exchanged: heads and positions are mixed",
    ),
)


def check(student):
    for B, H, T, D in ((2, 3, 4, 5), (3, 4, 2, 6)):
        split, joined = (B, H, T, D), (B, T, H * D)
        b, h, t, d = np.indices(split)
        expect_moved("split_heads", student.split_heads, joined, split, (b, t, h * D + d), H)
        check_pair(student, "split_heads", normal(0, *joined), H)
        b, t, c = np.indices(joined)
        expect_moved("join_heads", student.join_heads, split, joined, (b, c // D, t, c % D))
        check_pair(student, "join_heads", normal(1, *split))


def expect_moved(name, op, shape, new_shape, places, *args):
    """Expect that y[index] is x[places[index]], for x of this shape and y of the new one."""
    x = np.arange(np.prod(shape)).reshape(shape)
    y = op(x, *args)[0]
    if y.shape != new_shape:
        raise Wrong(f"{name}: expected shape {new_shape} for {shape}, got {y.shape}")
    for index in map(tuple, np.argwhere(y != x[places])[:1]):
        expected, source = (np.argwhere(x == value)[:1].tolist() for value in (x[places][index], y[index]))
        got = f"x{source[0]}" if source else y[index]
        raise Wrong(f"{name}, {shape} to {new_shape}: y{[*map(int, index)]} must be x{expected[0]}, got {got}")

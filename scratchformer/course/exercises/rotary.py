"""Rotary positions

The D numbers of a query or key are D/2 pairs (x_i, x_{i+D/2}), each a point (a, b) in a plane. At position t, pair i is
turned by the angle φ = t θ_i, each pair at its own speed:

    (a, b) -> (a cos φ − b sin φ, b cos φ + a sin φ)

Write it for all pairs at once: the first numbers of all pairs are one half of x, the second ones the other half. In the
backward, a and b each occur in both results, so da and db are sums of two terms. Which rotation do they make?
"""

import numpy as np


def rotary(x):
    """y (B, H, T, D): pair i of x, at position t, is turned by t θ_i, with θ_i = 10000^(−2i/D)."""
    T, D = x.shape[-2:]
    angles = np.arange(T)[:, None] / 10000.0 ** (np.arange(0, D, 2) / D)  # (T, D/2)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    # TODO: y, with the first numbers of all pairs in its first half and the second ones in its second half.
    y = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    # END
    return y, (cos, sin)


def rotary_backward(dy, cache):
    cos, sin = cache  # (T, D/2)
    D = dy.shape[-1]
    du, dw = dy[..., : D // 2], dy[..., D // 2 :]  # of the two halves of y
    # TODO: dx (B, H, T, D), from the gradients da and db of the halves of x.
    da = du * cos + dw * sin
    db = dw * cos - du * sin
    dx = np.concatenate([da, db], axis=-1)
    # END
    return dx


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "Call the two results u = a cos φ − b sin φ and w = b cos φ + a sin φ. Both depend on a, so da is a sum of "
    "two terms, and so is db. The angle is a constant.",
    "a has the factor cos φ in u, and sin φ in w. Find those of b in the same way: the sine in u has a minus "
    "sign. Together the two gradients are the rotation by −φ, back to where the forward came from.",
    "y is np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1). dx is the same with du for a, dw for "
    "b, and -sin for sin.",
)
LIBRARY = ops.rotary
MISTAKES = (
    (
        "da = du * cos + dw * sin\n    db = dw * cos - du * sin",
        "da = du * cos - dw * sin\n    db = dw * cos + du * sin",
        "wrong gradient at x",
        "dy is turned the same way as x, not back",
    ),
    (
        "db = dw * cos - du * sin",
        "db = dw * cos + du * sin",
        "wrong gradient at x",
        "the sine in db has the wrong sign",
    ),
    (
        "da = du * cos + dw * sin",
        "da = du * cos - dw * sin",
        "wrong gradient at x",
        "the sine in da has the wrong sign",
    ),
    (
        "da = du * cos + dw * sin",
        "da = du * cos",
        "wrong gradient at x",
        "da leaves out that a is in both halves of y",
    ),
    ("[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]", "turned the other way"),
    (
        "np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)",
        "np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)",
        "side by side",
    ),
    (
        "np.concatenate([da, db], axis=-1)",
        "np.stack([da, db], axis=-1).reshape(dy.shape)",
        "wrong gradient at x",
        "da and db stand side by side, not each in its own half",
    ),
)


def check(student):
    for shape in ((1, 2, 3, 4), (2, 3, 5, 8)):
        x = normal(0, *shape)
        y, cache = ops.rotary(x)
        actual = student.rotary(x)[0]
        first, second = np.split(y, 2, axis=-1)
        side_by_side = np.stack([first, second], axis=-1).reshape(shape)
        why = {
            "It is turned the other way round": ops.rotary_backward(x, cache),
            "The two numbers of a pair stand side by side; the second one belongs in the second half": side_by_side,
            "The two halves are exchanged": np.concatenate([second, first], axis=-1),
        }
        like = (text for text, wrong in why.items() if np.shape(actual) == shape and np.allclose(actual, wrong))
        expect_close("y", actual, y, next(like, ""))
        check_pair(student, "rotary", x)

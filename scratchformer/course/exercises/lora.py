"""LoRA: a change of low rank

To fine-tune a large model, leave each weight w as it is and learn a small change of it, the product of two thin
matrices a (I, K) and b (K, O):

    y = x w + scale (x a) b

w is a constant, so it needs no gradient. But x w still passes a gradient to x: the layers before this one need it.
"""


def lora(x, w, a, b, scale):
    """x: (N, I), w: (I, O), a: (I, K), b: (K, O). Returns y (N, O)."""
    h = x @ a
    return x @ w + scale * (h @ b), (x, h, w, a, b, scale)


def lora_backward(dy, cache):
    """(dx, da, db)."""
    x, h, w, a, b, scale = cache
    # TODO: dx, da and db. Begin with dh, the gradient of h.
    dh = scale * (dy @ b.T)
    db = scale * (h.T @ dy)
    da = x.T @ dh
    dx = dy @ w.T + dh @ a.T
    # END
    return dx, da, db


# The student's file ends here.

from types import SimpleNamespace

from scratchformer import nn

from ..grading import check_pair, normal

HINTS = (
    "There are two linear maps one after the other, x to h and h to the change. Go back through the second one first.",
    "The second map is `linear` with the input h and the weight b, and everything in it has the factor scale. "
    "What it passes back to h is what the first one gets. x has two gradients: one of them through w.",
    "dh = scale · dy bᵀ and db = scale · hᵀ dy. x is used twice: dx is the sum of dy @ w.T and dh @ a.T.",
)
LIBRARY = nn.LoRA
MISTAKES = (
    ("dy @ w.T + dh @ a.T", "dh @ a.T", "wrong gradient at x", "x w passes no gradient to x"),
    ("dy @ w.T + dh @ a.T", "dy @ w.T", "wrong gradient at x", "(x a) b passes no gradient to x"),
    ("db = scale * (h.T @ dy)", "db = h.T @ dy", "wrong gradient at b", "scale is left out of db"),
    ("dh = scale * (dy @ b.T)", "dh = dy @ b.T", "wrong gradient at", "scale is left out of dh"),
    (
        "dh = scale * (dy @ b.T)\n    db = scale * (h.T @ dy)",
        "dh = dy @ b.T\n    db = h.T @ dy",
        "wrong gradient at",
        "scale is left out",
    ),
    ("da = x.T @ dh", "da = scale * (x.T @ dh)", "wrong gradient at a", "da has scale twice: dh has it already"),
)


def check(student):
    for seed, scale, (n, i, o, k) in (0, 0.7, (5, 4, 3, 2)), (1, 3.0, (3, 6, 7, 4)):
        w = normal(seed, i, o)

        def lora(x, a, b, w=w, scale=scale):
            return student.lora(x, w.astype(x.dtype), a, b, scale)

        given = SimpleNamespace(lora=lora, lora_backward=student.lora_backward)
        check_pair(given, "lora", normal(seed + 10, n, i), normal(seed + 20, i, k), normal(seed + 30, k, o))

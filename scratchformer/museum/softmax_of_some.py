"""A softmax with a condition

What was wrong. The softmax of the elements that a condition selects is right; its gradient is NaN everywhere in a row
where an element that is left out is much larger than the rest. Its exponential overflows before it is left out, and
NaN goes into the sum of the row.

Why its tests passed. The elements that were left out were no larger than the rest.

What finds it. Numbers of very different sizes, from 1 to 1000.

How to derive it. Leave out first, and take exponentials then: a score of −∞ has p = 0, and

    dz_k = p_k (dp_k − Σ_s p_s dp_s)

needs p alone.
"""

import numpy as np

from .parts import softmax

SOURCE = "jax-ml/jax 17117"
OPERATION = "softmax"
ARGUMENTS = ("N C", lambda draw: np.arange(draw.C) % 2 == 0)
NAMED = "nan"


def forward(z, mask):
    p = softmax(np.where(mask, z, -np.inf))
    return p, (z, mask, p.copy())


def wrong(dy, cache):
    z, mask, _ = cache
    with np.errstate(all="ignore"):
        top = np.where(mask, z, -np.inf).max(axis=-1, keepdims=True)
        e = mask * np.exp(z - top)
        p = e / e.sum(axis=-1, keepdims=True)
        return p * (dy - (dy * p).sum(axis=-1, keepdims=True))


def right(dy, cache):
    p = cache[2]
    return p * (dy - (dy * p).sum(axis=-1, keepdims=True))

"""Keys and values transposed twice

What was wrong. Forward brings q, k and v from (B, T, H, D) to (B, H, T, D), and saves them like this. Backward
transposes k and v again, but not q. The kernel that it calls takes their positions for heads, and computes the
gradients of another attention.

Why its tests passed. With as many heads as positions nothing changes its shape, and the forward, which users look at
first, is right. There was no test of the gradients.

What finds it. Any comparison of dq with numerical differences.

How to derive it. The gradients are those of attention, in the layout that the cache has. Write the layout beside each
field of the cache: what is stored as (B, H, T, D) is used as (B, H, T, D).
"""

from .parts import attend_backward, probabilities

SOURCE = "huggingface/diffusers 14341"
OPERATION = "attention"
ARGUMENTS = ("B T H D", "B T H D", "B T H D")
NAMED = "it is right where T = 1, and where H = 1"


def forward(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    p = probabilities(q, k)
    return (p @ v).swapaxes(1, 2).copy(), (q.copy(), k.copy(), v.copy(), p)


def wrong(dy, cache):
    q, k, v, p = cache
    k, v = (x.swapaxes(1, 2).reshape(x.shape) for x in (k, v))
    return tuple(g.swapaxes(1, 2).copy() for g in attend_backward(dy.swapaxes(1, 2), q, k, v, p))


def right(dy, cache):
    return tuple(g.swapaxes(1, 2).copy() for g in attend_backward(dy.swapaxes(1, 2), *cache))

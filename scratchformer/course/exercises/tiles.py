"""Attention by tiles

Now in NumPy: forward and backward take W keys at a time, and no array has T S numbers. In the forward, `y` and `lse`
are the results of the tiles so far, and `u` and `e` those of the next tile alone. Put them together as in the
derivation: all that came before counts as one tile. (Before the first tile lse is −∞, and the weight is 0.) Scores may
reach thousands, where exp overflows: take it of differences only. np.logaddexp(a, b) is log(exp(a) + exp(b)), safely.

In the backward, the probabilities of each tile are computed from its scores and lse, and there is nothing to merge.
"""

import math

import numpy as np


def scores(q, keys):
    return q @ keys.swapaxes(-1, -2) / math.sqrt(q.shape[-1])


def attention(q, k, v, W):
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(q_t · k_s/√D). q: (B, H, T, D); k, v: (B, H, S, D)."""
    y = np.zeros_like(q)
    lse = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)  # (B, H, T, 1)
    for start in range(0, k.shape[2], W):
        tile = slice(start, start + W)
        z = scores(q, k[:, :, tile])  # (B, H, T, W)
        e = np.logaddexp.reduce(z, axis=-1, keepdims=True)  # (B, H, T, 1)
        u = np.exp(z - e) @ v[:, :, tile]
        # TODO: y and lse after this tile, from those before it (y, lse) and those of the tile alone (u, e).
        new = np.logaddexp(lse, e)
        y = np.exp(lse - new) * y + np.exp(e - new) * u
        lse = new
        # END
    return y, (q, k, v, y, lse, W)


def attention_backward(dy, cache):
    q, k, v, y, lse, W = cache
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    # TODO: r (B, H, T, 1), the sum in the softmax's backward, before any p is known.
    r = (dy * y).sum(axis=-1, keepdims=True)
    # END
    for start in range(0, k.shape[2], W):
        tile = slice(start, start + W)
        keys, values = k[:, :, tile], v[:, :, tile]
        # TODO: p and dz (B, H, T, W) of this tile.
        p = np.exp(scores(q, keys) - lse)
        dz = p * (dy @ values.swapaxes(-1, -2) - r)
        # END
        da = dz / math.sqrt(q.shape[-1])
        dq += da @ keys
        dk[:, :, tile] = da.swapaxes(-1, -2) @ q
        dv[:, :, tile] = p.swapaxes(-1, -2) @ dy
    return dq, dk, dv


# The student's file ends here.

from scratchformer import ops
from scratchformer.dispatch import twins_of

from ..grading import Wrong, check_pair, expect_close, normal, peak_memory

HINTS = (
    "From the equations: lse of two tiles together is log(exp(e_t0) + exp(e_t1)), and y is Σ_j exp(e_tj − lse_t) "
    "u_tj. All tiles so far count as one tile, with lse for its e and y for its u.",
    "Keep the old lse until y is computed: each part has the weight exp(its own log-sum-exp − the new lse). In "
    "the backward, r and p are as in the derivation: a dot product of two rows, and one exponential.",
    "new = np.logaddexp(lse, e); y = np.exp(lse - new) * y + np.exp(e - new) * u; lse = new. And dz = p * (dp - "
    "r), where dp is dy times the values of the tile, transposed.",
)
LIBRARY = twins_of(ops.attention)[-1].forward
MISTAKES = (
    (
        "np.exp(lse - new) * y +",
        "y +",
        "wrong after 2 tiles",
        "the weight of the tiles so far is 1: it is left out, or made from the new lse",
    ),
    ("np.exp(e - new) * u", "u", "wrong after 2 tiles", "the weight of the new tile is left out"),
    ("new = np.logaddexp(lse, e)", "new = lse = np.logaddexp(lse, e)", "wrong after 2 tiles"),
    ("np.logaddexp(lse, e)", "np.log(np.exp(lse) + np.exp(e))", "got nan. Here the scores reach thousands"),
    ("np.exp(scores(q, keys) - lse)", "np.exp(scores(q, keys)) / np.exp(lse)", "got nan. Here the scores reach"),
    ("r = (dy * y).sum(axis=-1, keepdims=True)", "r = 0", "wrong gradient at [qk]", "r is left out"),
    (
        "dz = p * (dy @ values.swapaxes(-1, -2) - r)",
        "dz = dy @ values.swapaxes(-1, -2)\n        dz = p * (dz - (p * dz).sum(axis=-1, keepdims=True))",
        "wrong gradient at [qk]",
        "the sum in the softmax runs over one tile only",
    ),
    ("np.exp(scores(q, keys) - lse)", "np.exp(scores(q, k) - lse)[..., tile]", "takes 1.* kB at once"),
)


def check(student):
    for B, H, T, S, D, W in ((1, 2, 3, 5, 4, 2), (2, 3, 4, 7, 5, 3)):
        q, k, v = normal(0, B, H, T, D), normal(1, B, H, S, D), normal(2, B, H, S, D)
        for tiles in range(1, -(-S // W) + 1):
            keys, values = k[:, :, : tiles * W], v[:, :, : tiles * W]
            why = f"It is wrong after {tiles} tile{'s' * (tiles > 1)}"
            y, _ = student.attention(q, keys, values, W)
            expect_close("y", y, ops.attention(q, keys, values)[0], why)
        large = 1000 * q / np.abs(q).max(), k * 3, v
        (y, cache), (right, right_cache) = student.attention(*large, W), ops.attention(*large)
        dv, right_dv = student.attention_backward(q, cache)[2], ops.attention_backward(q, right_cache)[2]
        expect_close("y", y, right, "Here the scores reach thousands")
        expect_close("dv", dv, right_dv, "Here the scores reach thousands")
        check_pair(student, "attention", q, k, v, W, max_elements=20)
    expect_little_memory(student)


def expect_little_memory(student):
    """Raise Wrong if there are whole (T, S) arrays."""
    n, D, W = 256, 4, 16
    q, k, v = (normal(seed, 1, 1, n, D) for seed in range(3))
    peak = peak_memory(lambda: student.attention_backward(*student.attention(q, k, v, W)))
    if peak > 8 * n * n // 2:
        raise Wrong(
            f"With {n} queries and keys it takes {peak // 1000} kB at once, a tile only {8 * n * W // 1000} kB: "
            f"is there an array of all {n}·{n} scores?"
        )

"""Causal and padded attention

Not every query may see every key. In a language model, query t must not see keys after its own position: it predicts
the token that comes next. And the sequences of a batch have different lengths; the shorter ones are filled up with
padding, which no query may see. A table of booleans, `allowed`, says who sees whom, and each softmax runs over the
allowed keys alone. The other keys have p = 0.

Adding −10000 to their scores nearly does this, until scores are large. Leave them out entirely: exp(−∞) is 0. A
sequence may be empty (of length 0), and then its queries see no key at all: p is 0 in the whole row, and not NaN.

The backward is the one that you have written. It needs no table: where p is 0, so is dz = p (dp − ...).
"""

import math

import numpy as np


def visible(lengths, T):
    """(B, 1, T, T), booleans: whether query t of sequence b sees key s. lengths: (B,), without the padding."""
    t, s = np.arange(T)[:, None], np.arange(T)  # (T, 1), (T,)
    # TODO: allowed[b, 0, t, s], from t, s and lengths.
    allowed = (s <= t) & (s < lengths[:, None, None, None])
    # END
    return allowed


def masked_softmax(z, allowed):
    """The softmax of each row of z (B, H, T, T) over its allowed keys."""
    # TODO: p, of the shape of z: 0 for keys that are not allowed, and 0 in the whole row if none is.
    scores = np.where(allowed, z, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = p.sum(axis=-1, keepdims=True)
    p /= np.where(total > 0, total, 1)
    # END
    return p


def attention(q, k, v, lengths):
    """y_t = Σ_s p_ts v_s over the keys s that query t may see. q, k, v: (B, H, T, D)."""
    z = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    p = masked_softmax(z, visible(lengths, q.shape[2]))
    return p @ v, (q, k, v, p)


def attention_backward(dy, cache):
    q, k, v, p = cache
    dv = p.swapaxes(-1, -2) @ dy
    dp = dy @ v.swapaxes(-1, -2)
    dz = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    da = dz / math.sqrt(q.shape[-1])
    return da @ k, da.swapaxes(-1, -2) @ q, dv


# The student's file ends here.

from scratchformer import ops

from ..grading import Wrong, check_pair, expect_close, normal

HINTS = (
    "t (T, 1) compared with s (T,) gives a table (T, T). Reshape lengths to (B, 1, 1, 1), so that comparing s with it "
    "gives (B, 1, 1, T); `&` of the two is (B, 1, T, T). In the softmax, let np.where put −∞ at the other keys.",
    "The maximum is taken over the allowed keys, so of the scores with −∞. Where a row has none it is −∞, and −∞ − "
    "(−∞) is NaN: subtract 0 there. The exponentials of this row then add up to 0: divide by 1 there.",
    "allowed = (s <= t) & (s < lengths[:, None, None, None]). scores = np.where(allowed, z, -np.inf); subtract "
    "np.where(np.isfinite(largest), largest, 0) and divide by np.where(total > 0, total, 1).",
)
LIBRARY = ops.attention
MISTAKES = (
    ("(s <= t)", "(s < t)", r"allowed\[0, 0, 0, 0\] is False: query 0 must see key 0"),
    ("(s <= t)", "(s >= t)", "query 0 must not see key 1, which comes later"),
    (" & (s < lengths[:, None, None, None])", "", "query 3 must not see key 3, which is padding"),
    ("(s < lengths[:, None, None, None])", "(s < lengths)", r"line \d+: allowed = "),
    ("np.where(allowed, z, -np.inf)", "np.where(allowed, z, -1e4)", "expected 0, got 0.2.*no key"),
    ("np.where(total > 0, total, 1)", "total", "expected 0, got nan.*no key"),
    ("np.where(np.isfinite(largest), largest, 0)", "largest", "expected 0, got nan.*no key"),
    ("largest = scores.max", "largest = z.max", "A score of 100000 at keys that are not allowed"),
    ("p = np.exp(scores - np.where(np.isfinite(largest), largest, 0))", "p = np.exp(scores)", "exp overflows"),
)
LENGTHS = np.array([3, 0, 5])
T = 5


def check(student):
    table = (np.arange(T) <= np.arange(T)[:, None]) & (np.arange(T) < LENGTHS[:, None, None, None])
    check_table(student, table)
    check_softmax(student, table)
    check_independence(student)
    q, k, v = (normal(seed, 3, 2, T, 4) for seed in range(3))
    expected, _ = ops.attention(q, k, v, ops.Causal() & ops.Padding(LENGTHS))
    expect_close("y", student.attention(q, k, v, LENGTHS)[0], expected)
    check_pair(student, "attention", q, k, v, LENGTHS, max_elements=50)


def check_table(student, table):
    allowed = np.asarray(student.visible(LENGTHS, T))
    if np.broadcast_shapes(allowed.shape, table.shape) != table.shape:
        raise Wrong(f"allowed: expected shape (B, 1, T, T), here {table.shape}, got {allowed.shape}")
    for b, _, t, s in np.argwhere(np.broadcast_to(allowed, table.shape) != table):
        if table[b, 0, t, s]:
            raise Wrong(
                f"allowed[{b}, 0, {t}, {s}] is False: query {t} must see key {s}, which is neither later nor padding"
            )
        why = "comes later" if s > t else f"is padding: sequence {b} has length {LENGTHS[b]}"
        raise Wrong(f"allowed[{b}, 0, {t}, {s}] is True: query {t} must not see key {s}, which {why}")


def check_softmax(student, table):
    z = normal(4, 3, 2, T, T)
    expected = np.where(table, np.exp(z), 0)
    expected /= np.maximum(expected.sum(axis=-1, keepdims=True), 1e-300)
    p = student.masked_softmax(z.copy(), table)
    if np.shape(p) == z.shape:
        empty = np.where(table.any(axis=-1, keepdims=True), 0, p)
        expect_close("p", empty, np.zeros_like(z), "In this row no key is allowed, so all of it is 0")
    expect_close("p", p, expected)
    why = "A score of 100000 at keys that are not allowed has changed it: leave them out of the maximum and of the sum"
    expect_close("p", student.masked_softmax(np.where(table, z, 1e5), table), expected, why)
    why = "All scores were 1000 larger, and exp overflows: subtract the largest of each row"
    expect_close("p", student.masked_softmax(z + 1e3, table), expected, why)


def check_independence(student):
    """Neither later tokens nor padding may change a result."""
    q, k, v = (normal(seed, 3, 2, T, 4) for seed in range(3))
    y, _ = student.attention(q, k, v, LENGTHS)
    changed = [np.concatenate([x[:, :, :2], 100 * x[:, :, 2:]], axis=2) for x in (q, k, v)]
    early, _ = student.attention(*changed, LENGTHS)
    expect_close("y", early[:, :, :2], y[:, :, :2], "It has changed with tokens that come later")
    alone, _ = student.attention(*(x[:1, :, :3] for x in (q, k, v)), LENGTHS[:1])
    expect_close("y", y[:1, :, :3], alone, "Without its padding, the same sequence has the expected y")

"""The key-value cache

A model that writes text reads its own output: token t + 1 needs the keys and values of all tokens before it. They do
not change when a token is added, so they are stored. Then a new token costs one row of attention instead of a whole
matrix.

`attend` is what the cache must agree with: it computes the causal attention of a whole sequence at once.
"""

import numpy as np


def softmax(z):
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def attend(x, wq, wk, wv):
    """Causal attention of x (T, C); wq, wk and wv are (C, D). Returns (T, D)."""
    q, k, v = x @ wq, x @ wk, x @ wv
    t, s = np.arange(len(x))[:, None], np.arange(len(x))
    scores = np.where(s <= t, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(scores) @ v


def extend(x, wq, wk, wv, stored):
    """The output (T, D) at new positions x (T, C), one or several, after those in `stored`.

    stored: a dict, {} at the beginning of a sequence. It is changed, so that the next call continues from here.
    """
    q, k, v = x @ wq, x @ wk, x @ wv
    # TODO: out (T, D). Store the keys and values of all positions so far under names of your choice.
    if stored:
        k = np.concatenate([stored["k"], k])
        v = np.concatenate([stored["v"], v])
    stored["k"], stored["v"] = k, v
    s = np.arange(len(k))
    t = np.arange(len(k) - len(x), len(k))[:, None]
    scores = np.where(s <= t, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
    out = softmax(scores) @ v
    # END
    return out


# The student's file ends here.

import numpy as np

from scratchformer import nn

from ..grading import Wrong, expect_close, normal, numbers_in

HINTS = (
    "Put the stored keys and values before the new ones, and store the result. The queries are the new ones alone.",
    "With P positions stored, the new queries are at positions P ... P + T − 1: the causal condition needs these.",
    "t = np.arange(len(k) - len(x), len(k))[:, None], s = np.arange(len(k)), and np.where(s <= t, ..., -np.inf).",
)
LIBRARY = nn.SelfAttention
MISTAKES = (
    (
        "t = np.arange(len(k) - len(x), len(k))[:, None]",
        "t = np.arange(len(x))[:, None]",
        "follows 4",
        "the new queries are taken for the first of the sequence",
    ),
    (
        "np.where(s <= t, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)\n    out",
        "q @ k.T / np.sqrt(q.shape[-1])\n    out",
        "follow 0 stored",
        "new positions see later ones: with several at once, the causal condition is needed",
    ),
    (
        '    stored["k"], stored["v"] = k, v\n',
        '    stored.setdefault("k", k), stored.setdefault("v", v)\n',
        "follows 5",
        "only the keys and values of the first call are stored",
    ),
    (
        'np.concatenate([stored["v"], v])',
        'np.concatenate([v, stored["v"]])',
        "follows 4 stored",
        "the new values come before the stored ones, but the new keys after them",
    ),
    (
        "np.sqrt(q.shape[-1]), -np.inf)\n    out",
        "np.sqrt(len(k)), -np.inf)\n    out",
        "follow 0 stored",
        "the scores are divided by the root of the number of keys, not of D",
    ),
    (
        "    if stored:\n        k = ",
        "    x = stored['x'] = np.concatenate([stored.get('x', x[:0]), x])\n"
        "    return attend(x, wq, wk, wv)[-len(q) :]\n    if stored:\n        k = ",
        "computed again",
    ),
)


def check(student):
    x, *weights = normal(0, 9, 5), normal(1, 5, 3), normal(2, 5, 3), normal(3, 5, 3)
    expected, stored, past = student.attend(x, *weights), {}, 0
    for new in (4, 1, 1, 3):  # a prompt, two tokens one by one, and three at once
        out = student.extend(x[past : past + new], *weights, stored)
        why = f"Here {new} new {'position follows' if new == 1 else 'positions follow'} {past} stored ones"
        expect_close("out", out, expected[past : past + new], why)
        past += new
    other = student.extend(x[:2], *weights, {})
    expect_close("out", other, expected[:2], "This is a second sequence: keep nothing outside `stored`")
    if numbers_in(stored) > 2 * x[:, :3].size:
        raise Wrong("stored holds more than a key and a value for each position")
    expect_stored(student, x, weights)


def expect_stored(student, x, weights):
    """A step with other weights must use the keys and values that the old ones gave."""
    old, new, stored = x[:4], x[4:5], {}
    student.extend(old, *weights, stored)
    out = student.extend(new, *(2 * w for w in weights), stored)
    q, k, v = (np.concatenate([old @ w, new @ (2 * w)]) for w in weights)
    expected = student.softmax(q[4:] @ k.T / np.sqrt(q.shape[-1])) @ v
    expect_close("out", out, expected, "Keys and values of old positions are computed again: store them instead")

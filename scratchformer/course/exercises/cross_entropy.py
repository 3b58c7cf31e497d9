"""Cross-entropy, backward

Softmax turns a row of logits z into probabilities p, and the loss of the row is −log p at its target. Its derivative is
p_v − t_v, where t is 1 at the target and 0 elsewhere. Three things are left to do: forward takes a mean, some rows do
not count in it, and the loss may be one part of a larger one, which is why there is a dloss.
"""

import numpy as np


def cross_entropy(logits, targets):
    """The mean of −log p at the target. logits: (N, V). targets: (N,), from 0 to V − 1, or −1 for a row to ignore."""
    counted = targets >= 0
    count = max(1, int(counted.sum()))
    z = logits - logits.max(axis=1, keepdims=True)  # so that exp cannot overflow
    p = np.exp(z)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    rows = np.log(total[:, 0]) - z[np.arange(len(z)), targets]  # the loss of each row; target −1 is taken out below
    loss = (rows * counted).sum() / count
    return loss, (p, targets, counted, count)


def cross_entropy_backward(dloss, cache):
    """dlogits. p: (N, V), targets and counted: (N,); counted is True where the target counts."""
    p, targets, counted, count = cache
    # TODO: dlogits (N, V), without changing p. p[np.arange(len(p)), targets] is p at the target of each row.
    dlogits = p.copy()
    dlogits[np.arange(len(p)), targets] -= 1
    dlogits *= counted[:, None] * (dloss / count)
    # END
    return dlogits


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, expect_unchanged, normal

HINTS = (
    "Begin with a copy of p. Subtract 1 at one place in each row, then multiply every row by its weight.",
    "The weight of a row is 0 if it does not count. All others have the same one: dloss, divided by what the mean "
    "divides by. As an array it has shape (N,), and needs a second axis, [:, None], to multiply the rows of an "
    "array (N, V).",
    "dlogits = p.copy(), then dlogits[np.arange(len(p)), targets] -= 1, then dlogits *= (the weights)[:, None].",
)
LIBRARY = ops.cross_entropy
MISTAKES = (
    ("(dloss / count)", "dloss", "dlogits.*4 rows count"),
    ("(dloss / count)", "(dloss / len(p))", "dlogits.*3 of the 5 rows count"),
    ("counted[:, None] * (dloss / count)", "dloss / count", "dlogits.*do not count"),
    ("(dloss / count)", "(1 / count)", "dlogits.*dloss is -2.5"),
    ("dlogits = p.copy()", "dlogits = p", "p is changed in place"),
    ("dlogits[np.arange(len(p)), targets] -= 1", "dlogits[:, targets] -= 1", "dlogits.*its own target"),
)


def check(student):
    def compare(targets, dloss, why):
        targets = np.array(targets)
        logits = normal(len(targets), len(targets), 3)
        _, cache = ops.cross_entropy(logits, targets, ignore_index=-1)
        _, students_cache = student.cross_entropy(logits, targets)
        with expect_unchanged(p=students_cache[0]):
            dlogits = student.cross_entropy_backward(dloss, students_cache)
        expect_close("dlogits", dlogits, ops.cross_entropy_backward(dloss, cache), why)

    compare([1], 1.0, "With one row it is p, minus 1 at the target")
    compare([2, 0, 1, 2], 1.0, "All 4 rows count: each is p, minus 1 at its own target, divided by 4")
    compare([2, -1, 0, 1, -1], 1.0, "3 of the 5 rows count: divide by 3. Rows that do not count get 0")
    compare([2, -1, 0, 1], -2.5, "dloss is -2.5 here: the chain rule multiplies by it")
    compare([-1, -1], 1.0, "No row counts, so every gradient is 0")
    check_pair(student, "cross_entropy", normal(0, 6, 4), np.array([3, 0, -1, 1, 1, -1]))
    check_pair(student, "cross_entropy", normal(0, 2, 5), np.array([4, 2]))

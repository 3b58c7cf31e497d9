"""One table used twice

A language model often has one table for both of its ends: token i enters as row i of the table, and leaves as the
score of row i. So the table affects the loss in two ways, and its gradient has two terms:

    x_nc = table_{id_n,c}        h = tanh(x)        logits_nv = Σ_c h_nc table_vc

The same token may occur several times in ids; each time adds to the gradient of its row.
"""

import numpy as np


def tied(ids, table):
    """logits (N, V) of token ids (N,), with a table (V, C)."""
    h = np.tanh(table[ids])
    return h @ table.T, (ids, h, table)


def tied_backward(dlogits, cache):
    ids, h, table = cache
    # TODO: dtable (V, C), from both uses. The derivative of tanh(x) is 1 − tanh(x)².
    dtable = dlogits.T @ h
    dx = dlogits @ table * (1 - h**2)
    np.add.at(dtable, ids, dx)
    # END
    return dtable


# The student's file ends here.

import numpy as np

from scratchformer import nn

from ..grading import check_pair, normal

HINTS = (
    "Pretend that there are two tables, one for the input, one for the output. Derive a gradient for each; then add.",
    "For the output, the table is the weight of a product with h, as in `linear`. For the input, go back through "
    "the product with the table, then through tanh, to the rows that ids took.",
    "dlogits.T @ h for the output. dx = dlogits @ table * (1 - h**2) has a row for each token, and "
    "np.add.at(dtable, ids, dx) adds repeated rows too.",
)
LIBRARY = nn.TiedOutput
MISTAKES = (
    ("    np.add.at(dtable, ids, dx)\n", "", "at table", "only the output's use of the table counts"),
    ("np.add.at(dtable, ids, dx)", "dtable[ids] += dx", "at table", "a repeated id is counted once"),
    ("np.add.at(dtable, ids, dx)", "dtable[ids] = dx", "at table", "the input's term overwrites the output's"),
    (" * (1 - h**2)", "", "at table", "the slope of tanh is left out"),
    (" * (1 - h**2)", " * (1 - np.tanh(h) ** 2)", "at table", "tanh is taken twice: h is tanh(x) already"),
    ("dtable = dlogits.T @ h", "dtable = np.zeros_like(table)", "at table", "only the input's use counts"),
)


def check(student):
    check_pair(student, "tied", np.array([1, 3, 1, 0, 1]), normal(0, 6, 4))
    check_pair(student, "tied", np.array([2, 2]), normal(1, 4, 3))

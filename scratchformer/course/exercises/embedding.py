"""Embedding, backward

Each word of a text has a number, its id, and each id has a row in a table of vectors. Forward looks the rows up. The
table is trained, so backward returns its gradient: a row for each id, from the gradients of all places that read it.

Most words of a text occur more than once. Think of a row that is read twice, and of one that is never read.
"""

import numpy as np


def embedding(ids, table):
    """y[n] = table[ids[n]]. ids: (...), integers from 0 to V − 1. table: (V, C). y: (..., C)."""
    return table[ids], (ids, table.shape)


def embedding_backward(dy, cache):
    """dtable (V, C): the ids are integers and have no gradient. dy: (..., C)."""
    ids, shape = cache
    # TODO: dtable, of the given shape and of the dtype of dy.
    dtable = np.zeros(shape, dtype=dy.dtype)
    np.add.at(dtable, ids, dy)
    # END
    return dtable


# The student's file ends here.

from scratchformer import ops

from ..grading import check_pair, expect_close, normal

HINTS = (
    "A row that is used twice gets the sum of two gradients: row v gets those of all places whose id is v. Start "
    "from zeros.",
    "dtable[ids] += dy reads all rows, adds, and writes all rows. For an id that occurs twice, both sums start "
    "from the old row, and the second one overwrites the first. The places must be added one after the other.",
    "NumPy has an unbuffered addition, np.add.at(array, indices, values). A loop over np.ndindex(ids.shape) is "
    "right too, only slower.",
)
LIBRARY = ops.embedding
MISTAKES = (
    ("np.add.at(dtable, ids, dy)", "dtable[ids] += dy", "dtable.*id 2 occurs 3 times"),
    ("np.add.at(dtable, ids, dy)", "dtable[ids] = dy", "dtable.*id 2 occurs 3 times"),
    ("    np.add.at(dtable, ids, dy)\n", "    for i, d in zip(ids, dy): dtable[i] += d\n", "dtable.*several axes"),
    ("np.zeros(shape, dtype=dy.dtype)", "np.ones(shape, dtype=dy.dtype)", "dtable"),
    ("np.zeros(shape, dtype=dy.dtype)", "np.empty((len(ids), dy.shape[-1]), dtype=dy.dtype)", "dtable"),
    ("np.zeros(shape, dtype=dy.dtype)", "np.zeros(shape)", "must stay float32"),
)


def check(student):
    ids, dy = np.array([2, 0, 2, 3, 2]), np.array([[1.0, 0.5], [2, 0.25], [4, 0], [8, 0], [16, 0]])
    _, cache = student.embedding(ids, np.zeros((5, 2)))
    expected = np.array([[2, 0.25], [0, 0], [21, 0.5], [8, 0], [0, 0]])
    why = "The ids are 2 0 2 3 2: id 2 occurs 3 times and collects 1 + 4 + 16 in its first column; ids 1 and 4 get 0"
    expect_close("dtable", student.embedding_backward(dy, cache), expected, why)
    ids, dy = np.array([[1, 1], [2, 0]]), np.array([[[1.0], [2.0]], [[4.0], [8.0]]])
    _, cache = student.embedding(ids, np.zeros((3, 1)))
    why = "ids may have several axes; here they are [[1, 1], [2, 0]]"
    expect_close("dtable", student.embedding_backward(dy, cache), np.array([[8.0], [3.0], [4.0]]), why)
    check_pair(student, "embedding", np.array([[1, 3, 1], [3, 3, 0]]), normal(0, 5, 4))
    check_pair(student, "embedding", np.array([2, 1, 2, 0]), normal(0, 6, 2))

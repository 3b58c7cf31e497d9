"""An offset is missing

What was wrong. Several sequences are packed into one array, and where each begins is given. A kernel of backward left
the offset out of one address. In this exhibit it reads dy from the beginning of the array for every sequence.

Why its tests passed. One sequence begins at 0.

What finds it. Two sequences.

How to derive it. Write the index of the whole array, not that of the sequence: position t of sequence b is row
o_b + t in every array, so dx_{o_b + t} comes from dy_{o_b + t}.
"""

import numpy as np

SOURCE = "fla-org/flash-linear-attention 1115"
ARGUMENTS = ("BT C", lambda draw: draw.T)
NAMED = "with the first 3 dy along axis 0 in place of all others"


def forward(x, length):
    """y: the sums of each sequence's rows so far, for sequences of one length."""
    y = np.concatenate([part.cumsum(axis=0) for part in x.reshape(-1, length, x.shape[1])])
    return y, length


def wrong(dy, length):
    parts = [dy[:length][::-1].cumsum(axis=0)[::-1] for _ in range(0, len(dy), length)]
    return np.concatenate(parts)


def right(dy, length):
    parts = [dy[o : o + length][::-1].cumsum(axis=0)[::-1] for o in range(0, len(dy), length)]
    return np.concatenate(parts)

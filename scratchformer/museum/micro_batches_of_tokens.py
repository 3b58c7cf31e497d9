"""A mean of means

What was wrong. A batch that is too large for memory is divided into micro-batches. Each computes the mean loss of its
tokens, and the gradients are averaged. Where micro-batches have different numbers of tokens, those of a short one
weigh more. Most training libraries made this mistake, for years.

Why its tests passed. They had sequences of one length, without padding; then both means are the same.

What finds it. Padding: a mask that leaves a different number of tokens in each micro-batch.

How to derive it. The loss of the whole batch divides by the number N of all its tokens, so each token has the weight
1/N, in whatever micro-batch a it is:

    L = 1/N Σ_a Σ_t m_at l_at with N = Σ_a Σ_t m_at, so dl_at = dL m_at/N
"""

import numpy as np

SOURCE = "huggingface/transformers 34191"
OPERATION = "cross_entropy"
ARGUMENTS = ("A T", lambda draw: np.arange(draw.T) <= np.arange(draw.A)[:, None] % draw.T)
NAMED = "times a number for each index of axis 0"


def forward(losses, mask):
    mask = mask.astype(losses.dtype)
    return np.asarray((losses * mask).sum() / mask.sum()), mask


def wrong(dy, mask):
    each = mask / mask.sum(axis=1, keepdims=True)
    return dy * each / len(mask)


def right(dy, mask):
    return dy * mask / mask.sum()

"""Only with real activations

What was wrong. dq came out five times too large and in another direction, for two or more sequences, with activations
of a trained model. With normal numbers, or with one sequence, everything was right. The report does not say what the
kernel did. This exhibit has the same symptoms: a backward that computes p again takes all scores relative to the
first score of the first sequence, and cuts the differences off at −8 and 8, which normal numbers never reach.

Why its tests passed. Their scores were products of normal numbers, divided by √D: between −4 and 4.

What finds it. Activations as a training run makes them: a few channels are much larger than the others, and so are
some scores.

How to derive it. p_ts = exp(z_ts − m_t)/Σ_s exp(z_ts − m_t) holds for every m_t, if it is the same number above and
below, for each query t. Its own maximum is the only one for which no exponent is above 0; then nothing is cut off.
"""

import math

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "NVIDIA/TransformerEngine 3216"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D")
NAMED = r"for recorded activations[\s\S]*so the numbers make it wrong"


def forward(q, k, v):
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, _ = cache
    z = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    e = np.exp(np.clip(z - z[:1, :, :1], -8.0, 8.0))
    return attend_backward(dy, q, k, v, e / e.sum(axis=-1, keepdims=True))


def right(dy, cache):
    return attend_backward(dy, *cache)

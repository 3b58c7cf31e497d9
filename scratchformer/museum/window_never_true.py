"""A condition that is always false

What was wrong. Forward lets each query see a window of keys. In backward the condition for masking could never be
true, and nothing was masked there. In this exhibit the reason is that two conditions exclude each other.

Why its tests passed. A test of forward passes, and so does one of backward where nothing has to be masked.

What finds it. A window that is shorter than the sequence, and any comparison of dk with numerical differences.

How to derive it. Write the condition once, as a function of t and s, and use it in both passes: t − w < s ≤ t.
"""

import numpy as np

from .parts import attend_backward, probabilities

SOURCE = "meta-pytorch/MSLK 263"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B T D", "B T D", 2)
NAMED = "factor .* is left out"


def forward(q, k, v, window):
    """y = p v, where p is the softmax of the scores that are in the window.

    Forward, then backward:

        z_ts = Σ_d q_td k_sd/√D        e_ts = [t − window < s ≤ t] exp(z_ts)        p_ts = e_ts/Σ_s' e_ts'
        y_td = Σ_s p_ts v_sd
        dp_ts = Σ_d dy_td v_sd         dv_sd = Σ_t p_ts dy_td
        dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')
        dq_td = Σ_s dz_ts k_sd/√D      dk_sd = Σ_t dz_ts q_td/√D
    """
    t, s = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    p = probabilities(q, k, (t - window < s) & (s <= t))
    return p @ v, (q, k, v, p, window)


def wrong(dy, cache):
    q, k, v, _, window = cache
    t, s = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    outside = (s <= t - window) & (s > t)
    return attend_backward(dy, q, k, v, probabilities(q, k, ~outside))


def right(dy, cache):
    return attend_backward(dy, *cache[:4])

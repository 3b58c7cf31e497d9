"""Backward never applies the mask

What was wrong. Backward computes the scores again from q and k, since keeping p would take too much memory, and
forgets the causal mask on the way. Masked positions get gradients.

Why its tests passed. They did not: a user who ran the tutorial's own test on an H200 saw 89% of all elements fail.
Whoever trains without it sees a loss that falls.

What finds it. Any comparison with numerical differences: the derivative by a key of the future is exactly zero.

How to derive it. What forward computes, backward must compute again in the same way, line by line, with the mask:

    p_ts = m_ts exp(z_ts)/Σ_s m_ts exp(z_ts)
"""

from .parts import attend_backward, causal, probabilities

SOURCE = "triton-lang/triton 7216"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B T D", "B T D")
NAMED = "factor .* is left out"


def forward(q, k, v):
    """y = p v, where p is the softmax of the scores that are not of the future.

    Forward, then backward:

        z_ts = Σ_d q_td k_sd/√D        e_ts = [s ≤ t] exp(z_ts)        p_ts = e_ts/Σ_s' e_ts'
        y_td = Σ_s p_ts v_sd
        dp_ts = Σ_d dy_td v_sd         dv_sd = Σ_t p_ts dy_td
        dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')
        dq_td = Σ_s dz_ts k_sd/√D      dk_sd = Σ_t dz_ts q_td/√D
    """
    p = probabilities(q, k, causal(q.shape[1], k.shape[1]))
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, _ = cache
    return attend_backward(dy, q, k, v, probabilities(q, k))


def right(dy, cache):
    return attend_backward(dy, *cache)

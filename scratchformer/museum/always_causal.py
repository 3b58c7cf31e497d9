"""Backward is always causal

What was wrong. Forward of a fused attention looks at its argument `causal`; backward masks the future whatever it says.

Why its tests passed. With `causal=True` it is right, and that is what the tutorial trains with.

What finds it. A check with `causal=False`: each value of a flag is a case of its own.

How to derive it. The mask enters once, as p_ts = 0 for a key that query t may not see. All gradients have p as a
factor, so a backward that uses forward's p needs no mask at all, and no flag.
"""

from .parts import attend_backward, causal, probabilities

SOURCE = "triton-lang/triton 5660"
OPERATION = "attention"
ARGUMENTS = ("B T D", "B S D", "B S D", False)
NAMED = r"\[s > t\] is left out"


def forward(q, k, v, is_causal):
    """y = p v, where p is the softmax of the scores; if `is_causal`, of those that are not of the future.

    If not, a query sees the keys before it and those after it. Forward, then backward:

        z_ts = Σ_d q_td k_sd/√D        e_ts = ([s ≤ t] + [s > t]) exp(z_ts)        p_ts = e_ts/Σ_s' e_ts'
        y_td = Σ_s p_ts v_sd
        dp_ts = Σ_d dy_td v_sd         dv_sd = Σ_t p_ts dy_td
        dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')
        dq_td = Σ_s dz_ts k_sd/√D      dk_sd = Σ_t dz_ts q_td/√D
    """
    mask = causal(q.shape[1], k.shape[1]) if is_causal else True
    p = probabilities(q, k, mask)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, _ = cache
    return attend_backward(dy, q, k, v, probabilities(q, k, causal(q.shape[1], k.shape[1])))


def right(dy, cache):
    return attend_backward(dy, *cache)

"""dQ with a relative error of 1.1

What was wrong. The gradient of the queries, and it alone, is off by more than its own size in a fused attention. The
report compares it with a plain one, but does not say why. One mistake with this effect is that the sum in the gradient
of the softmax is left out on the way to dq.

Why its tests passed. The loss is right, and training goes on. The bug was seen by someone who compared the gradients
of one graphics card with those of two, and both with a plain implementation.

What finds it. Any comparison of dq with numerical differences in float64.

How to derive it. The softmax divides by a sum over all keys, so each score changes all probabilities of its row:

    ∂p_s/∂z_k = p_s (δ_sk − p_k), so dz_k = p_k (dp_k − Σ_s p_s dp_s)

The second term is the sum. It is in both dq and dk.
"""

import math

from .parts import attend_backward, probabilities

SOURCE = "NVIDIA/TransformerEngine 1615"
OPERATION = "attention"
ARGUMENTS = ("B H T D", "B H S D", "B H S D")
NAMED = "Σ_s' p_ts' dp_ts' is left out"
PLANTED = "dq_td = Σ_s da_ts k_sd", "dq_td = Σ_s p_ts dp_ts k_sd/√(D)"


def forward(q, k, v):
    """y = p v, where p is the softmax of q kᵀ/√D over the keys.

    Forward, then backward:

        z_ts = Σ_d q_td k_sd/√D        p_ts = exp(z_ts)/Σ_s' exp(z_ts')        y_td = Σ_s p_ts v_sd
        dp_ts = Σ_d dy_td v_sd         dv_sd = Σ_t p_ts dy_td
        dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')        dk_sd = Σ_t dz_ts q_td/√D
        dq_td = Σ_s p_ts (dp_ts − Σ_s' p_ts' dp_ts') k_sd/√D
    """
    p = probabilities(q, k)
    return p @ v, (q, k, v, p)


def wrong(dy, cache):
    q, k, v, p = cache
    _, dk, dv = attend_backward(dy, q, k, v, p)
    return p * (dy @ v.swapaxes(-1, -2)) / math.sqrt(q.shape[-1]) @ k, dk, dv


def right(dy, cache):
    return attend_backward(dy, *cache)

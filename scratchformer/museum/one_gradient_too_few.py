"""Eleven gradients for twelve arguments

What was wrong. The forward of a custom attention takes twelve arguments, its backward returns eleven gradients. There
the missing one was a None, and PyTorch refused it with an error as soon as somebody trained. In this exhibit the scale
of the scores, the last argument, is forgotten, and a framework that fills in zeros would not notice.

Why its tests passed. A test of forward passes.

What finds it. A check that counts: one gradient for each floating-point argument.

How to derive it. Go through the arguments of forward one by one. The scale multiplies every score, so its gradient is
a sum over all of them:

    z_ts = c Σ_d q_td k_sd, so dc = Σ_t Σ_s dz_ts Σ_d q_td k_sd
"""

SOURCE = "huggingface/diffusers 12761"
ARGUMENTS = ("T D", "S D", "")
NAMED = r"returned 2 gradient\(s\) for 3"


def forward(q, k, c):
    """z = c q kᵀ.

        z_ts = c Σ_d q_td k_sd
        dq_td = c Σ_s dz_ts k_sd
        dk_sd = c Σ_t dz_ts q_td
        dc = Σ_t Σ_s dz_ts Σ_d q_td k_sd

    In NumPy:

        dc = (dz * (q @ k.T)).sum()
    """
    return c * (q @ k.T), (q, k, c)


def wrong(dz, cache):
    q, k, c = cache
    return c * dz @ k, c * dz.T @ q


def right(dz, cache):
    q, k, c = cache
    dc = (dz * (q @ k.T)).sum()
    return c * dz @ k, c * dz.T @ q, dc

"""The mean square saved in place of its root

What was wrong. Forward computes 1/ρ and is right. What it stores for backward is the mean square, because a register
was reused. Backward takes it for 1/ρ, and all gradients come out almost zero.

Why its tests passed. A test of y passes. The array in the cache is nobody's result.

What finds it. Any comparison of dx with numerical differences.

How to derive it. Units show it: if x is in metres, the mean square is in square metres, and 1/ρ, which makes x̂ a pure
number, is in 1/metre.

    rrms = 1/ρ = 1/√(mean_c(x_c²) + eps)
"""

import numpy as np

SOURCE = "flagos-ai/FlagGems 5771"
OPERATION = "rmsnorm"
ARGUMENTS = ("B T C", "C")
NAMED = "written instead of"


def forward(x, gamma):
    """y = γ x/ρ, where ρ is the root mean square of the row.

    Forward, then backward:

        rrms = (mean_c(x_c²) + 1/1000000)^(−½)        x̂_c = x_c rrms        y_c = γ_c x̂_c
        dγ_c = Σ_n dy_nc x̂_nc        g_c := dy_c γ_c
        dx_k = rrms (g_k − x̂_k mean_c(g_c x̂_c))

    In NumPy:

        dx = rrms * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    """
    rrms = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return gamma * x * rrms, (x, gamma, rrms)


def wrong(dy, cache):
    x, gamma, rrms = cache
    return right(dy, (x, gamma, 1 / rrms**2))


def right(dy, cache):
    x, gamma, rrms = cache
    xhat, g = x * rrms, dy * gamma
    dx = rrms * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    return dx, (dy * xhat).sum(axis=tuple(range(x.ndim - 1)))

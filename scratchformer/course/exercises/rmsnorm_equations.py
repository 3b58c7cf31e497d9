"""The derivation of RMS norm

Layer norm without the mean: each row is divided by its root mean square ρ. So x_k changes y in two ways, directly and
through ρ, and the gradient has two terms. It goes as for layer norm, with fewer steps given.

The equations are about one row of length C, and c and k are indices along it. Only dγ is about all rows: there, n is
the number of the row. You may type xhat_c for x̂_c, rho, gamma, sqrt(...), d_ck for δ_ck. Do not use ∂ in an answer.
"""

from scratchformer import ops


def rmsnorm(x, gamma, eps=1e-6):
    """y = γ x̂ with x̂ = x/ρ. x: (N, C), gamma: (C,).

    Forward:

        ρ = √(1/C Σ_c x_c² + eps)
        x̂_c = x_c/ρ
        y_c = γ_c x̂_c

    Backward:

        dγ_c = ⟦Σ_n dy_nc x̂_nc⟧
        ∂ρ/∂x_k = ⟦x̂_k/C⟧
        ∂x̂_c/∂x_k = ⟦(δ_ck − x̂_c x̂_k/C)/ρ⟧

    With g, the gradient of x̂, simplify dx until only one mean over the row is left:

        g_c := dy_c γ_c
        dx_k = Σ_c g_c ∂x̂_c/∂x_k = ⟦(g_k − x̂_k mean_c(g_c x̂_c))/ρ⟧
    """
    return ops.rmsnorm(x, gamma, eps)


# The student's file ends here.

from ..grading import Derivation, normal

HINTS = (
    "Differentiate ρ² = 1/C Σ_c x_c² + eps on both sides: one term of the sum contains x_k. Then the quotient rule for "
    "x_c/ρ.",
    "2ρ ∂ρ/∂x_k = 2 x_k/C, and x_k/ρ is x̂_k. The quotient rule gives δ_ck/ρ − x_c/ρ² ∂ρ/∂x_k.",
    "∂x̂_c/∂x_k = (δ_ck − x̂_c x̂_k/C)/ρ. Multiply by g_c and sum over c: the δ leaves g_k, and 1/C Σ_c g_c x̂_c is a "
    "mean.",
)
LIBRARY = ops.rmsnorm
MISTAKES = (
    ("(g_k − x̂_k mean_c(g_c x̂_c))/ρ", "g_k/ρ", "dx_k.*is not true", "ρ is treated as a constant"),
    ("(g_k − x̂_k mean_c(g_c x̂_c))/ρ", "γ_k (dy_k − x̂_k mean_c(dy_c x̂_c))/ρ", "dx_k.*is not true"),
    ("= x̂_k/C\n", "= x_k/C\n", "∂ρ/∂x_k.*is not true"),
    ("(δ_ck − x̂_c x̂_k/C)/ρ", "(1 − x̂_c x̂_k/C)/ρ", "∂x̂_c/∂x_k.*is not true"),
    ("(δ_ck − x̂_c x̂_k/C)/ρ", "(δ_ck − x̂_k/C)/ρ", "∂x̂_c/∂x_k.*is not true"),
    ("Σ_n dy_nc x̂_nc", "mean_n(dy_nc x̂_nc)", "dγ_c.*is not true"),
)


def derivation(student):
    runs = (normal(0, 3, 5), normal(1, 5)), (normal(0, 2, 4), normal(1, 4))
    return Derivation(student.rmsnorm, ops.rmsnorm_backward, runs)

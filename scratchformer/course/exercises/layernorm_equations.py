"""The derivation of layer norm

Each row of x is shifted to mean 0 and scaled to variance 1. So x_k changes y in three ways: directly, through the mean
μ, and through the standard deviation σ. The gradient has a term for each, and the third is the one that people forget.

The equations are about one row of length C, and c and k are indices along it. mean_c(a_c) stands for 1/C Σ_c a_c. Only
dγ and dβ are about all rows: there, n is the number of the row and comes first, as in dy_nc.

You may type xhat_c for x̂_c, mu, sigma, gamma, beta, sqrt(...), d_ck for δ_ck. Do not use ∂ in an answer.
"""

from scratchformer import ops


def layernorm(x, gamma, beta, eps=1e-5):
    """y = γ x̂ + β with x̂ = (x − μ)/σ. x: (N, C), gamma and beta: (C,).

    Forward:

        μ = 1/C Σ_c x_c
        σ = √(1/C Σ_c (x_c − μ)² + eps)
        x̂_c = (x_c − μ)/σ
        y_c = γ_c x̂_c + β_c

    Backward. The last step first. γ and β are used by every row:

        dγ_c = ⟦Σ_n dy_nc x̂_nc⟧
        dβ_c = ⟦Σ_n dy_nc⟧
        g_c := ∂L/∂x̂_c = ⟦dy_c γ_c⟧

    How do μ and σ depend on x_k? Simplify ∂σ/∂x_k until only x̂_k and C are left: Σ_c (x_c − μ) is 0.

        ∂μ/∂x_k = ⟦1/C⟧
        ∂σ/∂x_k = ⟦x̂_k/C⟧

    The quotient rule, with three terms: directly, through μ and through σ. Write it in terms of x̂, σ and C:

        ∂x̂_c/∂x_k = ⟦(δ_ck − 1/C − x̂_c x̂_k/C)/σ⟧

    The chain rule sums over c. The δ leaves one term, and the other two are means over the row:

        dx_k = Σ_c g_c ∂x̂_c/∂x_k = ⟦(g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ⟧
    """
    return ops.layernorm(x, gamma, beta, eps)


# The student's file ends here.

from ..grading import Derivation, normal

HINTS = (
    "dγ and dβ sum over the rows n; all else stays within a row. For ∂σ/∂x_k, begin with σ² = 1/C Σ_c (x_c − μ)² "
    "+ eps and differentiate both sides: 2σ ∂σ/∂x_k is 2/C (x_k − μ), because the part through μ is a sum that is "
    "0.",
    "Solve for ∂σ/∂x_k, and find x̂_k in it. The derivative of (x_c − μ)/σ has (δ_ck − ∂μ/∂x_k)/σ from its "
    "numerator, and from its denominator −(x_c − μ)/σ² ∂σ/∂x_k.",
    "∂x̂_c/∂x_k = (δ_ck − 1/C − x̂_c x̂_k/C)/σ. Multiplied by g_c and summed over c, the terms are g_k, "
    "mean_c(g_c) and x̂_k mean_c(g_c x̂_c).",
)
LIBRARY = ops.layernorm
MISTAKES = (
    (
        "(g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ",
        "(g_k − mean_c(g_c))/σ",
        "dx_k.*is not true",
        "the third term, through σ, is left out",
    ),
    (
        "(g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ",
        "γ_k (dy_k − mean_c(dy_c) − x̂_k mean_c(dy_c x̂_c))/σ",
        "dx_k.*is not true",
        "γ is outside the means: it differs from element to element, so it belongs to g",
    ),
    ("(δ_ck − 1/C − x̂_c x̂_k/C)/σ", "(δ_ck − 1/C)/σ", "∂x̂_c/∂x_k.*is not true", "σ is treated as a constant"),
    ("= x̂_k/C\n", "= x̂_k\n", "∂σ/∂x_k.*is not true"),
    ("Σ_n dy_nc x̂_nc", "dy_c x̂_c", "dγ_c.*is not true", "the sum over the rows is left out"),
    ("Σ_n dy_nc x̂_nc", "1 dgamma_c", r"line \d+: dγ_c is on both sides"),
    ("= Σ_n dy_nc\n", "= mean_n(dy_nc)\n", "dβ_c.*is not true"),
    ("= dy_c γ_c", "= dy_c", "∂L/∂x̂_c.*"),
)


def derivation(student):
    runs = [(normal(0, N, C), normal(1, C), normal(2, C)) for N, C in ((3, 5), (2, 4))]
    return Derivation(student.layernorm, ops.layernorm_backward, runs)

"""Norms."""

from __future__ import annotations

from ..testing.draw import Sizes
from .entry import Arguments, OperationEntry, given, normal

NORM = "dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ"


def wide(d: Sizes) -> Arguments:
    """With C = 2 nothing would be left of the gradient: normalising removes two directions."""
    d.left.remove(2)
    return given(d("B T C"), d("C"), d("C"))


ENTRIES = [
    OperationEntry("layernorm", analytic=True)
    .extension("safe from rounding", "round")
    .case("", normal("B T C", "C", "C"))
    .derivation("", wide)
    .mistake(
        "γ is applied outside the means",
        "Right as long as all γ are equal, as they are before training, and wrong from the first step on.",
        equation=NORM,
        wrong="dx_k = γ_k (dy_k − mean_c(dy_c) − x̂_k mean_c(dy_c x̂_c))/σ",
        code="dx = gamma * rstd * (dy - dy.mean(-1) - xhat * (dy * xhat).mean(-1))",
        replace={
            "g = dy * cache.gamma": "g = dy",
            "\n    dx = rstd * (g - xp.mean(g, axis=-1, keepdims=True) -": (
                "\n    dx = cache.gamma * rstd * (g - xp.mean(g, axis=-1, keepdims=True) -"
            ),
        },
    )
    .mistake(
        "The third term is forgotten",
        "x changes σ as well. Without this term the gradient pushes along x̂, a direction that normalising removes.",
        equation=NORM,
        wrong="dx_k = (g_k − mean_c(g_c))/σ",
    )
    .mistake(
        "β gets the mean over the rows",
        "The gradient of β is N times too small.",
        equation="dβ_c = Σ_n dy_nc",
        wrong="dβ_c = mean_n(dy_nc)",
    ),
    OperationEntry("rmsnorm", analytic=True)
    .case("", normal("B T C", "C"))
    .mistake(
        "The scale is treated as a constant",
        "Each x_k changes ρ and so the whole row. The gradient keeps its component along x̂, which should vanish.",
        equation="dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ",
        wrong="dx_k = g_k/ρ",
        replace={
            "dx = rrms * (g - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))\n    return": (
                "dx = rrms * g\n    return"
            )
        },
    ),
]

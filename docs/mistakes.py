"""Mistakes that others have made in these gradients: by operation or layer, for its page.

title; equation: the text of an equation of the derivation; wrong: what was written in its place; effect: what this does
to the gradient; code: the wrong line of a program, where there is one.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    title: str
    equation: str
    wrong: str
    effect: str
    code: str = ""


MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "linear": (
        Mistake(
            "The bias takes the mean over the rows",
            "db_o = Σ_n dy_no",
            "db_o = mean_n(dy_no)",
            "The gradient of the bias is N times too small. Adam divides every gradient by its own size, so training "
            "hides it.",
        ),
        Mistake(
            "The weights' gradient divided by the number of rows",
            "dw_io = Σ_n x_ni dy_no",
            "dw_io = 1/N Σ_n x_ni dy_no",
            "dy contains the 1/N of the loss already. Divided twice, dw is N times too small beside dx and db.",
        ),
    ),
    "relu": (
        Mistake(
            "The comparison takes y ≥ 0",
            "dx_i = dy_i [x_i > 0]",
            "dx_i = dy_i [y_i ≥ 0]",
            "y is never negative, so every element passes its gradient on, those that forward set to 0 too.",
            "dx = dy * (y >= 0)",
        ),
    ),
    "gelu": (
        Mistake(
            "The slope without its second term",
            "dy_i/dx_i = Φ(x) + x Φ'(x)",
            "dy_i/dx_i = Φ(x)",
            "The product rule has two terms. Around x = ±1 the gradient is off by 0.24.",
        ),
        Mistake(
            "Constants typed in decimal",
            "√(2/π)",
            "0.7978",
            "The gradient is right to three digits. A check with a tolerance of 1e-3 passes; one in float64 does not.",
        ),
    ),
    "softmax": (
        Mistake(
            "Only the diagonal of the Jacobian",
            "dz_k = y_k (dy_k − Σ_i dy_i y_i)",
            "dz_k = y_k (1 − y_k) dy_k",
            "Every score changes the sum Z, and so every probability. Without these terms, dz does not sum to 0.",
        ),
        Mistake(
            "Divided by the batch size",
            "dz_k = y_k (dy_k − Σ_i dy_i y_i)",
            "dz_k = 1/N y_k (dy_k − Σ_i dy_i y_i)",
            "The mean over the batch belongs to the loss, which has divided already. dz is N times too small.",
        ),
    ),
}

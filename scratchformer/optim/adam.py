"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..backend import Array, array_module
from ..dispatch import operation
from ..nn import Param
from .optimizer import Optimizer


@operation
def adam_step(
    w: Array, g: Array, m: Array, v: Array, lr: float, betas: tuple[float, float], eps: float, steps: int
) -> None:
    """The four formulas of `Adam` for a piece (n,) of the flat arrays: changes w, m and v in place, not g.

    steps: t, the number of this step, counted from 1.
    """
    xp = array_module(w)
    beta1, beta2 = betas
    m *= beta1
    m += (1 - beta1) * g
    v *= beta2
    v += (1 - beta2) * (g * g)
    denominator = xp.sqrt(v)
    denominator /= math.sqrt(1 - beta2**steps)  # √v̂
    denominator += eps
    w -= (lr / (1 - beta1**steps)) * m / denominator


class Adam(Optimizer):
    """Adam: each parameter steps by its mean gradient over the root of its mean squared gradient.

    With g the gradient (plus weight_decay · w, if any) and t the number of the step, counted from 1,

        m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
        w ← w − lr · m̂/(√v̂ + eps),   m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)

    m and v start at zero, so after t steps their weights add up to 1 − βᵗ: the division makes them means.
    params, lr: see `Optimizer`. betas: (β₁, β₂). Source: Kingma, Ba, "Adam", 2015, algorithm 1.
    """

    buffers = ("m", "v")

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def update(self, w: Array, g: Array, m: Array, v: Array) -> None:
        if self.weight_decay:
            g = g + self.weight_decay * w
        adam_step(w, g, m, v, self.lr, self.betas, self.eps, self.steps)


class AdamW(Adam):
    """Adam with decoupled weight decay: w ← w − lr · weight_decay · w, beside the step and not through its means.

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def update(self, w: Array, g: Array, m: Array, v: Array) -> None:
        w *= 1 - self.lr * self.weight_decay
        adam_step(w, g, m, v, self.lr, self.betas, self.eps, self.steps)

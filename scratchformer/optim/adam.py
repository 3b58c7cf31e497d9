"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..backend import Array, array_module
from ..dispatch import operation
from ..nn import Param
from .optimizer import Group, Optimizer


@operation
def adam_step(
    w: Array, g: Array, m: Array, v: Array, lr: float, betas: tuple[float, float], eps: float, steps: int
) -> None:
    """The formulas of `Adam` for a piece (n,) of the flat arrays. Changes w, m and v in place, but not g.

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
    """Adam: each parameter moves by its mean gradient, divided by the root of its mean squared gradient.

    With g the gradient (plus weight_decay · w, if any) and t the number of the step, counted from 1,

        m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
        w ← w − lr · m̂/(√v̂ + eps),   m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)

    m and v start at zero, so after t steps the weights in each sum add up to 1 − βᵗ. Dividing by that gives means.
    params, lr, groups: see `Optimizer`. betas: (β₁, β₂). Raises TypeError for parameters in half precision, where
    the squares in v, and eps, would be rounded to 0. Source: Kingma, Ba, "Adam", 2015, algorithm 1.
    """

    buffers = ("m", "v")

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        if not eps >= 0:
            raise ValueError(f"eps: expected a number >= 0, got {eps}")
        super().__init__(params, lr, weight_decay, groups)
        for p in self.stepped:
            if (dtype := p.data.dtype).itemsize < 4:
                raise TypeError(f"params: expected float32 or float64, got {dtype}: cast them with layer.to(dtype=...)")
        self.betas, self.eps = betas, eps

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"betas": list(self.betas), "eps": self.eps}

    def update(self, w: Array, g: Array, m: Array, v: Array, lr: float, weight_decay: float) -> None:
        if weight_decay:
            g = g + weight_decay * w
        adam_step(w, g, m, v, lr, self.betas, self.eps, self.steps)


class AdamW(Adam):
    """Adam with decoupled weight decay: first w ← w − lr · weight_decay · w, then the step. m and v have no decay.

    Only parameters of two or more axes decay, the matrices. Pulling a bias, or the gamma of a norm, towards zero would
    change what the layer computes and guard against nothing. A group's own weight_decay applies to all its parameters.
    Source: Loshchilov, Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, groups)

    def decay_of(self, p: Param) -> float:
        return self.weight_decay if p.data.ndim >= 2 else 0.0

    def update(self, w: Array, g: Array, m: Array, v: Array, lr: float, weight_decay: float) -> None:
        if weight_decay:
            w *= 1 - lr * weight_decay
        adam_step(w, g, m, v, lr, self.betas, self.eps, self.steps)

"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..backend import Array
from ..nn import Param
from ..ops.checks import expect_fraction
from .optimizer import Group, Optimizer


class SGD(Optimizer):
    """Gradient descent with momentum: each parameter moves by a velocity, a decaying sum of its gradients.

    Let θ_ti be parameter i after step t, counted from 1, and G_ti its gradient in this step. With weight decay λ and
    momentum μ, the velocity u starts at 0, and

        g_ti = G_ti + λ θ_{t−1,i} for t ≥ 1        u_ti = μ u_{t−1,i} + g_ti for t ≥ 1
        θ_ti = θ_{t−1,i} − lr_t u_ti for t ≥ 1

    Unrolled, the weight of a gradient shrinks by a factor μ with every further step:

        u_ti = Σ_{1 ≤ j ≤ t} μ^(t − j) g_ji

    params, lr, groups: see `Optimizer`. The learning rate is outside the velocity, as in PyTorch, so lowering it takes
    effect immediately. Source: Sutskever et al., "On the importance of initialization and momentum", 2013, equations 1
    and 2, where it is inside the velocity; the two are the same while lr is constant.
    """

    buffers = ("velocity",)

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        expect_fraction("momentum", momentum)
        super().__init__(params, lr, weight_decay, groups)
        self.momentum = float(momentum)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"momentum": float(self.momentum)}

    def update(self, w: Array, g: Array, velocity: Array, lr: float, weight_decay: float) -> None:
        velocity *= self.momentum
        velocity += g + weight_decay * w
        w -= lr * velocity

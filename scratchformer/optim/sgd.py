"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..backend import Array
from ..checks import expect_fraction
from ..dispatch import operation
from ..nn import Param
from .optimizer import Group, Optimizer


@operation
def sgd_step(w: Array, g: Array, velocity: Array, lr: float, momentum: float, decay: float) -> None:
    """A step of `SGD` for a piece (n,) of the flat arrays: changes w and velocity in place, but not g. decay: λ.

    For each number i, with w0 and velocity0 for the values before the step:

        velocity_i = momentum velocity0_i + (g_i + decay w0_i)        w_i = w0_i − lr velocity_i
    """
    velocity *= momentum
    velocity += g + decay * w
    w -= lr * velocity


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
        return super().settings() | {"momentum": self.momentum}

    def update(self, w: Array, g: Array, velocity: Array, lr: float, weight_decay: float) -> None:
        sgd_step(w, g, velocity, lr, self.momentum, weight_decay)

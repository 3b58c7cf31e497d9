"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..backend import Array
from ..nn import Param
from .optimizer import Group, Optimizer


class SGD(Optimizer):
    """velocity ← momentum · velocity + g, then w ← w − lr · velocity, with g the gradient plus weight_decay · w.

    params, lr, groups: see `Optimizer`. The learning rate is not part of the velocity, as in PyTorch, so a lower rate
    takes effect at once. Source: Sutskever et al., "On the importance of initialization and momentum", 2013,
    equations 1 and 2, where it is part of it; the two are the same while lr is constant.
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
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: expected 0 <= momentum < 1, got {momentum}")
        super().__init__(params, lr, weight_decay, groups)
        self.momentum = momentum

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"momentum": self.momentum}

    def update(self, w: Array, g: Array, velocity: Array, lr: float, weight_decay: float) -> None:
        velocity *= self.momentum
        velocity += g + weight_decay * w
        w -= lr * velocity

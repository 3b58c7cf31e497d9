"""The optimizer of dynamic evaluation, which adapts a trained model to the text that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import Array, array_module
from ..checks import expect_number
from ..nn import Param
from ..optim.optimizer import Group, Optimizer, pieces


class DynamicRMS(Optimizer):
    """Steps scaled by what gradients were in training, and a pull back to the trained weights.

    Let θ_ti be parameter i after step t, counted from 1, G_ti its gradient in this step, and θ_{0,i} its value after
    training. First, g_ki is its gradient on batch k of the training data (`observe`). Its root mean square says how
    much parameter i matters to the loss; r is that in units of the mean over all parameters:

        rms_i = √mean_k(g_ki²)        r_i = rms_i/mean_i'(rms_i')

    A step divides the gradient by its root mean square. At the same time the parameter returns a part of the way to
    θ_{0,i}. A parameter with large gradients returns faster: what it moves by is small, but it changes the loss most.
    The part is at most 1, with which the parameter is back where it began; with more it would overshoot.

        pull_i = min(1, λ r_i)
        θ_ti = θ_{t−1,i} − lr_t G_ti/(rms_i + eps) + pull_i (θ_{0,i} − θ_{t−1,i}) for t ≥ 1

    Unrolled, a parameter's distance from θ_{0,i} is a sum of its gradients. The weight of each shrinks by the factor
    1 − pull with every further step, so λ says how long the model remembers what it has read:

        θ_ti − θ_{0,i} = −Σ_{1 ≤ j ≤ t} (1 − pull_i)^(t − j) lr_j G_ji/(rms_i + eps)

    params, lr, groups: see `Optimizer`. decay: λ. Raises TypeError for parameters in half precision, where the squares
    would underflow to 0. Source: Krause, Kahembwe, Murray, Renals, "Dynamic evaluation of neural sequence models",
    2018, section 5: the update with an RMS global prior.
    """

    buffers = ("start", "squares")
    start: Array
    squares: Array

    def __init__(
        self, params: Iterable[Param], lr: float, decay: float, eps: float = 1e-5, groups: Sequence[Group] = ()
    ) -> None:
        expect_number("decay", decay)
        expect_number("eps", eps, zero=False)
        super().__init__(params, lr, groups=groups)
        if any(group.weight_decay is not None for group in groups):
            raise ValueError(
                "groups: DynamicRMS has no weight decay; `decay` pulls parameters back to where they began"
            )
        for p in self.stepped:
            if (dtype := p.data.dtype).itemsize < 4:
                raise TypeError(f"params: expected float32 or float64, got {dtype}: cast them with layer.to(dtype=...)")
        self.decay, self.eps, self.observed = float(decay), float(eps), 0
        self.mean: float | None = None  # of rms over all parameters; None if it has to be computed
        for run in self.together:
            self.start[run.state] = run.flat.data[run.where]

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"decay": float(self.decay), "eps": float(self.eps)}

    def state_dict(self) -> dict[str, np.ndarray]:
        """As for every optimizer, with the number of batches observed."""
        return super().state_dict() | {"observed": np.array(self.observed, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As for every optimizer."""
        if not isinstance(state, Mapping) or "observed" not in state:
            raise ValueError("state of another optimizer: observed: expected int64 (), got none")
        observed = np.asarray(state["observed"])
        if observed.shape or observed.dtype.kind not in "iu" or observed < 0:
            raise ValueError(f"state of another optimizer: observed: expected int64 (), at least 0, got {observed}")
        super().load_state_dict({name: value for name, value in state.items() if name != "observed"})
        self.observed, self.mean = int(observed), None

    def observe(self) -> None:
        """Take the present gradients, of a batch of the training data, into the means of their squares."""
        self._lay_out()
        self.observed += 1
        for run in self.together:
            g, squares = run.flat.grad[run.where], self.squares[run.state]
            for part in pieces(g):
                squares[part] += (g[part] * g[part] - squares[part]) / self.observed
        self.mean = None

    def step(self, map: Callable = map, share: float | Array = 1.0, half: Array | None = None) -> None:
        """As `Optimizer.step`. Raises ValueError if no gradient was observed."""
        if not self.observed:
            raise ValueError("observe: expected gradients of training batches before the first step, got none")
        if self.mean is None:
            xp, parts = array_module(self.squares), pieces(self.squares)
            total = sum(float(xp.sqrt(self.squares[part]).sum(dtype="float64")) for part in parts)
            self.mean = total / self.squares.size
        super().step(map, share, half)

    def update(self, w: Array, g: Array, start: Array, squares: Array, lr: float, weight_decay: float) -> None:
        xp = array_module(w)
        rms = xp.sqrt(squares)
        pull = xp.minimum(1, (self.decay / (self.mean or 1.0)) * rms)
        w += pull * (start - w) - lr * g / (rms + self.eps)

"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..backend import Array, array_module, power
from ..checks import expect_fraction, expect_number
from ..dispatch import operation
from ..nn import Param
from ..shell.text import shown
from .optimizer import Group, Optimizer, Treatment, scaled


@operation
def adam_step(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    steps: int,
    decay: float = 0.0,
    share: float | Array = 1.0,
) -> None:
    """A step of `Adam` for a piece (n,) of the flat arrays: changes w, m and v in place, but not g. decay: the share
    by which the weights shrink first, as in `AdamW`. share: what is left of the gradient after clipping; a number, or
    on a GPU an array () there.

    For each number i, with w0, m0 and v0 for the values before the step, and t for `steps`, counted from 1:

        t := steps        c_i := share g_i
        m_i = β1 m0_i + (1 − β1) c_i        v_i = β2 v0_i + (1 − β2) c_i c_i
        w_i = (1 − decay) w0_i − lr (m_i/(1 − β1^t))/(√(v_i/(1 − β2^t)) + eps)

    The two corrections are the same for all i. So they are computed once, in float64, outside the root:

        rate := lr/(1 − β1^t)        root := 1/√(1 − β2^t)
        w_i = (1 − decay) w0_i − rate m_i/(root √v_i + eps)
    """
    xp, c = array_module(w), scaled(g, share)
    w *= 1 - decay
    m *= beta1
    m += (1 - beta1) * c
    v *= beta2
    v += (1 - beta2) * c * c
    denominator = xp.sqrt(v)
    denominator *= 1 / math.sqrt(1 - power(beta2, steps))  # √v̂
    denominator += eps
    w -= (lr / (1 - power(beta1, steps))) * m / denominator


class Adam(Optimizer):
    """Adam: each parameter moves by its mean gradient divided by the root of its mean squared gradient.

    Let θ_ti be parameter i after step t, counted from 1, and G_ti its gradient in this step. Weight decay λ adds λ θ,
    the gradient of λ/2 θ², to G. Two running means, of the gradient and of its square, start at 0:

        g_ti = G_ti + λ θ_{t−1,i} for t ≥ 1        m_{0,i} = v_{0,i} = 0
        m_ti = β1 m_{t−1,i} + (1 − β1) g_ti for t ≥ 1        v_ti = β2 v_{t−1,i} + (1 − β2) g_ti² for t ≥ 1

    Unrolled, m is a weighted sum of all gradients so far, whose weights sum to 1 − β1^t, and v one of their squares:

        m_ti = (1 − β1) Σ_{1 ≤ j ≤ t} β1^(t − j) g_ji        v_ti = (1 − β2) Σ_{1 ≤ j ≤ t} β2^(t − j) g_ji²
        weights_t = (1 − β1) Σ_{1 ≤ j ≤ t} β1^(t − j) = 1 − β1^t

    Dividing by the sum of the weights gives weighted means, from the first step on:

        m̂_ti = m_ti/(1 − β1^t) for t ≥ 1        v̂_ti = v_ti/(1 − β2^t) for t ≥ 1
        θ_ti = θ_{t−1,i} − lr_t m̂_ti/(√v̂_ti + eps) for t ≥ 1

    `adam_step` says how this is computed.

    params, lr, groups: see `Optimizer`. betas: (β1, β2). Raises TypeError for parameters in half precision, where the
    squares in v, and eps, would underflow to 0. Source: Kingma, Ba, "Adam", 2015, algorithm 1.
    """

    buffers = ("m", "v")
    decoupled = False  # whether weight decay shrinks the weights themselves, and is not part of the gradient

    def __init__(
        self,
        params: Iterable[Param],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas: expected two numbers, got {shown(betas)}")
        for beta in betas:
            expect_fraction("betas", beta, letter="beta")
        expect_number("eps", eps)
        super().__init__(params, lr, weight_decay, groups)
        for p in self.stepped:
            if (dtype := p.data.dtype).itemsize < 4:
                raise TypeError(f"params: expected float32 or float64, got {dtype}: cast them with layer.to(dtype=...)")
        self.betas, self.eps = (float(betas[0]), float(betas[1])), float(eps)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"betas": list(self.betas), "eps": self.eps}

    def joins(self, how: Treatment) -> bool:
        return self.scales and (self.decoupled or not how.weight_decay)

    def update(
        self, w: Array, g: Array, m: Array, v: Array, lr: float, weight_decay: float, share: float | Array = 1.0
    ) -> None:
        if weight_decay and not self.decoupled:
            g, share = scaled(g, share) + weight_decay * w, 1.0
        decay = lr * weight_decay if self.decoupled else 0.0
        adam_step(w, g, m, v, lr, *self.betas, self.eps, self.steps, decay, share)


class AdamW(Adam):
    """Adam with decoupled weight decay: parameters shrink in each step, but the decay is not in m and v.

    Only parameters with two or more axes decay, the matrices: pulling a bias, or the gamma of a norm, towards zero
    changes what the layer computes but prevents no overfitting. In the notation of `Adam`, with axes_i for the number
    of axes of the array that holds parameter i,

        λ_i = weight_decay where axes_i ≥ 2, 0 elsewhere
        m_ti = β1 m_{t−1,i} + (1 − β1) G_ti for t ≥ 1        v_ti = β2 v_{t−1,i} + (1 − β2) G_ti² for t ≥ 1
        m̂_ti = m_ti/(1 − β1^t) for t ≥ 1        v̂_ti = v_ti/(1 − β2^t) for t ≥ 1
        θ_ti = (1 − lr_t λ_i) θ_{t−1,i} − lr_t m̂_ti/(√v̂_ti + eps) for t ≥ 1

    The weight_decay of a group applies to all of its parameters. Source: Loshchilov, Hutter, "Decoupled weight decay
    regularization", 2019, algorithm 2.
    """

    decoupled = True

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

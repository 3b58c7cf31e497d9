"""The gated feed-forward layer of Llama."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..checks import expect_positive
from ..rng import Key, fold
from .layer import Layer, expect_backward
from .linear import Linear


class SwiGLUCache(NamedTuple):
    gate: Any
    up: Any
    swiglu: Any
    down: Any


class SwiGLU(Layer):
    """y = (silu(x w_gate) times x w_up, elementwise) w_down, with widths C → F → C, at each position separately.

    d_model: C. d_ff: F. bias: whether the three maps have one. x, y: (..., C).

    Forward, for each position n:

        gate_nf = Σ_c x_nc gate.w_cf        up_nf = Σ_c x_nc up.w_cf
        a_nf = up_nf gate_nf/(1 + exp(−gate_nf))        y_nc = Σ_f a_nf down.w_fc

    Backward. By `linear` and `swiglu`,

        da_nf = Σ_c dy_nc down.w_fc        dgate_nf = da_nf ∂a_nf/∂gate_nf        dup_nf = da_nf ∂a_nf/∂up_nf

    x feeds both factors of the product, so its gradient is the sum of two terms:

        dx_nc = Σ_f dgate_nf gate.w_cf + Σ_f dup_nf up.w_cf

    In code:

        dgate, dup = ops.swiglu_backward(self.down.backward(dy, cache.down), cache.swiglu)
        dx, _ = ops.add(self.gate.backward(dgate, cache.gate), self.up.backward(dup, cache.up))

    Source: Shazeer, "GLU variants improve transformer", 2020, equation 6.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = False, key: Key = Key(0)) -> None:
        expect_positive(d_model=d_model, d_ff=d_ff)
        self.gate = Linear(d_model, d_ff, bias, fold(key, "gate"))
        self.up = Linear(d_model, d_ff, bias, fold(key, "up"))
        self.down = Linear(d_ff, d_model, bias, fold(key, "down"))

    def forward(self, x: Array) -> tuple[Array, SwiGLUCache]:
        g, gate = self.gate.forward(x)  # (..., F)
        u, up = self.up.forward(x)
        a, swiglu = ops.swiglu(g, u)
        y, down = self.down.forward(a)
        return y, SwiGLUCache(gate, up, swiglu, down)

    def backward(self, dy: Array, cache: SwiGLUCache) -> Array:
        expect_backward(cache, SwiGLUCache, dy=dy)
        dgate, dup = ops.swiglu_backward(self.down.backward(dy, cache.down), cache.swiglu)
        dx, _ = ops.add(self.gate.backward(dgate, cache.gate), self.up.backward(dup, cache.up))
        return dx

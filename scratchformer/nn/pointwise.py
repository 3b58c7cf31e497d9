"""Layers that act on each position by itself: affine maps, norms, dropout, and the feed-forward layers of blocks."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, ClassVar

import numpy as np

from .. import ops
from ..backend import Array
from ..checks import expect_boolean, expect_fraction, expect_instance, expect_number, expect_positive, expect_real
from ..rng import Key, fold
from .layer import Layer, Param, add_backward, add_gradients, expect_backward, initial_generator


class Linear(Layer):
    """y = x w + b, or y = f(x w + b) with an activation f.

    d_in, d_out: the widths of x (..., d_in) and y (..., d_out). w and b are initially uniform in ±1/√d_in, drawn from
    `key`: two layers of the same size with the same key, or both without one, start with the same weights.
    activation: None, "relu", "gelu", "gelu_tanh", "silu", or your own pair (op, op_backward), see
    `ops.activation_pair`. A layer with an activation must have a bias.
    """

    def __init__(
        self, d_in: int, d_out: int, bias: bool = True, key: Key = Key(0), activation: ops.Activation | None = None
    ) -> None:
        draw = initial_generator(key, d_in=d_in, d_out=d_out)
        expect_boolean(bias=bias)
        if activation is not None:
            ops.activation_pair(activation)
            if not bias:
                raise ValueError("bias: expected True, since the layer has an activation, got False")
        bound = 1 / math.sqrt(d_in)
        self.w = Param(draw.uniform(-bound, bound, (d_in, d_out)).astype(np.float32, copy=False), "w")
        self.b = Param(draw.uniform(-bound, bound, d_out).astype(np.float32, copy=False), "b") if bias else None
        self.activation = activation

    def forward(self, x: Array) -> tuple[Array, tuple]:
        b = None if self.b is None else self.b.data
        if self.activation is None:
            return ops.linear(x, self.w.data, b)
        return ops.dense(x, self.w.data, b, self.activation)

    def backward(self, dy: Array, cache: tuple, plus: Array | None = None) -> Array:
        backward = ops.linear_backward if self.activation is None else ops.dense_backward
        grads = [self.w.grad] if self.b is None else [self.w.grad, self.b.grad]
        return add_gradients(backward, dy, cache, grads, plus)


class LayerNorm(Layer):
    """y = γ x̂ + β over the last axis, of width d_model; γ starts at 1 and β at 0."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        expect_positive(d_model=d_model)
        expect_number("eps", eps, zero=False)
        self.gamma = Param(np.ones(d_model, np.float32), "gamma")
        self.beta = Param(np.zeros(d_model, np.float32), "beta")
        self.eps = float(eps)

    def forward(self, x: Array) -> tuple[Array, tuple]:
        return ops.layernorm(x, self.gamma.data, self.beta.data, self.eps)

    def backward(self, dy: Array, cache: tuple, plus: Array | None = None) -> Array:
        return add_gradients(ops.layernorm_backward, dy, cache, (self.gamma.grad, self.beta.grad), plus)


class RMSNorm(Layer):
    """y = γ x/ρ, where ρ is the root mean square of x over the last axis, of width d_model; γ starts at 1."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        expect_positive(d_model=d_model)
        expect_number("eps", eps, zero=False)
        self.gamma = Param(np.ones(d_model, np.float32), "gamma")
        self.eps = float(eps)

    def forward(self, x: Array) -> tuple[Array, tuple]:
        return ops.rmsnorm(x, self.gamma.data, self.eps)

    def backward(self, dy: Array, cache: tuple, plus: Array | None = None) -> Array:
        return add_gradients(ops.rmsnorm_backward, dy, cache, (self.gamma.grad,), plus)


NormedLinearCache = namedtuple("NormedLinearCache", "linear norm")


class NormedLinear(Layer):
    """y = norm(x w + b): an affine map, and an RMS norm of its result or of each head of it.

    linear: a `Linear`. norm: an `RMSNorm` of width D, which divides d_out: the result is normalised in groups of D
    neighbouring numbers, which share γ. With D = d_out there is one group. x: (..., d_in). y: (..., d_out). Queries and
    keys whose size is fixed in this way keep the scores of attention from growing in training.

    Forward, for each position n, with the groups h:

        w_chd = linear.w_{c,h D + d}        z_nhd = Σ_c x_nc w_chd        ρ_nh = √(1/D Σ_d z_nhd² + eps)
        ẑ_nhd = z_nhd/ρ_nh        y_nj = norm.gamma_d ẑ_nhd with h = ⌊j/D⌋, d = j mod D

    Backward. Each group is a row of `rmsnorm`, and all groups share γ:

        dnorm.gamma_d = Σ_n Σ_h dy_{n,h D + d} ẑ_nhd        g_nhd := ∂L/∂ẑ_nhd = dy_{n,h D + d} norm.gamma_d
        dz_nhd = (g_nhd − ẑ_nhd 1/D Σ_d' g_nhd' ẑ_nhd')/ρ_nh

    The affine map passes this on to x and to the weights, by `linear`:

        dx_nc = Σ_h Σ_d dz_nhd w_chd        dlinear.w_{c,h D + d} = Σ_n x_nc dz_nhd

    In code:

        dz = self.norm.backward(self.grouped(dy), cache.norm).reshape(dy.shape)
        dx = self.linear.backward(dz, cache.linear, plus)

    Source: Henry et al., "Query-key normalization for transformers", 2020; Dehghani et al., "Scaling vision
    transformers to 22 billion parameters", 2023, section 2.
    """

    def __init__(self, linear: Linear, norm: RMSNorm) -> None:
        expect_instance("linear", linear, Linear)
        expect_instance("norm", norm, RMSNorm)
        width, D = linear.w.data.shape[1], norm.gamma.data.size
        if width % D:
            raise ValueError(f"norm: expected a width that divides {width}, the width of the linear layer, got {D}")
        self.linear, self.norm = linear, norm

    def forward(self, x: Array) -> tuple[Array, NormedLinearCache]:
        z, linear = self.linear.forward(x)
        y, norm = self.norm.forward(self.grouped(z))
        return y.reshape(z.shape), NormedLinearCache(linear, norm)

    def backward(self, dy: Array, cache: NormedLinearCache, plus: Array | None = None) -> Array:
        expect_backward(cache, NormedLinearCache, dy=dy)
        dz = self.norm.backward(self.grouped(dy), cache.norm).reshape(dy.shape)
        dx = self.linear.backward(dz, cache.linear, plus)
        return dx

    def grouped(self, x: Array) -> Array:
        """(..., d_out) -> (..., H, D)."""
        return x.reshape(*x.shape[:-1], -1, self.norm.gamma.data.size)


class Dropout(Layer):
    """With a key, zeroes each element with probability p and scales the rest; with no key, or p = 0, y = x."""

    def __init__(self, p: float) -> None:
        expect_fraction("p", p)
        self.p = float(p)

    def forward(self, x: Array, key: Key | None = None) -> tuple[Array, tuple | None]:
        return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)

    def backward(self, dy: Array, cache: tuple | None) -> Array:
        expect_real("dy", dy)
        return dy if cache is None else ops.dropout_backward(dy, cache)


FeedForwardCache = namedtuple("FeedForwardCache", "up down")


class FeedForward(Layer):
    """y = activation(x w₁ + b₁) w₂ + b₂, with widths C → F → C.

    d_ff: F, by default 4 C. activation: a name or your own pair of functions, see `Linear`. x: (..., C).

    Forward, for each position n, with ReLU:

        e_nf = Σ_c x_nc up.w_cf + up.b_f        a_nf = e_nf where e_nf > 0, 0 elsewhere
        y_nc = Σ_f a_nf down.w_fc + down.b_c

    Backward. The two maps are transposed, and between them a gradient passes only where ReLU let the number through:

        da_nf = Σ_c dy_nc down.w_fc        de_nf = da_nf where e_nf > 0, 0 elsewhere        dx_nc = Σ_f de_nf up.w_cf

    The weights of each map get its input times the gradient of its output, summed over the positions:

        dup.w_cf = Σ_n x_nc de_nf        dup.b_f = Σ_n de_nf
        ddown.w_fc = Σ_n a_nf dy_nc        ddown.b_c = Σ_n dy_nc
    """

    def __init__(
        self, d_model: int, d_ff: int | None = None, activation: ops.Activation = "relu", key: Key = Key(0)
    ) -> None:
        expect_positive(d_model=d_model)
        d_ff = 4 * int(d_model) if d_ff is None else d_ff
        expect_positive(d_ff=d_ff)
        self.up = Linear(d_model, d_ff, key=fold(key, "up"), activation=activation)
        self.down = Linear(d_ff, d_model, key=fold(key, "down"))

    def forward(self, x: Array) -> tuple[Array, FeedForwardCache]:
        a, up = self.up.forward(x)  # (..., F)
        y, down = self.down.forward(a)
        return y, FeedForwardCache(up, down)

    def backward(self, dy: Array, cache: FeedForwardCache) -> Array:
        expect_backward(cache, FeedForwardCache, dy=dy)
        return self.up.backward(self.down.backward(dy, cache.down), cache.up)


SwiGLUCache = namedtuple("SwiGLUCache", "gate up gated down")


class SwiGLU(Layer):
    """y = (silu(x w_gate) times x w_up, elementwise) w_down, with widths C → F → C, at each position separately.

    d_model: C. d_ff: F. bias: whether the three maps have one. x, y: (..., C).

    Forward, for each position n:

        gate_nf = Σ_c x_nc gate.w_cf        up_nf = Σ_c x_nc up.w_cf        s_nf = 1/(1 + exp(−gate_nf))
        a_nf = up_nf gate_nf s_nf        y_nc = Σ_f a_nf down.w_fc

    Backward. By `linear` and `swiglu`,

        da_nf = Σ_c dy_nc down.w_fc        dup_nf = da_nf ∂a_nf/∂up_nf = da_nf gate_nf s_nf
        dgate_nf = da_nf ∂a_nf/∂gate_nf = da_nf up_nf s_nf (1 + gate_nf (1 − s_nf))

    x feeds both factors of the product, so its gradient is the sum of two terms:

        dx_nc = Σ_f dgate_nf gate.w_cf + Σ_f dup_nf up.w_cf

    The weights get sums over all positions:

        ddown.w_fc = Σ_n a_nf dy_nc        dgate.w_cf = Σ_n x_nc dgate_nf        dup.w_cf = Σ_n x_nc dup_nf

    In code:

        dgate, dup = self.gated[1](self.down.backward(dy, cache.down), cache.gated)
        dx = add_backward(self.up.backward(dup, cache.up), self.gate, dgate, cache.gate)

    Source: Shazeer, "GLU variants improve transformer", 2020, equation 6.
    """

    gated: ClassVar[tuple[Any, Any]] = ops.swiglu, ops.swiglu_backward

    def __init__(self, d_model: int, d_ff: int, bias: bool = False, key: Key = Key(0)) -> None:
        expect_positive(d_model=d_model, d_ff=d_ff)
        self.gate = Linear(d_model, d_ff, bias, fold(key, "gate"))
        self.up = Linear(d_model, d_ff, bias, fold(key, "up"))
        self.down = Linear(d_ff, d_model, bias, fold(key, "down"))

    def forward(self, x: Array) -> tuple[Array, SwiGLUCache]:
        g, gate = self.gate.forward(x)  # (..., F)
        u, up = self.up.forward(x)
        a, gated = self.gated[0](g, u)
        y, down = self.down.forward(a)
        return y, SwiGLUCache(gate, up, gated, down)

    def backward(self, dy: Array, cache: SwiGLUCache) -> Array:
        expect_backward(cache, SwiGLUCache, dy=dy)
        dgate, dup = self.gated[1](self.down.backward(dy, cache.down), cache.gated)
        dx = add_backward(self.up.backward(dup, cache.up), self.gate, dgate, cache.gate)
        return dx


class GeGLU(SwiGLU):
    """y = (gelu(x w_gate) times x w_up, elementwise) w_down: `SwiGLU` with another activation, GELU by tanh.

    Forward, for each position n:

        gate_nf = Σ_c x_nc gate.w_cf        up_nf = Σ_c x_nc up.w_cf
        v_nf = √(2/π) (gate_nf + 0.044715 gate_nf³)        s_nf = ½ (1 + tanh(v_nf))
        a_nf = up_nf gate_nf s_nf        y_nc = Σ_f a_nf down.w_fc

    Backward. Only the slope of the activation differs, which is that of `geglu`:

        da_nf = Σ_c dy_nc down.w_fc        dup_nf = da_nf ∂a_nf/∂up_nf = da_nf gate_nf s_nf
        r_nf := ∂s_nf/∂gate_nf = ½ (1 − tanh(v_nf)²) √(2/π) (1 + 3·0.044715 gate_nf²)
        dgate_nf = da_nf ∂a_nf/∂gate_nf = da_nf up_nf (s_nf + gate_nf r_nf)
        dx_nc = Σ_f dgate_nf gate.w_cf + Σ_f dup_nf up.w_cf
        ddown.w_fc = Σ_n a_nf dy_nc        dgate.w_cf = Σ_n x_nc dgate_nf        dup.w_cf = Σ_n x_nc dup_nf

    Source: Shazeer, "GLU variants improve transformer", 2020, equation 6.
    """

    gated = ops.geglu, ops.geglu_backward

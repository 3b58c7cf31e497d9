"""Activations: ReLU, GELU, SiLU and tanh, elementwise; and how a layer's activation is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..backend import Array, array_module, erf
from ..dispatch import backward, operation
from .checks import expect_floating, expect_like
from .precision import widen


@operation
def relu(x: Array) -> tuple[Array, Array]:
    """y = max(x, 0), elementwise.

    x: any shape. Returns y of that shape, and as the cache the boolean array x > 0.

    Backward. y_i = x_i where x_i > 0 and 0 elsewhere, so ∂y_i/∂x_j = δ_ij [x_i > 0]; at the kink x_i = 0 we take the
    left derivative, 0. Then dx_i = Σ_j dy_j ∂y_j/∂x_i = dy_i [x_i > 0]:

        dx = dy * positive

    The cache keeps the comparison, one byte per element, rather than x.
    Source: Nair, Hinton, "Rectified linear units improve restricted Boltzmann machines", ICML 2010.
    """
    expect_floating(x=x)
    xp = array_module(x)
    return xp.maximum(x, 0), x > 0


@backward
def relu_backward(dy: Array, positive: Array) -> Array:
    """dx: see `relu`."""
    expect_like("dy", dy, positive.shape)
    dx = dy * positive
    return dx


class GeluCache(NamedTuple):
    x: Array
    approximate: str


CUBIC = 0.044715  # the coefficient that Hendrycks and Gimpel fitted; it has no closed form


@operation
def gelu(x: Array, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x Φ(x), elementwise, with Φ the cumulative distribution function of the standard normal distribution.

    x: any shape. approximate: "none" for Φ(x) = ½ (1 + erf(x/√2)); "tanh", as in GPT-2, for
    Φ(x) ≈ ½ (1 + tanh u) with u = √(2/π) (x + 0.044715 x³). Returns y of the shape of x, and the cache.
    Raises ValueError for another `approximate`.

    Backward. Elementwise, so dx = dy · dy/dx, and by the product rule dy/dx = Φ(x) + x Φ'(x).

    Exact: Φ' is the normal density, φ(x) = exp(−x²/2)/√(2π), since erf'(z) = 2/√π exp(−z²):

        dx = dy * (cdf + x * density)

    Tanh: with t = tanh u, Φ' = ½ (1 − t²) u' and u' = √(2/π) (1 + 3·0.044715 x²), the same line holds with

        density = 0.5 * (1 - t * t) * slope

    The cache keeps x alone: Φ is evaluated again, which halves the memory.
    Source: Hendrycks, Gimpel, "Gaussian error linear units", 2016, section 2.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    expect_floating(x=x)
    wide = widen(x)
    if approximate == "none":
        cdf = 0.5 * (1 + erf(wide * math.sqrt(0.5)))
    else:
        cdf = 0.5 * (1 + array_module(x).tanh(math.sqrt(2 / math.pi) * (wide + CUBIC * (wide * wide * wide))))
    return (wide * cdf).astype(x.dtype, copy=False), GeluCache(x, approximate)


@backward
def gelu_backward(dy: Array, cache: GeluCache) -> Array:
    """dx: see `gelu`."""
    expect_like("dy", dy, cache.x.shape)
    x = widen(cache.x)
    xp = array_module(x)
    if cache.approximate == "none":
        cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
        density = xp.exp(-0.5 * (x * x)) / math.sqrt(2 * math.pi)
    else:
        t = xp.tanh(math.sqrt(2 / math.pi) * (x + CUBIC * (x * x * x)))
        slope = math.sqrt(2 / math.pi) * (1 + 3 * CUBIC * (x * x))
        cdf = 0.5 * (1 + t)
        density = 0.5 * (1 - t * t) * slope
    dx = dy * (cdf + x * density)
    return dx.astype(dy.dtype, copy=False)


@operation
def tanh(x: Array) -> tuple[Array, Array]:
    """y = tanh x = (eˣ − e⁻ˣ)/(eˣ + e⁻ˣ), elementwise.

    x: any shape. Returns y of that shape, and y again as the cache.

    Backward. With s = eˣ − e⁻ˣ and c = eˣ + e⁻ˣ we have s' = c and c' = s, so the quotient rule gives
    dy/dx = (c c − s s)/c² = 1 − y², and elementwise dx = dy · dy/dx:

        dx = dy * (1 - y * y)

    The cache keeps only y, since the derivative is a function of y.
    """
    expect_floating(x=x)
    y = array_module(x).tanh(x)
    return y, y


@backward
def tanh_backward(dy: Array, y: Array) -> Array:
    """dx: see `tanh`."""
    expect_like("dy", dy, y.shape)
    dx = dy * (1 - y * y)
    return dx


def sigmoid(x: Array) -> Array:
    """1/(1 + exp(−x)), elementwise; for x < 0 as e/(1 + e) with e = exp(x), so that nothing overflows."""
    xp = array_module(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1) / (1 + e)


@operation
def silu(x: Array) -> tuple[Array, Array]:
    """y = x σ(x) with σ(x) = 1/(1 + exp(−x)), elementwise; also called swish.

    x: any shape. Returns y of that shape, and x as the cache.

    Backward. The derivative of the sigmoid is σ'(x) = exp(−x)/(1 + exp(−x))² = σ(x) (1 − σ(x)). By the product rule
    dy/dx = σ(x) + x σ'(x) = σ(x) (1 + x (1 − σ(x))), and elementwise dx = dy · dy/dx. With s = σ(x):

        dx = dy * (s * (1 + x * (1 - s)))

    The cache keeps x alone: σ is evaluated again, which halves the memory.
    Source: Elfwing, Uchibe, Doya, "Sigmoid-weighted linear units for neural network function approximation in
    reinforcement learning", 2018, equations 1 and 2.
    """
    expect_floating(x=x)
    wide = widen(x)
    return (wide * sigmoid(wide)).astype(x.dtype, copy=False), x


@backward
def silu_backward(dy: Array, x: Array) -> Array:
    """dx: see `silu`."""
    expect_like("dy", dy, x.shape)
    x = widen(x)
    s = sigmoid(x)
    dx = dy * (s * (1 + x * (1 - s)))
    return dx.astype(dy.dtype, copy=False)


Activation = str | tuple[Callable[[Array], tuple[Array, Any]], Callable[[Array, Any], Array]]

ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "relu": (relu, relu_backward),
    "gelu": (gelu, gelu_backward),
    "gelu_tanh": (partial(gelu, approximate="tanh"), gelu_backward),
    "silu": (silu, silu_backward),
}


def activation_pair(activation: Activation) -> tuple[Callable, Callable]:
    """(op, op_backward) for an activation: a name from ACTIVATIONS, or such a pair itself.

    A pair of your own must give `y, cache = op(x)`, with y of the shape of x, and `dx = op_backward(dy, cache)`. x may
    have any number of leading axes. Raises ValueError for an unknown name, TypeError for anything but a name or a pair
    of functions.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        return ACTIVATIONS[activation]
    if not (isinstance(activation, tuple | list) and len(activation) == 2 and all(map(callable, activation))):
        raise TypeError(f"activation: expected a name or a pair (op, op_backward), got {activation!r}")
    op, op_backward = activation
    return op, op_backward

"""Activations: ReLU, GELU, SiLU and tanh, elementwise; and how a layer's activation is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..backend import Array, array_module, cast, erf, widen
from ..checks import expect_floating, expect_like
from ..dispatch import backward, operation


@operation
def relu(x: Array) -> tuple[Array, Array]:
    """y = max(x, 0), elementwise.

    x: any shape. Returns y of that shape, and as the cache the boolean array x > 0.

    Forward, for each element i:

        y_i = 0 where x_i ≤ 0, x_i elsewhere

    Backward. Each output depends only on the input at the same place, so the sum in the chain rule (see `linear`) has
    one term. At the kink x_i = 0 we take the left derivative, 0:

        positive_i = [x_i > 0]        ∂y_i/∂x_i = positive_i
        dx_i = dy_i ∂y_i/∂x_i = dy_i positive_i

    In NumPy:

        dx = dy * cast(positive, dy.dtype)

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
    dx = dy * cast(positive, dy.dtype)
    return dx


class GeluCache(NamedTuple):
    x: Array
    approximate: str


CUBIC = 0.044715  # the coefficient that Hendrycks and Gimpel fitted; it has no closed form


@operation
def gelu(x: Array, approximate: str = "none") -> tuple[Array, GeluCache]:
    """y = x Φ(x), elementwise, with Φ the cumulative distribution function of the standard normal distribution.

    x: any shape. approximate: "none" for Φ itself; "tanh", as in GPT-2, for an approximation of it. Returns y of the
    shape of x, and the cache. Raises ValueError for another `approximate`.

    Forward, for each element i:

        u_i = √(2/π) (x_i + 0.044715 x_i³)
        Φ_i = ½ (1 + erf(x_i/√2)) where approximate = none, ½ (1 + tanh(u_i)) elsewhere
        y_i = x_i Φ_i

    Backward. The derivative φ of Φ is the normal density, since erf'(z) = 2/√π exp(−z²). The derivative of the
    approximation follows from tanh' = 1 − tanh² (see `tanh`) and the chain rule:

        w_i := ∂u_i/∂x_i = √(2/π) (1 + 3·0.044715 x_i²)
        φ_i := ∂Φ_i/∂x_i
        = exp(−x_i²/2)/√(2π) where approximate = none, ½ (1 − tanh(u_i)²) w_i elsewhere

    By the product rule,

        ∂y_i/∂x_i = Φ_i + x_i φ_i
        dx_i = dy_i ∂y_i/∂x_i = dy_i (Φ_i + x_i φ_i)

    In NumPy, with cdf for Φ and density for φ:

        dx = dy * (cdf + x * density)

    The cache keeps only x: Φ is computed again, which halves the memory.
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
    return cast(wide * cdf, x.dtype), GeluCache(x, approximate)


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
    return cast(dx, dy.dtype)


@operation
def tanh(x: Array) -> tuple[Array, Array]:
    """y = tanh x = (eˣ − e⁻ˣ)/(eˣ + e⁻ˣ), elementwise.

    x: any shape. Returns y of that shape, and y again as the cache.

    Forward, for each element i:

        s_i = exp(x_i) − exp(−x_i)        c_i = exp(x_i) + exp(−x_i)        y_i = s_i/c_i = tanh(x_i)

    Backward. s and c are the derivatives of each other, and the quotient rule gives

        ∂s_i/∂x_i = c_i        ∂c_i/∂x_i = s_i
        ∂y_i/∂x_i = (c_i c_i − s_i s_i)/c_i² = 1 − y_i²
        dx_i = dy_i ∂y_i/∂x_i = dy_i (1 − y_i²)

    In NumPy:

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
    dtype, y = dy.dtype, widen(y)
    dx = dy * (1 - y * y)
    return cast(dx, dtype)


@operation
def sigmoid(x: Array) -> Array:
    """1/(1 + exp(−x)), elementwise; for x < 0 as e/(1 + e) with e = exp(x), so that nothing overflows."""
    xp = array_module(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1) / (1 + e)


@operation
def silu(x: Array) -> tuple[Array, Array]:
    """y = x σ(x) with σ(x) = 1/(1 + exp(−x)), elementwise; also called swish.

    x: any shape. Returns y of that shape, and x as the cache.

    Forward, for each element i:

        s_i = 1/(1 + exp(−x_i))        y_i = x_i s_i = x_i/(1 + exp(−x_i))

    Backward. The derivative of the sigmoid is a function of its value; the rest is the product rule:

        ∂s_i/∂x_i = exp(−x_i)/(1 + exp(−x_i))² = s_i (1 − s_i)
        ∂y_i/∂x_i = s_i + x_i s_i (1 − s_i) = s_i (1 + x_i (1 − s_i))
        dx_i = dy_i ∂y_i/∂x_i = dy_i s_i (1 + x_i (1 − s_i))

    In NumPy:

        dx = dy * (s * (1 + x * (1 - s)))

    The cache keeps only x: σ is computed again, which halves the memory.
    Source: Elfwing, Uchibe, Doya, "Sigmoid-weighted linear units for neural network function approximation in
    reinforcement learning", 2018, equations 1 and 2.
    """
    expect_floating(x=x)
    wide = widen(x)
    return cast(wide * sigmoid(wide), x.dtype), x


@backward
def silu_backward(dy: Array, x: Array) -> Array:
    """dx: see `silu`."""
    expect_like("dy", dy, x.shape)
    x = widen(x)
    s = sigmoid(x)
    dx = dy * (s * (1 + x * (1 - s)))
    return cast(dx, dy.dtype)


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

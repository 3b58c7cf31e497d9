"""An affine map followed by an activation."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array
from ..dispatch import backward, operation
from .activations import gelu, gelu_backward, relu, relu_backward
from .checks import expect_floating
from .linear import LinearCache, linear, linear_backward

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


def activate(h: Array, activation: str) -> tuple[Array, Any]:
    """f(h) and its cache, for the name of an activation."""
    if activation == "relu":
        return relu(h)
    return gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_backward(dy: Array, cache: Any, activation: str) -> Array:
    return relu_backward(dy, cache) if activation == "relu" else gelu_backward(dy, cache)


def check_activation(activation: str) -> None:
    """Raise ValueError unless it is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")


class DenseCache(NamedTuple):
    linear: LinearCache
    activated: Any  # the activation's cache
    activation: str


@operation
def dense(x: Array, w: Array, b: Array, activation: str = "relu") -> tuple[Array, DenseCache]:
    """y = f(x w + b): an affine map over the last axis of x, and an activation f of every element.

    x: (..., I). w: (I, O). b: (O,). activation: "relu", "gelu" or "gelu_tanh", see `activations`. Returns y (..., O)
    and the cache. Raises ValueError for shapes that do not fit, or another activation.

    Backward. With h = x w + b, elementwise y = f(h), so that dh = dy f'(h), which is the activation's backward; and dh
    is what the affine map is given, see `linear`:

        dh = activate_backward(dy, cache.activated, cache.activation)
        dx, dw, db = linear_backward(dh, cache.linear)

    The cache keeps those of the two. They stand together because a kernel can add the bias and apply the activation
    while a piece of x w is in a processor's cache, and because for ReLU it can then forget h: h > 0 where y > 0.
    Source: the feed-forward layer of Vaswani et al., "Attention is all you need", 2017, equation 2.
    """
    check_activation(activation)
    expect_floating(b=b)  # `linear` would take None
    h, linear_cache = linear(x, w, b)
    y, activated = activate(h, activation)
    return y, DenseCache(linear_cache, activated, activation)


@backward
def dense_backward(dy: Array, cache: DenseCache) -> tuple[Array, Array, Array]:
    """(dx, dw, db): see `dense`."""
    dh = activate_backward(dy, cache.activated, cache.activation)
    dx, dw, db = linear_backward(dh, cache.linear)
    return dx, dw, db

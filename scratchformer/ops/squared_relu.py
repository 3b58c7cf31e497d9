"""Squared ReLU."""

from __future__ import annotations

from ..backend import Array, array_module
from ..checks import expect_floating, expect_like
from ..dispatch import backward, operation


@operation
def squared_relu(x: Array) -> tuple[Array, Array]:
    """y = max(x, 0)², elementwise: an activation that grows like a square, and whose slope has no jump.

    x: any shape. Returns y of that shape, and as the cache x itself.

    Forward, for each element i:

        r_i = max(x_i, 0)        y_i = r_i²

    Backward. The slope is 2 x_i above 0 and 0 below, and at x_i = 0 both agree:

        ∂y_i/∂x_i = 2 r_i        dx_i = dy_i ∂y_i/∂x_i = 2 dy_i r_i

    In NumPy:

        dx = 2 * dy * r

    The cache keeps x, which the caller has anyway; r is computed again.
    Source: So et al., "Primer: searching for efficient transformers for language modeling", 2021, section 4.
    """
    expect_floating(x=x)
    r = array_module(x).maximum(x, 0)
    return r * r, x


@backward
def squared_relu_backward(dy: Array, x: Array) -> Array:
    """dx: see `squared_relu`."""
    expect_like("dy", dy, x.shape)
    r = array_module(x).maximum(x, 0)
    dx = 2 * dy * r
    return dx

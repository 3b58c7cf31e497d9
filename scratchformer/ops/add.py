"""The sum of two arrays, as in a residual connection."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, copy
from ..checks import expect_floating, expect_like
from ..dispatch import backward, operation


class AddCache(NamedTuple):
    shape: tuple[int, ...]


def check_add(x: Array, f: Array) -> None:
    """Raise TypeError or ValueError unless both are floating-point arrays of the same shape."""
    expect_floating(x=x, f=f)
    array_module(x, f)
    if f.shape != x.shape:
        raise ValueError(f"f: expected {tuple(x.shape)}, got {tuple(f.shape)}")


@operation(given=check_add)
def add(x: Array, f: Array) -> tuple[Array, AddCache]:
    """y = x + f, elementwise.

    x, f: any shape, the same for both: nothing is broadcast. Returns y of that shape, and the cache. Raises ValueError
    if the shapes differ.

    Forward, for each element i:

        y_i = x_i + f_i

    Backward. Each term reaches its own element of y, with the factor 1:

        ∂y_i/∂x_j = δ_ij        dx_i = Σ_j dy_j ∂y_j/∂x_i = dy_i
        ∂y_i/∂f_j = δ_ij        df_i = Σ_j dy_j ∂y_j/∂f_i = dy_i

    Both gradients are dy, in arrays of their own:

        return copy(dy), copy(dy)

    The cache keeps the shape, with which dy is checked. A layer whose next step only reads the gradients can pass dy on
    instead. Source: He et al., "Deep residual learning for image recognition", 2016, equation 1.
    """
    check_add(x, f)
    return x + f, AddCache(x.shape)


@backward
def add_backward(dy: Array, cache: AddCache) -> tuple[Array, Array]:
    """(dx, df): see `add`."""
    expect_like("dy", dy, cache.shape)
    return copy(dy), copy(dy)

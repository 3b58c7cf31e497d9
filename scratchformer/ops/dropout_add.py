"""Dropout and the sum of a residual connection as one operation, so that compiled loops go over the numbers once."""

from __future__ import annotations

from ..backend import Array, copy
from ..dispatch import backward, operation
from ..rng import Bits, Key
from .add import check_add
from .dropout import DropoutCache, drawn, dropout, dropout_backward


def check_dropout_add(x: Array, p: float, key: Key, f: Array) -> dict[str, Bits]:
    """The u_i of `dropout`. Raises TypeError or ValueError unless the arguments are valid."""
    bits = drawn(x, p, key)
    check_add(x, f)
    return bits


@operation(given=check_dropout_add)
def dropout_add(x: Array, p: float, key: Key, f: Array) -> tuple[Array, DropoutCache]:
    """y = dropout(x, p, key) + f, elementwise.

    x: any shape. p: 0 ≤ p < 1. key: see `dropout`. f: of the shape of x. Returns y of that shape, and the cache. Raises
    ValueError if the shapes differ or p is not in [0, 1).

    Forward, for each element i, with h what `dropout` makes of x; u_i is a uniform integer from 0 to 65535:

        r = min(⌊65536 p + ½⌋, 65535)/65536        scale = 1/(1 − r)
        k_i = [u_i ≥ 65536 r]        h_i = k_i x_i/(1 − r) = k_i scale x_i
        y_i = h_i + f_i

    Backward. Each term of the sum gets dy, and the k_i are constants:

        ∂y_i/∂f_j = δ_ij        df_i = Σ_j dy_j ∂y_j/∂f_i = dy_i
        ∂y_i/∂x_i = k_i/(1 − r)        dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale

    In NumPy:

        return dropout_backward.reference(dy, cache), copy(dy)

    The cache keeps what that of `dropout` does. For the sources see `dropout` and `add`.
    """
    check_add(x, f)
    h, cache = dropout.reference(x, p, key)
    return h + f, cache


@backward
def dropout_add_backward(dy: Array, cache: DropoutCache) -> tuple[Array, Array]:
    """(dx, df): see `dropout_add`."""
    return dropout_backward.reference(dy, cache), copy(dy)

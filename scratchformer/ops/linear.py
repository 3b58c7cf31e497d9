"""The affine map."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module
from ..checks import expect_columns, expect_floating, expect_like, expect_shape
from ..dispatch import backward, operation
from .precision import widen


class LinearCache(NamedTuple):
    x: Array  # (..., I)
    w: Array  # (I, O)
    has_bias: bool


@operation
def linear(x: Array, w: Array, b: Array | None = None) -> tuple[Array, LinearCache]:
    """y = x w + b, over the last axis of x.

    x: (..., I), any number of leading axes, N rows in all. w: (I, O). b: (O,), or None for no bias.
    Returns y (..., O) and the cache. Raises ValueError if shapes do not fit.

    Forward, with all leading axes folded into n:

        y_no = Σ_i x_ni w_io + b_o

    Backward. The chain rule: an argument affects the loss through every output, and the effects add up,

        dx_ni = Σ_{n',o} dy_n'o ∂y_n'o/∂x_ni

    and likewise for w and b. y is linear in each argument, so each partial derivative is the other factor of the
    product, and a δ reduces its sum to one term:

        ∂y_no/∂x_n'i = δ_nn' w_io      dx_ni = Σ_o dy_no w_io        (a row of dy times every row of w)
        ∂y_no/∂w_ij = x_ni δ_oj        dw_io = Σ_n x_ni dy_no        (every row uses w: sum over the rows)
        ∂y_no/∂b_j = δ_oj              db_o = Σ_n dy_no

    The remaining sums are matrix products:

        dx = dy @ w.T
        dw = x.T @ dy
        db = widen(dy).sum(axis=0).astype(dy.dtype)

    The cache keeps x for dw and w for dx; neither needs b. Without b there is no db.
    """
    expect_floating(x=x, w=w)
    if b is not None:
        expect_floating(x=x, b=b)
    array_module(x, w, b)
    expect_shape("w", w, "I O")
    if x.shape[-1:] != w.shape[:1]:
        raise ValueError(f"x: expected (..., {w.shape[0]}), got {tuple(x.shape)}")
    expect_columns("x", x)
    expect_columns("w", w)
    if b is not None:
        expect_shape("b", b, "O", O=w.shape[1])
    y = x.reshape(-1, w.shape[0]) @ w
    if b is not None:
        y = widen(y)
        y += b
    y = y.reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype, copy=False)
    return y, LinearCache(x, w, b is not None)


@backward
def linear_backward(dy: Array, cache: LinearCache) -> tuple[Array, ...]:
    """(dx, dw, db), or (dx, dw) without bias: see `linear`."""
    w, shape = cache.w, cache.x.shape
    expect_like("dy", dy, (*shape[:-1], w.shape[1]))
    x = cache.x.reshape(-1, w.shape[0])  # (N, I)
    dy = dy.reshape(-1, w.shape[1])  # (N, O)
    dx = dy @ w.T
    dw = x.T @ dy
    dx, dw = (z.astype(dy.dtype, copy=False) for z in (dx.reshape(shape), dw))
    if not cache.has_bias:
        return dx, dw
    db = widen(dy).sum(axis=0).astype(dy.dtype)
    return dx, dw, db

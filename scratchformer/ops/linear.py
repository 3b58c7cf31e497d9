"""The affine map, alone and followed by an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_like, expect_shape
from ..dispatch import backward, operation
from .activations import Activation, activation_pair


class LinearCache(NamedTuple):
    x: Array  # (..., I)
    w: Array  # (I, O)
    has_bias: bool


@operation
def linear(x: Array, w: Array, b: Array | None = None) -> tuple[Array, LinearCache]:
    """y = x w + b, over the last axis of x.

    x: (..., I), any number of leading axes, N rows in all. w: (I, O). b: (O,), or None for no bias.
    Returns y (..., O) and the cache. Raises ValueError if shapes do not fit.

    Forward. n counts the rows of x, whose axes except the last are folded into one:

        y_no = Σ_i x_ni w_io + b_o

    Backward. Every element of x, w and b affects the loss through the outputs, and its effects add up. So the chain
    rule is a sum over all outputs. Their indices are n' and o' where n and o are those of the element:

        dx_ni = Σ_{n',o} dy_n'o ∂y_n'o/∂x_ni
        dw_io = Σ_{n,o'} dy_no' ∂y_no'/∂w_io
        db_o = Σ_{n,o'} dy_no' ∂y_no'/∂b_o

    y is linear in each argument, so each partial derivative is the other factor of the product. Its δ says which
    outputs the element is part of: x_ni only of row n, w_io and b_o only of column o. So one sum is left:

        ∂y_n'o/∂x_ni = δ_nn' w_io      dx_ni = Σ_o dy_no w_io        (a row of dy times every row of w)
        ∂y_no'/∂w_io = x_ni δ_oo'      dw_io = Σ_n x_ni dy_no        (every row uses w: sum over the rows)
        ∂y_no'/∂b_o = δ_oo'            db_o = Σ_n dy_no

    The remaining sums are matrix products, and a sum of rows. NumPy adds rows one after another, in float32 with an
    error that grows with √N. So they are added in float64:

        dx = dy @ w.T
        dw = x.T @ dy
        db = cast(xp.sum(dy, axis=0, dtype=xp.float64), dy.dtype)

    The cache keeps x for dw and w for dx; neither needs b. Without b there is no db.
    """
    expect_floating(x=x, w=w)
    if b is not None:
        expect_floating(x=x, b=b)
    xp = array_module(x, w, b)
    expect_shape("w", w, "I O")
    if x.shape[-1:] != w.shape[:1]:
        raise ValueError(f"x: expected (..., {w.shape[0]}), got {tuple(x.shape)}")
    expect_columns("x", x)
    expect_columns("w", w)
    if b is not None:
        expect_shape("b", b, "O", O=w.shape[1])
    y = xp.reshape(x, (-1, w.shape[0])) @ w
    if b is not None:
        y = widen(y)
        y += b
    y = cast(xp.reshape(y, (*x.shape[:-1], w.shape[1])), x.dtype)
    return y, LinearCache(x, w, b is not None)


@backward
def linear_backward(dy: Array, cache: LinearCache) -> tuple[Array, ...]:
    """(dx, dw, db), or (dx, dw) without bias: see `linear`."""
    xp, w, shape = array_module(dy), cache.w, cache.x.shape
    expect_like("dy", dy, (*shape[:-1], w.shape[1]))
    x = xp.reshape(cache.x, (-1, w.shape[0]))  # (N, I)
    dy = xp.reshape(dy, (-1, w.shape[1]))  # (N, O)
    dx = dy @ w.T
    dw = x.T @ dy
    dx, dw = (cast(z, dy.dtype) for z in (xp.reshape(dx, shape), dw))
    if not cache.has_bias:
        return dx, dw
    db = cast(xp.sum(dy, axis=0, dtype=xp.float64), dy.dtype)
    return dx, dw, db


class DenseCache(NamedTuple):
    linear: LinearCache
    activated: Any  # the activation's cache
    activation_backward: Callable


@operation
def dense(x: Array, w: Array, b: Array, activation: Activation = "relu") -> tuple[Array, DenseCache]:
    """y = f(x w + b): an affine map over the last axis of x, then an elementwise activation f.

    x: (..., I). w: (I, O). b: (O,). activation: "relu", "gelu", "gelu_tanh", "silu", or a pair (op, op_backward), see
    `activations.activation_pair`. Returns y (..., O) and the cache. Raises ValueError for shapes that do not fit or
    an unknown name, TypeError for an activation that is neither a name nor a pair.

    Forward, with all leading axes folded into n:

        h_no = Σ_i x_ni w_io + b_o
        y_no = max(h_no, 0) where activation = relu,
            h_no/(1 + exp(−h_no)) where activation = silu,
            ½ h_no (1 + erf(h_no/√2)) where activation = gelu,
            ½ h_no (1 + tanh(√(2/π) (h_no + 0.044715 h_no³))) elsewhere        (gelu_tanh)

    Backward. First through f, which is elementwise (derived in `relu`, `silu` and `gelu`), then through the affine map
    (derived in `linear`):

        dh_no = dy_no ∂y_no/∂h_no
        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no        db_o = Σ_n dh_no

    Both steps are calls:

        dh = cache.activation_backward(dy, cache.activated)
        dx, dw, db = linear_backward(dh, cache.linear)

    The cache keeps the caches of both. The two are one operation so that a kernel can add the bias and apply the
    activation while a piece of x w is in the processor's cache, and for ReLU need not keep h: h > 0 where y > 0.
    Source: the feed-forward layer of Vaswani et al., "Attention is all you need", 2017, equation 2.
    """
    op, op_backward = activation_pair(activation)
    expect_floating(b=b)  # `linear` would take None
    h, linear_cache = linear(x, w, b)
    y, activated = op(h)
    return y, DenseCache(linear_cache, activated, op_backward)


@backward
def dense_backward(dy: Array, cache: DenseCache) -> tuple[Array, Array, Array]:
    """(dx, dw, db): see `dense`."""
    dh = cache.activation_backward(dy, cache.activated)
    dx, dw, db = linear_backward(dh, cache.linear)
    return dx, dw, db

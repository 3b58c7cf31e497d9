"""An affine map followed by an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Array
from ..checks import expect_floating
from ..dispatch import backward, operation
from .activations import Activation, activation_pair
from .linear import LinearCache, linear, linear_backward


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

"""The gated activation of Llama's feed-forward layer."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_floating, expect_like
from ..dispatch import backward, operation
from .activations import sigmoid


class SwigluCache(NamedTuple):
    gate: Array
    up: Array  # of the shape of gate


def check_swiglu(gate: Array, up: Array) -> None:
    """Raise TypeError or ValueError unless both are floating-point arrays of the same shape."""
    expect_floating(gate=gate)
    expect_like("up", up, gate.shape)
    array_module(gate, up)


@operation(given=check_swiglu)
def swiglu(gate: Array, up: Array) -> tuple[Array, SwigluCache]:
    """y = silu(gate) up, elementwise, with silu(g) = g σ(g) and σ(g) = 1/(1 + exp(−g)).

    gate, up: any shape, the same for both. Returns y of that shape, and the cache. Raises ValueError if the shapes
    differ.

    Forward, for each element i:

        g := gate        u := up
        s_i = 1/(1 + exp(−g_i))        y_i = g_i s_i u_i = g_i/(1 + exp(−g_i)) u_i

    Backward. y is linear in u. Its derivative with respect to g is u times that of `silu`:

        ∂s_i/∂g_i = exp(−g_i)/(1 + exp(−g_i))² = s_i (1 − s_i)
        ∂y_i/∂g_i = u_i (s_i + g_i s_i (1 − s_i)) = u_i s_i (1 + g_i (1 − s_i))        ∂y_i/∂u_i = g_i s_i
        dg_i = dy_i ∂y_i/∂g_i = dy_i u_i s_i (1 + g_i (1 − s_i))
        du_i = dy_i ∂y_i/∂u_i = dy_i g_i s_i

    In NumPy:

        dgate = dy * up * (s * (1 + gate * (1 - s)))
        dup = dy * (gate * s)

    The cache keeps gate and up; backward computes s again.
    Source: Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    check_swiglu(gate, up)
    wide = widen(gate)
    return cast(wide * sigmoid(wide) * up, gate.dtype), SwigluCache(gate, up)


@backward
def swiglu_backward(dy: Array, cache: SwigluCache) -> tuple[Array, Array]:
    """(dgate, dup): see `swiglu`."""
    expect_like("dy", dy, cache.gate.shape)
    gate, up = widen(cache.gate), widen(cache.up)
    s = sigmoid(gate)
    dgate = dy * up * (s * (1 + gate * (1 - s)))
    dup = dy * (gate * s)
    return cast(dgate, dy.dtype), cast(dup, dy.dtype)

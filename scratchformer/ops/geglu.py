"""The gated activation of Gemma's feed-forward layer."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, cast, widen
from ..checks import expect_like
from ..dispatch import backward, operation
from .activations import gelu, gelu_backward
from .swiglu import check_swiglu


class GegluCache(NamedTuple):
    gate: Array
    up: Array  # of the shape of gate


@operation(given=check_swiglu)
def geglu(gate: Array, up: Array) -> tuple[Array, GegluCache]:
    """y = gelu(gate) up, elementwise, with the approximation of GELU by tanh: see `gelu`.

    gate, up: any shape, the same for both. Returns y of that shape, and the cache. Raises ValueError if the shapes
    differ.

    Forward, for each element i:

        g := gate        u := up
        v_i = √(2/π) (g_i + 0.044715 g_i³)        Φ_i = ½ (1 + tanh(v_i))        y_i = g_i Φ_i u_i

    Backward. y is linear in u. Its derivative with respect to g is u times that of `gelu`:

        w_i := ∂v_i/∂g_i = √(2/π) (1 + 3·0.044715 g_i²)        φ_i := ∂Φ_i/∂g_i = ½ (1 − tanh(v_i)²) w_i
        ∂y_i/∂g_i = u_i (Φ_i + g_i φ_i)        ∂y_i/∂u_i = g_i Φ_i
        dg_i = dy_i ∂y_i/∂g_i = dy_i u_i (Φ_i + g_i φ_i)
        du_i = dy_i ∂y_i/∂u_i = dy_i g_i Φ_i

    So the gate gets what `gelu` passes back for dy u. In code, with a for gelu(gate):

        dgate = gelu_backward.reference(dy * up, of_gate)
        dup = dy * a

    The cache keeps gate and up; backward computes a again.
    Source: Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    check_swiglu(gate, up)
    a, _ = gelu.reference(widen(gate), "tanh")
    return cast(a * up, gate.dtype), GegluCache(gate, up)


@backward
def geglu_backward(dy: Array, cache: GegluCache) -> tuple[Array, Array]:
    """(dgate, dup): see `geglu`."""
    expect_like("dy", dy, cache.gate.shape)
    gate, up = widen(cache.gate), widen(cache.up)
    a, of_gate = gelu.reference(gate, "tanh")
    dgate = gelu_backward.reference(dy * up, of_gate)
    dup = dy * a
    return cast(dgate, dy.dtype), cast(dup, dy.dtype)

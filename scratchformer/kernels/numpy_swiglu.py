"""SwiGLU on NumPy: piece by piece, so that a piece stays in cache from its sigmoid to its gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import ops
from ..ops.checks import expect_like
from ..ops.swiglu import check_swiglu
from .numpy_arrays import one_real_dtype, row_pieces
from .numpy_dense import cdf
from .numpy_half import in_half

plain = in_half(ops.swiglu, ops.swiglu_backward)


class NumpySwigluCache(NamedTuple):
    gate: np.ndarray
    up: np.ndarray


@ops.swiglu.twin(np.ndarray)
def swiglu(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, NumpySwigluCache]:
    """As `ops.swiglu`, with one product of gate and sigmoid for both gradients.

    Forward, for each element i:

        g := gate        u := up
        s_i = 1/(1 + exp(−g_i))        f_i = g_i s_i        y_i = f_i u_i

    Backward. f, which dup needs in any case, also appears in the derivative of `silu`:

        ∂s_i/∂g_i = s_i (1 − s_i)        ∂f_i/∂g_i = s_i + g_i s_i (1 − s_i) = s_i + f_i (1 − s_i)
        dg_i = dy_i u_i ∂f_i/∂g_i = dy_i u_i (f_i (1 − s_i) + s_i)        du_i = dy_i f_i

    One piece d of dy at a time, with f in the array that becomes du:

        s = cdf(g, "silu", out=np.empty_like(g))
        np.multiply(g, s, out=du)
        np.subtract(1, s, out=dg)
        dg *= du
        dg += s
        dg *= u
        dg *= d
        du *= d

    A piece stays in the processor's cache from its sigmoid to its gradient, and apart from the results no array is
    larger than a piece. The cache keeps what the reference keeps.
    """
    if not one_real_dtype(gate, up):
        return plain(gate, up)
    check_swiglu(gate, up)
    y = np.empty(gate.size, gate.dtype)
    flat_gate, flat_up = gate.reshape(-1), up.reshape(-1)
    for part in row_pieces(y):
        cdf(flat_gate[part], "silu", out=y[part])
        y[part] *= flat_gate[part]
        y[part] *= flat_up[part]
    return y.reshape(gate.shape), NumpySwigluCache(gate, up)


@ops.swiglu_backward.twin(NumpySwigluCache)
def swiglu_backward(dy: np.ndarray, cache: NumpySwigluCache) -> tuple[np.ndarray, np.ndarray]:
    """(dgate, dup), as `ops.swiglu_backward`."""
    gate, up = cache
    expect_like("dy", dy, gate.shape)
    dgate, dup = np.empty((2, dy.size), dy.dtype)
    flat = [x.reshape(-1) for x in (dy, gate, up, dgate, dup)]
    for part in row_pieces(dgate):
        d, g, u, dg, du = (x[part] for x in flat)
        s = cdf(g, "silu", out=np.empty_like(g))
        np.multiply(g, s, out=du)  # f
        np.subtract(1, s, out=dg)
        dg *= du
        dg += s
        dg *= u
        dg *= d
        du *= d
    return dgate.reshape(dy.shape), dup.reshape(dy.shape)

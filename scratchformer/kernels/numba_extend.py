"""One new token through a block in compiled code: each weight is read once, and nothing else takes time.

`numpy_extend` has the mathematics. A product of one row and a matrix takes as long as reading the matrix, which NumPy's
BLAS does at half of the speed at which one core can read. The loops here read eight rows of the matrix at a time, in
the order in which they are stored. Weights, keys and values may be bfloat16: then half as much is read, each number is
widened to float32 in a register, and all sums are in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ..nn import (
    Block,
    FeedForward,
    LayerNorm,
    Linear,
    RMSNorm,
    RotarySelfAttention,
    SelfAttention,
    SwiGLU,
)
from ..nn.block import extend_block
from ..nn.stack import Stored
from ..ops import Pattern
from ..ops.activations import CUBIC
from .numba_code import FASTMATH, compiled, rounded, widened
from .numpy_dense import ERF_P, ERF_POLYNOMIAL
from .numpy_extend import angles_at, visible

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
NO_ANGLES = (np.zeros((1, 0), np.float32),) * 2

LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1 / math.log(2)), np.float32(0.693359375), np.float32(-2.12194440e-4)
LARGEST = np.float32(88)  # exp of more than this overflows
ONE, HALF = np.float32(1), np.float32(0.5)


plain = extend_block.twins[np.ndarray]


@extend_block.twin(np.ndarray, fast=True)
def extend(x: np.ndarray, block: Block, stored: Stored, past: int, pattern: Pattern | None = None) -> np.ndarray:
    """As the NumPy twin, which computes what is not known here: several sequences, relative positions, patterns."""
    arrays = arrays_of(block) if x.shape[:2] == (1, 1) else None
    attention = block.attention
    seen = visible(attention, stored[0], pattern, past + 1) if arrays else None
    if arrays is None or seen is None or len(seen) > 1 or not isinstance(seen[0][1], slice):
        return plain(x, block, stored, past, pattern)
    y = np.empty_like(x)
    keys, values = stored
    arrays += (x[0, 0], keys[0].swapaxes(1, 2), values[0].swapaxes(1, 2), y[0, 0])
    if not compilable(x.dtype) or any(a.dtype != x.dtype or not a.flags.c_contiguous for a in arrays):
        return plain(x, block, stored, past, pattern)
    if x.dtype != np.float32:
        arrays = tuple(array.view(np.uint16) for array in arrays)
    angles = NO_ANGLES
    if type(attention) is RotarySelfAttention:
        angles = angles_at(past, attention.head_width, attention, np.dtype(np.float32))
    norms, up = (block.norm1, block.norm2), block.feedforward.up
    options = (*(norm.eps for norm in norms), ACTIVATIONS[up.activation], block.norm == "pre")
    step(arrays, angles, options, seen[0][1].start, past)
    return y


@functools.cache
def compilable(dtype: np.dtype) -> bool:
    return dtype == np.float32 or dtype.name == "bfloat16"


def arrays_of(block: Block) -> tuple[np.ndarray, ...] | None:
    """The weights of a block as `step` takes them, or None for a block of other parts."""
    attention, feedforward, norms = block.attention, block.feedforward, (block.norm1, block.norm2)
    known = (
        type(block).branches is Block.branches
        and type(attention) in (SelfAttention, RotarySelfAttention)
        and type(feedforward) in (FeedForward, SwiGLU)
        and all(type(norm) in (LayerNorm, RMSNorm) for norm in norms)
    )
    if not known:
        return None
    up, gate = feedforward.up, feedforward.gate if type(feedforward) is SwiGLU else None
    linears = (attention.query, attention.key, attention.value, attention.unify, up, feedforward.down)
    linears += () if gate is None else (gate,)
    if any(type(a) is not Linear or (a.activation is not None and (a is not up or gate)) for a in linears):
        return None
    if not isinstance(up.activation, str | None) or up.activation not in ACTIVATIONS:
        return None
    arrays = []
    for norm in norms:
        gamma = norm.gamma.data
        arrays += [gamma, norm.beta.data if type(norm) is LayerNorm else gamma[:0]]
    for a in linears:
        w = a.w.data
        arrays += [w, w[0, :0] if a.b is None else a.b.data]
    if gate is None:
        arrays += [w[:0, :0], w[0, :0]]
    return tuple(arrays)


def wide(x: Any) -> Any:
    """x as float32."""
    raise NotImplementedError


@overload(wide, jit_options={"fastmath": FASTMATH})
def _wide(x: Any) -> Any:
    def half(x: Any) -> Any:
        return widened(x)

    def single(x: Any) -> Any:
        return np.float32(x)

    return half if isinstance(x, types.Integer) else single


def put(y: Any, i: Any, x: Any) -> Any:
    """y_i = x, rounded if y holds bfloat16."""
    raise NotImplementedError


@overload(put, jit_options={"fastmath": FASTMATH})
def _put(y: Any, i: Any, x: Any) -> Any:
    def half(y: Any, i: Any, x: Any) -> Any:
        y[i] = rounded(x)

    def single(y: Any, i: Any, x: Any) -> Any:
        y[i] = x

    return half if isinstance(y.dtype, types.Integer) else single


@compiled
def exponential(x: Any) -> Any:
    """exp(x)"""
    x = -LARGEST if x < -LARGEST else LARGEST if x > LARGEST else x
    n = np.floor(x * LOG2_E + HALF)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + HALF
    p = p * r * r + r + ONE
    return p * np.int32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def multiply(x: Any, w: Any, first: Any, y: Any) -> None:
    """y_o = Σ_i x_i w_{i,first + o} for x (I,), w (I, ...), y (O,)."""
    I, O, i = x.size, y.size, 0
    own = slice(first, first + O)
    y[:] = 0
    while i + 8 <= I:
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        w0, w1, w2, w3 = w[i, own], w[i + 1, own], w[i + 2, own], w[i + 3, own]
        w4, w5, w6, w7 = w[i + 4, own], w[i + 5, own], w[i + 6, own], w[i + 7, own]
        for o in range(O):
            near = (x0 * wide(w0[o]) + x1 * wide(w1[o])) + (x2 * wide(w2[o]) + x3 * wide(w3[o]))
            far = (x4 * wide(w4[o]) + x5 * wide(w5[o])) + (x6 * wide(w6[o]) + x7 * wide(w7[o]))
            y[o] += near + far
        i += 8
    while i < I:
        row = w[i, own]
        for o in range(O):
            y[o] += x[i] * wide(row[o])
        i += 1


@compiled
def multiply_transposed(x: Any, w: Any, first: Any, y: Any) -> None:
    """y_o = Σ_i x_i w_{o,first + i} for x (I,), w (O, ...), y (O,)."""
    I, O, o = x.size, y.size, 0
    own = slice(first, first + I)
    while o + 4 <= O:
        w0, w1, w2, w3 = w[o, own], w[o + 1, own], w[o + 2, own], w[o + 3, own]
        y0, y1, y2, y3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(I):
            y0 += x[i] * wide(w0[i])
            y1 += x[i] * wide(w1[i])
            y2 += x[i] * wide(w2[i])
            y3 += x[i] * wide(w3[i])
        y[o], y[o + 1], y[o + 2], y[o + 3] = y0, y1, y2, y3
        o += 4
    while o < O:
        total, row = np.float32(0), w[o, own]
        for i in range(I):
            total += x[i] * wide(row[i])
        y[o] = total
        o += 1


@compiled
def affine(x: Any, w: Any, b: Any, y: Any) -> None:
    multiply(x, w, 0, y)
    for o in range(b.size):
        y[o] += wide(b[o])


@compiled
def normalise(x: Any, gamma: Any, beta: Any, eps: Any, y: Any) -> None:
    """A layer norm of the row x (C,), or an RMS norm if there is no beta."""
    C, mean, square = x.size, np.float32(0), np.float32(0)
    if beta.size:
        for c in range(C):
            mean += x[c]
        mean /= np.float32(C)
    for c in range(C):
        square += (x[c] - mean) * (x[c] - mean)
    rstd = ONE / np.float32(math.sqrt(square / np.float32(C) + eps))
    for c in range(C):
        y[c] = (x[c] - mean) * rstd * wide(gamma[c])
    for c in range(beta.size):
        y[c] += wide(beta[c])


@compiled
def activate(h: Any, kind: int) -> None:
    """h = f(h), see `ACTIVATIONS`."""
    if kind == 1:
        for i in range(h.size):
            h[i] = 0 if h[i] < 0 else h[i]
    elif kind == 2:
        for i in range(h.size):
            t = ONE / (ONE + np.float32(ERF_P * math.sqrt(0.5)) * abs(h[i]))
            tail = np.float32(0)
            for coefficient in ERF_POLYNOMIAL:
                tail = (tail + np.float32(coefficient)) * t
            tail *= HALF * exponential(-HALF * h[i] * h[i])  # 1 − Φ(|h|)
            h[i] *= tail if h[i] < 0 else ONE - tail
    elif kind == 3:
        for i in range(h.size):
            u = h[i] * (ONE + np.float32(CUBIC) * h[i] * h[i])
            h[i] /= ONE + exponential(np.float32(-math.sqrt(8 / math.pi)) * u)
    elif kind == 4:
        for i in range(h.size):
            h[i] /= ONE + exponential(-h[i])


@compiled
def rotate(x: Any, cos: Any, sin: Any) -> None:
    """Rotate each head of the row x (heads D,) by the angles of a place, (D/2,) each."""
    half = cos.shape[1]
    for start in range(0, x.size if half else 0, 2 * max(half, 1)):
        for i in range(half):
            a, b = x[start + i], x[start + half + i]
            x[start + i] = a * cos[0, i] - b * sin[0, i]
            x[start + half + i] = b * cos[0, i] + a * sin[0, i]


@compiled
def attend(q: Any, keys: Any, values: Any, start: Any, stop: Any, y: Any) -> None:
    """y (H D,): attention of the queries q (H D,) to the places from `start` to `stop` of keys, values (G, D, S)."""
    (G, D, _), S = keys.shape, stop - start
    H, scale = q.size // D, np.float32(1 / math.sqrt(D))
    z = np.empty(S, np.float32)
    for h in range(H):
        g, own = h * G // H, slice(h * D, h * D + D)
        multiply(q[own], keys[g], start, z)
        top, total = -np.float32(np.inf), np.float32(0)
        for s in range(S):
            top = max(top, z[s])
        for s in range(S):
            z[s] = exponential((z[s] - top) * scale)
            total += z[s]
        multiply_transposed(z, values[g], start, y[own])
        for i in range(h * D, h * D + D):
            y[i] /= total


@compiled
def step(arrays: Any, angles: Any, options: Any, start: Any, past: Any) -> None:
    """The row y (C,) that a block gives for x (C,), at place `past`; its key and value are stored there."""
    (gamma1, beta1, gamma2, beta2, wq, bq, wk, bk, wv, bv, wu, bu, w_up, b_up, w_down, b_down, w_gate, b_gate, x,
     keys, values, y) = arrays  # fmt: skip
    eps1, eps2, kind, pre = options
    cos, sin = angles
    (G, D, _), C = keys.shape, x.size
    h, n = np.empty(C, np.float32), np.empty(C, np.float32)
    for c in range(C):
        h[c] = wide(x[c])
    n[:] = h
    if pre:
        normalise(h, gamma1, beta1, eps1, n)
    q, k, v = np.empty(wq.shape[1], np.float32), np.empty(G * D, np.float32), np.empty(G * D, np.float32)
    affine(n, wq, bq, q)
    affine(n, wk, bk, k)
    affine(n, wv, bv, v)
    rotate(q, cos, sin)
    rotate(k, cos, sin)
    for g in range(G):
        for d in range(D):
            put(keys[g, d], past, k[g * D + d])
            put(values[g, d], past, v[g * D + d])
    joined = np.empty(q.size, np.float32)
    attend(q, keys, values, start, past + 1, joined)
    affine(joined, wu, bu, n)
    for c in range(C):
        h[c] += n[c]
    n[:] = h
    if pre:
        normalise(h, gamma2, beta2, eps2, n)
    else:
        normalise(h, gamma1, beta1, eps1, n)
        h[:] = n
    wide_row = np.empty(w_up.shape[1], np.float32)
    affine(n, w_up, b_up, wide_row)
    if w_gate.size:
        gates = np.empty(wide_row.size, np.float32)
        affine(n, w_gate, b_gate, gates)
        activate(gates, 4)
        wide_row *= gates
    else:
        activate(wide_row, kind)
    affine(wide_row, w_down, b_down, n)
    for c in range(C):
        h[c] += n[c]
    if not pre:
        normalise(h, gamma2, beta2, eps2, n)
        h[:] = n
    for c in range(C):
        put(y, c, h[c])

"""One new token through a block in compiled code: each weight is read once, and nothing else takes time.

`numpy_extend` has the mathematics. A product of one row and a matrix takes as long as reading the matrix, which NumPy's
BLAS does at half of the speed at which one core can read. The loops here read eight rows of the matrix at a time, in
the order in which they are stored. Weights, keys and values may be bfloat16: then half as much is read, each number is
widened to float32 in a register, and all sums are in float32.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any
from weakref import WeakKeyDictionary

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
from .mkl import library
from .numba_code import FASTMATH, compiled, rounded, widened
from .numpy_dense import ERF_P, ERF_POLYNOMIAL
from .numpy_extend import CORES, angles_at, pool, visible

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
PART = 1 << 20  # elements of matrices that are worth a core of their own
ROWS, PLAIN = 101, 111  # of CBLAS: row-major, not transposed
PREPARED: WeakKeyDictionary[Block, tuple] = WeakKeyDictionary()  # the arrays of a block, and as compiled code takes them
NO_GATES = np.empty((1, 0), np.float32)
NO_ANGLES = (np.empty((1, 0), np.float32),) * 2
NO_ANGLES[0].flags.writeable = False  # as those of rotary positions, so that code is compiled once

LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1 / math.log(2)), np.float32(0.693359375), np.float32(-2.12194440e-4)
LARGEST = np.float32(88)  # exp of more than this overflows
ONE, HALF = np.float32(1), np.float32(0.5)


plain = extend_block.twins[np.ndarray]


@extend_block.twin(np.ndarray, fast=True)
def extend(x: np.ndarray, block: Block, stored: Stored, past: int, pattern: Pattern | None = None) -> np.ndarray:
    """As the NumPy twin, which computes what is not known here: several new tokens, relative positions, patterns."""
    weights = weights_of(block) if x.shape[1] == 1 else None
    seen = visible(block.attention, stored[0], pattern, past + 1) if weights else None
    if weights is None or seen is None or len(seen) > 1 or not isinstance(seen[0][1], slice):
        return plain(x, block, stored, past, pattern)
    rows, keys, values = (np.ascontiguousarray(x[:, 0]), *(array.swapaxes(2, 3) for array in stored))
    if not x.dtype == keys.dtype == values.dtype == block.norm1.gamma.data.dtype or not keys.flags.c_contiguous:
        return plain(x, block, stored, past, pattern)
    attention, angles, y = block.attention, NO_ANGLES, np.empty_like(rows)
    if type(attention) is RotarySelfAttention:
        angles = angles_at(past, attention.head_width, attention, np.dtype(np.float32))
    options = (block.norm1.eps, block.norm2.eps, ACTIVATIONS[block.feedforward.up.activation], block.norm == "pre")
    places = (seen[0][1].start, past)
    bits = [a if a.dtype == np.float32 else a.view(np.uint16) for a in (rows, keys, values, y)]
    if len(x) == 1 and weights[12].size < PART:
        step(*bits, weights, options, angles, places)
    else:
        steps(*bits, weights, options, angles, places)
    return y[:, None]


def steps(
    x: np.ndarray, keys: np.ndarray, values: np.ndarray, y: np.ndarray, weights: tuple, options: tuple, angles: tuple,
    places: tuple,
) -> None:  # fmt: skip
    """As `step`, for x and y (B, C), or large matrices: products by a library, or divided among the cores."""
    (gamma1, beta1, gamma2, beta2, wq, bq, wk, bk, wv, bv, wu, bu, w_up, b_up, w_down, b_down, w_gate, b_gate) = weights
    eps1, eps2, kind, pre = options
    norm1, norm2 = (gamma1, beta1, eps1), (gamma2, beta2, eps2)
    (B, C), HD = x.shape, wq.shape[1]
    h, n, joined = (np.empty((B, width), np.float32) for width in (C, C, HD))
    first_norm(x, pre, norm1, h, n)
    q, k, v = products(n, wq, wk, wv)
    attend(q, k, v, (bq, bk, bv), angles, keys, values, places, joined)
    (f,) = products(joined, wu)
    second_norm(h, f, bu, pre, norm1, norm2, n)
    u, g = products(n, w_up, w_gate) if w_gate.size else (*products(n, w_up), NO_GATES)
    gate(u, b_up, g, b_gate, kind)
    (f,) = products(u, w_down)
    last_norm(h, f, b_down, pre, norm2, y)


def products(x: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
    """x w for x (B, I) and each w (I, O), all sums in float32. One row is divided among the cores if that pays."""
    found = [np.empty((len(x), w.shape[1]), np.float32) for w in weights]
    pairs = list(zip(weights, found, strict=True))
    if len(x) > 1:
        rows_times(x, pairs)
        return found
    parts = max(1, min(CORES, sum(w.size for w in weights) // PART))

    def work(part: int) -> None:
        for w, y in pairs:
            columns(x[0], w, part, parts, y[0])

    waiting = [pool().submit(work, part) for part in range(1, parts)]
    work(0)
    for other in waiting:
        other.result()
    return found


def rows_times(x: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """y = x w for x (B, I) and each pair of w (I, O) and y (B, O), by a library for matrix products."""
    (B, I), mkl = x.shape, library()
    half = np.empty(x.shape, np.uint16)
    if pairs[0][0].dtype != np.float32 and mkl is not None:
        copy(x.reshape(-1), half.reshape(-1))
    for w, y in pairs:
        O = w.shape[1]
        if w.dtype == np.float32:
            np.matmul(x, w, out=y)
        elif mkl is None:
            multiply_rows(x, w, y)
        else:
            mkl.cblas_gemm_bf16bf16f32(
                ROWS, PLAIN, PLAIN, B, O, I, 1.0, half.ctypes.data, I, w.ctypes.data, O, 0.0, y.ctypes.data, O
            )


@functools.cache
def nothing(dtype: np.dtype, axes: int = 1) -> np.ndarray:
    """In place of a layer's missing array."""
    return np.empty((0,) * axes, dtype)


def weights_of(block: Block) -> tuple[np.ndarray, ...] | None:
    """The arrays of `arrays_of` for compiled code; None for a block of other parts, or of another type."""
    arrays = arrays_of(block)
    if arrays is None:
        return None
    known, found = PREPARED.get(block, ((), None))
    if len(known) != len(arrays) or not all(map(operator.is_, known, arrays)):
        dtype = arrays[0].dtype
        if all(a.dtype == dtype and a.flags.c_contiguous for a in arrays):
            found = arrays if dtype == np.float32 else None
            if dtype.name == "bfloat16":
                found = tuple(a.view(np.uint16) for a in arrays)
        PREPARED[block] = arrays, found
    return found


def arrays_of(block: Block) -> tuple[np.ndarray, ...] | None:
    """The weights of a block as `step` takes them, or None for a block of other parts."""
    attention, feedforward, norms = block.attention, block.feedforward, (block.norm1, block.norm2)
    if not (
        type(block).branches is Block.branches
        and type(attention) in (SelfAttention, RotarySelfAttention)
        and type(feedforward) in (FeedForward, SwiGLU)
        and type(norms[0]) in (LayerNorm, RMSNorm)
        and type(norms[1]) in (LayerNorm, RMSNorm)
    ):
        return None
    up, gated = feedforward.up, type(feedforward) is SwiGLU
    if not isinstance(up.activation, str | None) or up.activation not in ACTIVATIONS or (gated and up.activation):
        return None
    none = nothing(norms[0].gamma.data.dtype)
    arrays = []
    for norm in norms:
        arrays += [norm.gamma.data, norm.beta.data if type(norm) is LayerNorm else none]
    for layer in (attention.query, attention.key, attention.value, attention.unify, up, feedforward.down):
        if type(layer) is not Linear or (layer.activation is not None and layer is not up):
            return None
        arrays += [layer.w.data, none if layer.b is None else layer.b.data]
    if gated:
        gate = feedforward.gate
        if type(gate) is not Linear or gate.activation is not None:
            return None
        arrays += [gate.w.data, none if gate.b is None else gate.b.data]
    else:
        arrays += [nothing(none.dtype, 2), none]
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
    for o in range(O):
        y[o] = 0
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
def columns(x: Any, w: Any, part: Any, parts: Any, y: Any) -> None:
    """One of several parts of the columns of y = x w."""
    first, stop = y.size * part // parts, y.size * (part + 1) // parts
    multiply(x, w, first, y[first:stop])


@compiled
def multiply_rows(x: Any, w: Any, y: Any) -> None:
    """y = x w for x (B, I)."""
    for b in range(x.shape[0]):
        multiply(x[b], w, 0, y[b])


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
def copy(x: Any, y: Any) -> None:
    """y = x, widened or rounded as y demands."""
    for i in range(x.size):
        put(y, i, wide(x[i]))


@compiled
def activate(h: Any, kind: int) -> None:
    """h = f(h), see `ACTIVATIONS`."""
    if kind == 1:
        for i in range(h.size):
            h[i] = np.float32(0) if h[i] < 0 else h[i]
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
    """Rotate each head of the row x (heads D,) by the angles of its place, (1, D/2)."""
    half = cos.shape[1]
    for start in range(0, x.size if half else 0, 2 * max(half, 1)):
        left, right = x[start : start + half], x[start + half : start + 2 * half]
        for i in range(half):
            a, b = left[i], right[i]
            left[i] = a * cos[0, i] - b * sin[0, i]
            right[i] = b * cos[0, i] + a * sin[0, i]


@compiled
def shift(x: Any, b: Any) -> None:
    for i in range(b.size):
        x[i] += wide(b[i])


@compiled
def attend(q: Any, k: Any, v: Any, biases: Any, angles: Any, keys: Any, values: Any, seen: Any, y: Any) -> None:
    """y (B, H D): self-attention of the last token that is seen, whose q (B, H D), k and v (B, G D) have no biases yet.

    keys, values: (B, G, D, S), where k and v are stored. seen: the first and the last place.
    """
    (B, G, D, _), (bq, bk, bv), (cos, sin) = keys.shape, biases, angles
    (start, past), H, scale = seen, q.shape[1] // D, np.float32(1 / math.sqrt(D))
    places = past + 1 - start
    z = np.empty(places, np.float32)
    for b in range(B):
        shift(q[b], bq)
        shift(k[b], bk)
        shift(v[b], bv)
        rotate(q[b], cos, sin)
        rotate(k[b], cos, sin)
        for g in range(G):
            for d in range(D):
                put(keys[b, g, d], past, k[b, g * D + d])
                put(values[b, g, d], past, v[b, g * D + d])
        for h in range(H):
            g, own, total = h * G // H, y[b, h * D : h * D + D], np.float32(0)
            multiply(q[b, h * D : h * D + D], keys[b, g], start, z)
            top = -np.float32(np.inf)
            for s in range(places):
                top = max(top, z[s])
            for s in range(places):
                z[s] = exponential((z[s] - top) * scale)
                total += z[s]
            multiply_transposed(z, values[b, g], start, own)
            for d in range(D):
                own[d] /= total


@compiled
def first_norm(x: Any, pre: Any, norm: Any, h: Any, n: Any) -> None:
    """h = x for rows x (B, C), and n = norm(h), or h for a post-norm block."""
    gamma, beta, eps = norm
    for b in range(x.shape[0]):
        copy(x[b], h[b])
        if pre:
            normalise(h[b], gamma, beta, eps, n[b])
        else:
            copy(h[b], n[b])


@compiled
def second_norm(h: Any, f: Any, bias: Any, pre: Any, norm1: Any, norm2: Any, n: Any) -> None:
    """h += f + bias, and n = norm2(h); in a post-norm block n and h are norm1(h + f + bias)."""
    gamma, beta, eps = norm2 if pre else norm1
    for b in range(h.shape[0]):
        shift(h[b], f[b])
        shift(h[b], bias)
        normalise(h[b], gamma, beta, eps, n[b])
        if not pre:
            copy(n[b], h[b])


@compiled
def gate(u: Any, bias: Any, g: Any, gate_bias: Any, kind: Any) -> None:
    """u = f(u + bias) for u (B, F); with gates g (B, F), u = (u + bias) silu(g + gate_bias)."""
    for b in range(u.shape[0]):
        shift(u[b], bias)
        if g.size:
            shift(g[b], gate_bias)
            activate(g[b], 4)
            for i in range(u.shape[1]):
                u[b, i] *= g[b, i]
        activate(u[b], kind)


@compiled
def last_norm(h: Any, f: Any, bias: Any, pre: Any, norm: Any, y: Any) -> None:
    """y = h + f + bias, or norm of it in a post-norm block."""
    gamma, beta, eps = norm
    for b in range(h.shape[0]):
        shift(h[b], f[b])
        shift(h[b], bias)
        if not pre:
            normalise(h[b], gamma, beta, eps, h[b])
        copy(h[b], y[b])


@compiled
def step(x: Any, keys: Any, values: Any, y: Any, weights: Any, options: Any, angles: Any, seen: Any) -> None:
    """The row y (1, C) that a block gives for x (1, C)."""
    (gamma1, beta1, gamma2, beta2, wq, bq, wk, bk, wv, bv, wu, bu, w_up, b_up, w_down, b_down, w_gate, b_gate) = weights
    eps1, eps2, kind, pre = options
    norm1, norm2 = (gamma1, beta1, eps1), (gamma2, beta2, eps2)
    h, n, f = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    q, joined = np.empty((1, wq.shape[1]), np.float32), np.empty((1, wq.shape[1]), np.float32)
    k, v = np.empty((1, wk.shape[1]), np.float32), np.empty((1, wk.shape[1]), np.float32)
    u, g = np.empty((1, w_up.shape[1]), np.float32), np.empty((1, w_gate.shape[1]), np.float32)
    first_norm(x, pre, norm1, h, n)
    for w, out in (wq, q), (wk, k), (wv, v):
        multiply(n[0], w, 0, out[0])
    attend(q, k, v, (bq, bk, bv), angles, keys, values, seen, joined)
    multiply(joined[0], wu, 0, f[0])
    second_norm(h, f, bu, pre, norm1, norm2, n)
    for w, out in (w_up, u), (w_gate, g):
        if w.size:
            multiply(n[0], w, 0, out[0])
    gate(u, b_up, g, b_gate, kind)
    multiply(u[0], w_down, 0, f[0])
    last_norm(h, f, b_down, pre, norm2, y)

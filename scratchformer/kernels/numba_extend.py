"""One new token through a block in compiled code, in which reading the weights is nearly all that takes time.

The mathematics is that of `numpy_extend`. What differs is how the numbers are read:

- Products read each weight once, in the order of memory: see `numba_multiply`.
- Keys are stored as (B, G, D, S) and values as (B, G, S, D), see `MultiHead.allocate`. Then the scores Σ_d q_d K_ds and
  the mean Σ_s p_s V_sd of a head are rows times matrices too. Division by the sum of the exponentials comes last, for D
  numbers instead of S.
- Weights, keys and values may be bfloat16. This halves what is read. Only what is stored is rounded: weights, keys,
  values, and the output of a block.
- The matrices of a large model are divided among the cores. Each core computes some heads and their part of attention's
  output, and then some units of the hidden layer and their part of the block's output. The parts are summed in the
  order of heads and units, so the result does not depend on the number of cores. At most as many cores work at
  attention as there are heads of keys, and one if a head's width is not a multiple of a vector's.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..nn import Block, FeedForward, LayerNorm, Linear, RMSNorm, RotarySelfAttention, SelfAttention, SwiGLU, TiedOutput
from ..nn.block import extend_block
from ..nn.embedding import extend_output
from ..nn.layer import Layer
from ..nn.stack import Stored
from ..ops import Pattern
from ..ops.activations import CUBIC
from .mkl_products import products as blas
from .numba_activations import normal_cdf, sigmoid
from .numba_code import as_bits, compiled, plus
from .numba_linear import affine
from .numba_math import alike, narrow, read
from .numba_multiply import copy, half, means, multiply, multiply_rows, multiply_transposed
from .numba_rows import centre, inverse_root, up
from .numba_vectors import LANES, exp2, filled, larger, largest, load, store, total, vectorised
from .numpy_extend import CORES, angles_at, pool, visible

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
PART = 1 << 20  # elements of a matrix that are worth a core of their own
UNIT = 256  # numbers of a hidden layer that are computed together, whatever the number of cores
PREPARED: WeakKeyDictionary[Layer, tuple] = WeakKeyDictionary()  # arrays of a layer, and as compiled code takes them
NO_ANGLES = (np.empty((1, 0), np.float32),) * 2
NO_ANGLES[0].flags.writeable = False  # as those of rotary positions, so that code is compiled once

ONE, CUBE, TANH = np.float32(1), np.float32(CUBIC), np.float32(math.sqrt(8 / math.pi))

plain, plain_output = extend_block.twins[np.ndarray], extend_output.twins[np.ndarray]


@extend_block.twin(np.ndarray, fast=True)
def extend(x: np.ndarray, block: Any, stored: Stored, past: int, pattern: Pattern | None = None) -> np.ndarray:
    """As the NumPy twin, which handles everything else: several new tokens, relative positions, other patterns."""
    weights = weights_of(block) if x.shape[1] == 1 else None
    seen = visible(block.attention, stored[0], pattern, past + 1) if weights else None
    if weights is None or seen is None or len(seen) > 1 or not isinstance(seen[0][1], slice):
        return plain(x, block, stored, past, pattern)
    keys, values = stored[0].swapaxes(2, 3), stored[1]
    if not (room_for(x, keys, values, past, block.attention, weights) and (len(x) == 1 or means() is not None)):
        return plain(x, block, stored, past, pattern)
    attention, angles = block.attention, NO_ANGLES
    if type(attention) is RotarySelfAttention:
        angles = angles_at(past, attention.head_width, attention, np.dtype(np.float32))
    options = (block.norm1.eps, block.norm2.eps, ACTIVATIONS[block.feedforward.up.activation], block.norm == "pre")
    places, rows = (seen[0][1].start, past), as_bits(np.ascontiguousarray(x[:, 0]))
    y = np.empty_like(rows)
    arguments = rows, as_bits(keys), as_bits(values), y, weights, options, angles, places
    if len(x) > 1:
        step(means(), *arguments)
    elif weights[12].size < PART or keys.shape[2] % LANES:  # heads of whole vectors, so that any split gives equal bits
        step(None, *arguments)
    else:
        step_on_cores(*arguments)
    return y.view(x.dtype)[:, None]


def step_on_cores(
    x: np.ndarray, keys: np.ndarray, values: np.ndarray, y: np.ndarray, weights: tuple, options: tuple, angles: tuple,
    places: tuple,
) -> None:  # fmt: skip
    """As `step` for one row x (1, C), by several cores, each with some of the heads and some of the units."""
    G, units = keys.shape[1], -(-weights[12].shape[1] // UNIT)
    attended, fed = np.empty((G, x.shape[1]), np.float32), np.empty((units, x.shape[1]), np.float32)
    on_cores(G, attention_part, x, keys, values, weights, options, angles, places, attended)
    on_cores(units, feedforward_part, x, attended, weights, options, fed)
    add_parts(x, attended, fed, weights, options, y)


def on_cores(count: int, work: Callable, *args: Any, most: float = math.inf) -> None:
    """work(first, last, *args) for ranges that together are 0 ... count, each by a core, and by at most `most`."""
    parts = int(max(1, min(CORES, most, count)))
    bounds = [count * i // parts for i in range(parts + 1)]
    waiting = [pool().submit(work, *bounds[i : i + 2], *args) for i in range(1, parts)]
    work(*bounds[:2], *args)
    for other in waiting:
        other.result()


@extend_output.twin(np.ndarray, fast=True)
def output_rows(x: np.ndarray, output: Any) -> np.ndarray:
    """As the NumPy twin. Logits of bfloat16 models are float32, since nothing but a softmax follows."""
    tied, B = type(output) is TiedOutput, len(x)
    if not tied and (type(output) is not Linear or output.activation is not None):
        return plain_output(x, output)
    w, b = output.table.data if tied else output.w.data, output.b
    if (
        x.shape[1] != 1
        or x.shape[2] != w.shape[1 if tied else 0]
        or not alike(x, w)
        or x.dtype == np.float64
        or not w.flags.c_contiguous
    ):
        return plain_output(x, output)
    rows = np.empty((B, x.shape[2]), np.float32)
    copy(as_bits(np.ascontiguousarray(x)).reshape(-1), rows.reshape(-1))
    y = product_of_rows(rows, as_bits(w), tied)
    if b is not None:
        y += b.data.astype(np.float32, copy=False)
    return y[:, None]


def product_of_rows(x: np.ndarray, w: np.ndarray, transposed: bool) -> np.ndarray:
    """x w for x (B, I) and w (I, O), or (O, I) if transposed, in float32.

    For many rows by a library. One row is multiplied as fast as w can be read; a large w is read by several cores.
    """
    B, O = len(x), w.shape[0 if transposed else 1]
    y = np.empty((B, O), np.float32)
    library = blas() if B > 1 else None
    if library is not None:
        affine(library, x if w.dtype == np.float32 else half(x), w, transposed, x[0, :0], 0.0, y)
    else:
        on_cores(-(-O // LANES), product_part, x, w, transposed, y, most=w.size // PART)
    return y


def product_part(first: int, last: int, x: np.ndarray, w: np.ndarray, transposed: bool, y: np.ndarray) -> None:
    """Some columns of y = x w."""
    start, stop = first * LANES, last * LANES
    for b in range(len(x)):
        if transposed:
            multiply_transposed(x[b], w[start:stop], 0, y[b, start:stop])
        else:
            multiply(x[b], w, start, y[b, start:stop])


@functools.cache
def nothing(dtype: np.dtype, axes: int = 1) -> np.ndarray:
    """In place of a layer's missing array."""
    return np.empty((0,) * axes, dtype)


def weights_of(block: Any) -> tuple[np.ndarray, ...] | None:
    """The arrays of `arrays_of` for compiled code; None for a block of other parts, or of another type."""
    arrays = arrays_of(block)
    return None if arrays is None else prepared(block, arrays)


def prepared(layer: Any, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
    """The arrays for compiled code, kept until the layer gets others; None if they do not fit it."""
    known, found = PREPARED.get(layer, ((), None))
    if len(known) != len(arrays) or not all(map(operator.is_, known, arrays)):
        fit = alike(arrays[0]) and arrays[0].dtype != np.float64 and shapes_fit(*arrays)
        fit = fit and all(a.dtype == arrays[0].dtype and a.flags.c_contiguous for a in arrays)
        found = tuple(map(as_bits, arrays)) if fit else None
        PREPARED[layer] = arrays, found
    return found


def shapes_fit(
    gamma1: Any, beta1: Any, gamma2: Any, beta2: Any, wq: Any, bq: Any, wk: Any, bk: Any, wv: Any, bv: Any, wu: Any,
    bu: Any, w_up: Any, b_up: Any, w_down: Any, b_down: Any, w_gate: Any, b_gate: Any,
) -> bool:  # fmt: skip
    """Whether the arrays of a block have the shapes that compiled code, which checks no index, relies on."""
    (C, HD), GD, F = wq.shape, wk.shape[1], w_up.shape[1]
    matrices = (wk, C, GD), (wv, C, GD), (wu, HD, C), (w_up, C, F), (w_down, F, C)
    vectors = (beta1, C), (beta2, C), (bq, HD), (bk, GD), (bv, GD), (bu, C), (b_up, F), (b_down, C), (b_gate, F)
    return (
        gamma1.shape == gamma2.shape == (C,)
        and all(w.shape == (rows, columns) for w, rows, columns in matrices)
        and (not w_gate.size or w_gate.shape == (C, F))
        and all(not b.size or b.shape == (size,) for b, size in vectors)
    )


def room_for(x: np.ndarray, keys: np.ndarray, values: np.ndarray, past: int, attention: Any, weights: tuple) -> bool:
    """Whether x (B, 1, C), keys (B, G, D, S) and values (B, G, S, D) belong to a block with these weights, and there is
    room for one more place.
    """
    (B, G, D, S), (C, HD), GD = keys.shape, weights[4].shape, weights[6].shape[1]
    return (
        keys.dtype == values.dtype == x.dtype == attention.query.w.data.dtype
        and keys.flags.c_contiguous
        and values.flags.c_contiguous
        and values.shape == (B, G, S, D)
        and x.shape == (B, 1, C)
        and D == attention.head_width
        and GD == G * D
        and HD % GD == 0
        and 0 <= past < S
    )


def arrays_of(block: Any) -> tuple[np.ndarray, ...] | None:
    """The weights of a block as `step` takes them, or None for a block of other parts."""
    known = type(block).branches is Block.branches and type(block.attention) in (SelfAttention, RotarySelfAttention)
    return arrays_of_layers((block.norm1, block.norm2), block.attention, block.feedforward) if known else None


def arrays_of_layers(norms: Any, attention: Any, feedforward: Any) -> tuple[np.ndarray, ...] | None:
    """The same of the two norms, the attention, of a known type, and the feed-forward layer of a block."""
    if not (
        type(feedforward) in (FeedForward, SwiGLU)
        and type(norms[0]) in (LayerNorm, RMSNorm)
        and type(norms[1]) in (LayerNorm, RMSNorm)
    ):
        return None
    up, gated = feedforward.up, type(feedforward) is SwiGLU
    if type(up) is not Linear or not isinstance(up.activation, str | None) or up.activation not in ACTIVATIONS:
        return None
    if gated and up.activation:
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


@compiled
def normalise(x: Any, gamma: Any, beta: Any, eps: Any, y: Any) -> None:
    """A layer norm of the row x (C,), or an RMS norm if there is no beta."""
    first, mean, squares = np.float32(0), np.float32(0), np.float32(0)
    if beta.size:
        first, mean, squares = centre(x)
    else:
        for c in range(x.size):
            squares = plus(squares, x[c] * x[c])
    rstd = inverse_root(squares, x, first, mean, np.float32(eps))  # y may be x
    for c in range(x.size):
        y[c] = ((x[c] - first) - mean) * rstd * read(gamma[c])
    for c in range(beta.size):
        y[c] += read(beta[c])


@compiled
def activate(h: Any, kind: int) -> None:
    """h = f(h), see `ACTIVATIONS`."""
    if kind == 1:
        for i in range(h.size):
            h[i] = np.float32(0) if h[i] < 0 else h[i]
    elif kind == 2:
        for i in range(h.size):
            h[i] *= normal_cdf(h[i])
    elif kind == 3:
        for i in range(h.size):
            h[i] *= sigmoid(TANH * h[i] * (ONE + CUBE * h[i] * h[i]))  # ½ (1 + tanh u) = sigmoid(2 u)
    elif kind == 4:
        for i in range(h.size):
            h[i] *= sigmoid(h[i])


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
        x[i] += read(b[i])


@compiled
def attend(q: Any, k: Any, v: Any, biases: Any, angles: Any, keys: Any, values: Any, seen: Any, y: Any) -> None:
    """y (B, H D): self-attention of the last token that is seen, whose q (B, H D), k and v (B, G D) have no biases yet.

    keys (B, G, D, S), values (B, G, S, D): where k and v are stored. seen: the first and the last place.
    """
    (B, G, D, S), (bq, bk, bv), (cos, sin) = keys.shape, biases, angles
    (start, past), H, scale = seen, q.shape[1] // D, np.float32(1 / (math.sqrt(D) * math.log(2)))
    places = past + 1 - start
    z = np.empty(up(places, LANES), np.float32)
    width = min(z.size, S - start)  # whole vectors, if there is room; what follows the last place does not count
    for b in range(B):
        shift(q[b], bq)
        shift(k[b], bk)
        shift(v[b], bv)
        rotate(q[b], cos, sin)
        rotate(k[b], cos, sin)
        for g in range(G):
            for d in range(D):
                keys[b, g, d, past] = narrow(k[b, g * D + d], keys)
                values[b, g, past, d] = narrow(v[b, g * D + d], values)
        for h in range(H):
            g, own = h * G // H, y[b, h * D : h * D + D]
            multiply(q[b, h * D : h * D + D], keys[b, g], start, z[:width])
            sum_of_row = exponentials(z, places, scale)
            multiply(z[:places], values[b, g, start:], 0, own)
            for d in range(D):
                own[d] /= sum_of_row


@vectorised
def exponentials(z: Any, n: Any, scale: Any) -> Any:
    """z_s = 2^(scale (z_s − top)) for s < n, where top is the largest of them, and 0 after them. Returns their sum."""
    z[n:] = -np.inf
    top, terms = load(z, (0,)), filled(z, 0.0)
    for s in range(LANES, z.size, LANES):
        top = larger(top, load(z, (s,)))
    most = largest(top)
    for s in range(0, z.size, LANES):
        power = exp2((load(z, (s,)) - most) * scale)
        store(z, (s,), power)
        terms = terms + power
    return total(terms)


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
def step(
    means: Any, x: Any, keys: Any, values: Any, y: Any, weights: Any, options: Any, angles: Any, seen: Any
) -> None:  # fmt: skip
    """The rows y (B, C) that a block gives for x (B, C), with products as in `multiply_rows`."""
    gamma1, beta1, gamma2, beta2 = weights[:4]
    eps1, eps2, kind, pre = options
    norm1, norm2 = (gamma1, beta1, eps1), (gamma2, beta2, eps2)
    h, n, f = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    first_norm(x, pre, norm1, h, n)
    attention(means, n, keys, values, weights, angles, seen, f)
    second_norm(h, f, weights[11], pre, norm1, norm2, n)
    feedforward(means, n, weights, kind, f)
    last_norm(h, f, weights[15], pre, norm2, y)


@compiled
def attention(means: Any, n: Any, keys: Any, values: Any, weights: Any, angles: Any, seen: Any, y: Any) -> None:
    """The rows y (B, C) that self-attention gives for n (B, C), without its last bias."""
    wq, bq, wk, bk, wv, bv, wu = weights[4:11]
    B = n.shape[0]
    q, joined = np.empty((B, wq.shape[1]), np.float32), np.empty((B, wq.shape[1]), np.float32)
    k, v = np.empty((B, wk.shape[1]), np.float32), np.empty((B, wk.shape[1]), np.float32)
    for w, out in (wq, q), (wk, k), (wv, v):
        multiply_rows(means, n, w, out)
    attend(q, k, v, (bq, bk, bv), angles, keys, values, seen, joined)
    multiply_rows(means, joined, wu, y)


@compiled
def feedforward(means: Any, n: Any, weights: Any, kind: Any, y: Any) -> None:
    """The rows y (B, C) that the feed-forward layer gives for n (B, C), without its last bias."""
    w_up, b_up, w_down, _, w_gate, b_gate = weights[12:]
    B = n.shape[0]
    u, g = np.empty((B, w_up.shape[1]), np.float32), np.empty((B, w_gate.shape[1]), np.float32)
    for w, out in (w_up, u), (w_gate, g):
        if w.size:
            multiply_rows(means, n, w, out)
    gate(u, b_up, g, b_gate, kind)
    multiply_rows(means, u, w_down, y)


@compiled
def attention_part(
    first: Any, last: Any, x: Any, keys: Any, values: Any, weights: Any, options: Any, angles: Any, seen: Any, sums: Any
) -> None:  # fmt: skip
    """sums_g (C,): what the queries that read key head g add to attention's output, for first ≤ g < last."""
    (gamma1, beta1, _, _, wq, bq, wk, bk, wv, bv, wu, _, _, _, _, _, _, _) = weights
    eps1, _, _, pre = options
    G, D, S, HD = keys.shape[1], keys.shape[2], keys.shape[3], wq.shape[1]
    width, count = HD // G, last - first
    h, n = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    first_norm(x, pre, (gamma1, beta1, eps1), h, n)
    q, joined = np.empty((1, count * width), np.float32), np.empty((1, count * width), np.float32)
    k, v = np.empty((1, count * D), np.float32), np.empty((1, count * D), np.float32)
    multiply(n[0], wq, first * width, q[0])
    multiply(n[0], wk, first * D, k[0])
    multiply(n[0], wv, first * D, v[0])
    own = slice(first * D, last * D)
    biases = bq[first * width : last * width], bk[own], bv[own]
    own_keys = keys[0, first:last].reshape((1, count, D, S))
    own_values = values[0, first:last].reshape((1, count, S, D))
    attend(q, k, v, biases, angles, own_keys, own_values, seen, joined)
    for g in range(first, last):
        start = (g - first) * width
        multiply(joined[0, start : start + width], wu[g * width : (g + 1) * width], 0, sums[g])


@compiled
def add_attended(x: Any, attended: Any, weights: Any, options: Any, h: Any, n: Any) -> None:
    """h and n as after `second_norm`, for the sums of `attention_part`."""
    (gamma1, beta1, gamma2, beta2, _, _, _, _, _, _, _, bu, _, _, _, _, _, _) = weights
    eps1, eps2, _, pre = options
    norm1, norm2 = (gamma1, beta1, eps1), (gamma2, beta2, eps2)
    first_norm(x, pre, norm1, h, n)
    second_norm(h, total_of_rows(attended), bu, pre, norm1, norm2, n)


@compiled
def total_of_rows(x: Any) -> Any:
    """Σ_g x_gc for x (G, C), as a row (1, C)."""
    y = np.zeros((1, x.shape[1]), np.float32)
    for g in range(x.shape[0]):
        shift(y[0], x[g])
    return y


@compiled
def feedforward_part(first: Any, last: Any, x: Any, attended: Any, weights: Any, options: Any, sums: Any) -> None:
    """sums_i (C,): what unit i of the hidden layer adds to the output, for first ≤ i < last."""
    (_, _, _, _, _, _, _, _, _, _, _, _, w_up, b_up, w_down, _, w_gate, b_gate) = weights
    h, n = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    add_attended(x, attended, weights, options, h, n)
    start, stop = first * UNIT, min(last * UNIT, w_up.shape[1])
    u, g = np.empty((1, stop - start), np.float32), np.empty((1, stop - start if w_gate.size else 0), np.float32)
    multiply(n[0], w_up, start, u[0])
    if w_gate.size:
        multiply(n[0], w_gate, start, g[0])
    gate(u, b_up[start:stop], g, b_gate[start:stop], options[2])
    for i in range(first, last):
        begin, end = i * UNIT, min((i + 1) * UNIT, stop)
        multiply(u[0, begin - start : end - start], w_down[begin:end], 0, sums[i])


@compiled
def add_parts(x: Any, attended: Any, fed: Any, weights: Any, options: Any, y: Any) -> None:
    """The row y that the block gives, for the sums of `attention_part` and `feedforward_part`."""
    gamma2, beta2, b_down = weights[2], weights[3], weights[15]
    h, n = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    add_attended(x, attended, weights, options, h, n)
    last_norm(h, total_of_rows(fed), b_down, options[3], (gamma2, beta2, options[1]), y)

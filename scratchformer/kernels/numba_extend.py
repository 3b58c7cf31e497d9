"""One new token through a block or a decoder block in compiled code: reading the weights is nearly all that takes time.

The mathematics is that of `numpy_extend`. What differs is how the numbers are read:

- Products read each weight once, in the order of memory: see `numba_multiply`.
- Keys are stored as (B, G, D, S) and values as (B, G, S, D), see `MultiHead.allocate`. Then the scores Σ_d q_d K_ds and
  the mean Σ_s p_s V_sd of a head are rows times matrices too. Division by the sum of the exponentials comes last, for D
  numbers instead of S. The keys of a memory are (B, H, M, D); those of its padding are not read.
- Weights, keys and values may be bfloat16. This halves what is read. Only what is stored is rounded: weights, keys,
  values, and the output of a block.
- A branch is computed in parts, which are then summed in their order: a head of keys with the queries that read it, or
  UNIT numbers of the hidden layer. Several cores divide the parts of a large model among them, so their number changes
  no bit. At most as many work at attention as there are heads of keys, and one if a head's width is not a multiple of
  a vector's. Several sequences are one part, with products as in `multiply_rows`.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import nn
from ..backend import cores
from ..nn.block import Stored, extend_block
from ..nn.decoder_block import extend_decoder_block
from ..nn.embedding import extend_output
from ..nn.quantized import QuantizedLinear
from ..ops import Padding, Pattern, quantized
from ..ops.activations import CUBIC
from ..ops.quantized import GROUP, PANEL, Quantized
from .mkl_products import products as blas
from .numba_code import as_bits, compiled, plus
from .numba_linear import affine
from .numba_math import alike, erf, exp, narrow, read
from .numba_multiply import copy, means, multiply, multiply_rows, multiply_transposed, times, times_parts, width
from .numba_quantized import VNNI, arrays_of, multiply_quantized
from .numba_rows import centre, up
from .numba_vectors import LANES, exp2, filled, larger, largest, load, store, total, vectorised
from .numpy_extend import CROSS, angles_at, parts_of

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
CORES = cores()
PART = 1 << 20  # elements of a matrix, or bytes of a quantised one, worth a core of their own: one reads 4 MB in 0.1 ms
MANY = 64  # rows for which a library multiplies widened matrices faster than compiled code does without VNNI
UNIT = 256  # numbers of a hidden layer that are computed together
PREPARED: WeakKeyDictionary[nn.Layer, tuple] = WeakKeyDictionary()  # a block's parts, and its arrays for `step`
NO_ANGLES = (np.empty((1, 0), np.float32),) * 2
NO_ANGLES[0].flags.writeable = False  # as those of rotary positions, so that code is compiled once
ONE, HALF, ROOT_HALF = np.float32(1), np.float32(0.5), np.float32(math.sqrt(0.5))
CUBE, TANH = np.float32(CUBIC), np.float32(math.sqrt(8 / math.pi))


def fits(
    x: np.ndarray, block: Any, stored: Stored, past: int, pattern: Pattern | None = None, memory: Stored = ()
) -> bool:
    """For one new token in float32 or bfloat16, if all layers are known and have the right shapes: compiled code checks
    no index. A memory may be padded; there is no other pattern but a window.
    """
    norms, attentions = parts_of(block)
    kinds, B = tuple(map(type, attentions)), x.shape[0] if x.ndim else 0
    if x.dtype == np.float64 or not (kinds == CROSS or kinds in ((nn.SelfAttention,), (nn.RotarySelfAttention,))):
        return False
    (keys, values), layer = (stored[0].swapaxes(2, 3), stored[1]), attentions[0]
    G, D, S = layer.kv_heads, layer.head_width, keys.shape[3]
    return (
        prepared(block, norms, attentions)
        and getattr(layer, "rotary_width", 0) in (0, D)
        and alike(x, norms[0].gamma.data, keys, values, *memory)
        and x.shape == (B, 1, norms[0].gamma.data.size)
        and (keys.shape, values.shape) == ((B, G, D, S), (B, G, S, D))
        and keys.flags.c_contiguous
        and values.flags.c_contiguous
        and all(each.shape == (B, G, *memory[0].shape[2:3], D) and each.flags.c_contiguous for each in memory)
        and 0 <= past < S
        and (pattern is None or (kinds == CROSS and type(pattern) is Padding and pattern.lengths.shape == (B,)))
        and (B == 1 or means() is not None)
    )


def extend(
    x: np.ndarray, block: Any, stored: Stored, past: int, pattern: Padding | None = None, memory: Any = None
) -> np.ndarray:
    """As `nn.block.extend_block` and `nn.decoder_block.extend_decoder_block`."""
    (_, (large, *weights)), layer, angles, start = PREPARED[block], block.attention, NO_ANGLES, 0
    keys, values = as_bits(stored[0].swapaxes(2, 3)), as_bits(stored[1])
    if type(layer) is nn.RotarySelfAttention:
        if layer.rotary_width:
            angles = angles_at(past, layer.head_width, layer, np.dtype(np.float32))
        start = max(0, past + 1 - (layer.window or past + 1))
    if memory is not None:
        lengths = np.full(len(x), memory[0].shape[2]) if pattern is None else pattern.lengths
        memory = (*map(as_bits, memory), np.ascontiguousarray(lengths, np.int64))
    rows = as_bits(np.ascontiguousarray(x[:, 0]))
    y = np.empty_like(rows)
    arguments = rows, y, tuple(weights), (keys, values), memory, angles, (start, past)
    if len(x) > 1:
        step(means(), *arguments)
    elif not large or CORES == 1 or keys.shape[2] % LANES:  # with heads of whole vectors any split gives equal bits
        step(None, *arguments)
    else:
        step_on_cores(*arguments)
    return y.view(x.dtype)[:, None]


extend_block.add_twin(np.ndarray, fits, extend, fast=True)
extend_decoder_block.add_twin(np.ndarray, fits, extend, fast=True)


def prepared(block: Any, norms: tuple, attentions: tuple) -> bool:
    """Whether the layers of a block are known, and fit. Then PREPARED holds their arrays as `step` takes them."""
    forward = block.feedforward
    if type(forward) not in (nn.FeedForward, nn.SwiGLU) or not {*map(type, norms)} <= {nn.LayerNorm, nn.RMSNorm}:
        return False
    maps: list[Any] = []
    for each in attentions:
        maps += each.query, each.key, each.value, each.unify
    maps += (forward.up, forward.down) if type(forward) is nn.FeedForward else (forward.up, forward.down, forward.gate)
    if not {*map(type, maps)} <= {nn.Linear, QuantizedLinear}:
        return False
    state = [block.norm]
    for norm in norms:
        state += norm.gamma.data, norm.beta.data if type(norm) is nn.LayerNorm else None, norm.eps
    for each in maps:
        state += matrix_of(each), None if each.b is None else each.b.data, each.activation
    known, inputs = PREPARED.get(block, ((), None))
    if len(known) != len(state) or not all(map(operator.is_, known, state)):
        inputs = arranged(state, len(norms), attentions)
        PREPARED[block] = state, inputs
    return inputs is not None


def arranged(state: list, count: int, attentions: tuple) -> tuple | None:
    """What `prepared` knows of a block with so many norms: whether it is worth several cores, and the arrays as `step`
    takes them. None if it does not fit.
    """
    order, C, dtype, end = state[0], state[1].size, state[1].dtype, count + 4 * len(attentions)
    triples = [tuple(state[i : i + 3]) for i in range(1, len(state), 3)]
    (w_up, _, activation), *others = triples[end:]
    shapes: list[tuple] = [(C,)] * count
    for each in attentions:
        HD, GD = each.heads * each.head_width, each.kv_heads * each.head_width
        shapes += (C, HD), (C, GD), (C, GD), (HD, C)
    shapes += (C, w_up.shape[-1]), w_up.shape[::-1], (C, w_up.shape[-1])
    quantized = any(isinstance(w, Quantized) for w, _, _ in triples[count:])
    if (
        not isinstance(activation, str | None)
        or (quantized and any(each.head_width % GROUP for each in attentions))
        or (activation and len(others) > 1)
        or any(f is not None for _, _, f in (*triples[count:end], *others))
        or any(
            array is not None and not is_matrix(array, size, dtype)
            for (*arrays, _), shape in zip(triples, shapes, strict=False)
            for array, size in zip(arrays, (shape, shape[-1:]), strict=True)
        )
    ):
        return None
    none = as_bits(np.empty((0, 0), dtype))
    no_bias = none.reshape(-1)
    arrays = [arrays_of(w) if isinstance(w, Quantized) else as_bits(w) for w, _, _ in triples]
    bits = [(w, no_bias if b is None else as_bits(b), f) for w, (_, b, f) in zip(arrays, triples, strict=True)]
    pairs = [(a, b) for a, b, _ in bits[count:]]
    up, down, gate, *_ = *pairs[end - count :], (none, no_bias)
    attention, cross = tuple(pairs[:4]), tuple(pairs[4 : end - count]) or None
    large = (w_up.numbers if isinstance(w_up, Quantized) else w_up).size >= PART
    return large, order == "pre", tuple(bits[:count]), attention, cross, (ACTIVATIONS[activation], up, gate, down)


def matrix_of(layer: Any) -> Any:
    """The array of a Linear's weights, or the `Quantized` of a QuantizedLinear."""
    return layer.w if type(layer) is QuantizedLinear else layer.w.data


def is_matrix(w: Any, shape: tuple, dtype: np.dtype) -> bool:
    """Whether `step` can read w, and it has this shape and, unless it is quantised, this type."""
    return w.shape == shape and (isinstance(w, Quantized) or (w.dtype == dtype and w.flags.c_contiguous))


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Threads that wait for parts."""
    return ThreadPoolExecutor(CORES)


def on_cores(count: int, work: Callable, *args: Any, limit: float = math.inf) -> None:
    """work(first, last, *args) for ranges that together are 0 ... count, each by a core, and by at most `limit`."""
    parts = int(max(1, min(CORES, limit, count)))
    bounds = [count * i // parts for i in range(parts + 1)]
    waiting = [pool().submit(work, *bounds[i : i + 2], *args) for i in range(1, parts)]
    work(*bounds[:2], *args)
    for other in waiting:
        other.result()


def step_on_cores(
    x: np.ndarray, y: np.ndarray, weights: tuple, stored: tuple, memory: Any, angles: tuple, seen: tuple
) -> None:
    """As `step` for one row, with the parts of each branch divided among the cores."""
    pre, norms, attention, cross, forward = weights
    branches: list[tuple] = [(attention_part, stored[0].shape[1], attention, (stored, angles, seen))]
    if cross is not None:
        branches.append((cross_part, memory[0].shape[1], cross, (memory,)))
    branches.append((forward_part, units(forward), forward, ()))
    h = np.empty(x.shape, np.float32)
    n = np.empty_like(h)
    copy(x[0], h[0])
    for norm, (part, count, layers, others) in zip(norms, branches, strict=True):
        sums = np.empty((count, *h.shape), np.float32)
        enter(h, pre, norm, n)
        on_cores(count, part, None, n, layers, *others, sums)
        leave(h, sums, layers[-1], pre, norm)
    copy(h[0], y[0])


def fits_output(x: np.ndarray, output: Any) -> bool:
    """For one position of each sequence, in float32 or bfloat16."""
    if type(output) is QuantizedLinear:
        return x.ndim == 3 and x.shape[1] == 1 and output.activation is None and fits_quantized(x, output.w)
    tied, B = type(output) is nn.TiedOutput, x.shape[0] if x.ndim else 0
    known = tied or (type(output) is nn.Linear and output.activation is None)
    w: Any = known and (output.table if tied else output.w).data
    return (
        known
        and alike(x, w)
        and x.dtype != np.float64
        and x.shape == (B, 1, w.shape[1 if tied else 0])
        and w.flags.c_contiguous
        and (B == 1 or blas() is not None)
    )


def output_rows(x: np.ndarray, output: Any) -> np.ndarray:
    """As `nn.embedding.extend_output`. Logits of bfloat16 models are float32, since nothing but a softmax follows.

    One row is multiplied as fast as w can be read; a large w is read by several cores.
    """
    if type(output) is QuantizedLinear:
        return quantized_rows(x, output.w, None if output.b is None else output.b.data.astype(np.float32, copy=False))
    tied = type(output) is nn.TiedOutput
    w, rows = as_bits(output.table.data if tied else output.w.data), as_bits(np.ascontiguousarray(x[:, 0]))
    y = np.empty((len(x), w.shape[0 if tied else 1]), np.float32)
    if len(x) > 1:
        affine(blas(), rows, w, tied, rows[0, :0], y)
    else:
        row = np.empty(rows.size, np.float32)
        copy(rows[0], row)
        on_cores(-(-y.size // LANES), output_part, row, w, tied, y[0], limit=w.size // PART)
    if output.b is not None:
        y += output.b.data.astype(np.float32, copy=False)
    return y[:, None]


def output_part(first: int, last: int, x: np.ndarray, w: np.ndarray, tied: bool, y: np.ndarray) -> None:
    """Some columns of y = x w, or of x wᵀ."""
    start, stop = first * LANES, last * LANES
    if tied:
        multiply_transposed(x, w[start:stop], 0, y[start:stop])
    else:
        multiply(x, w, start, y[start:stop])


extend_output.add_twin(np.ndarray, fits_output, output_rows, fast=True)


def fits_quantized(x: np.ndarray, w: Any, b: Any = None) -> bool:
    """In float32 or bfloat16. Of very many rows only where an instruction multiplies integers of 8 bits."""
    return (
        type(w) is Quantized
        and alike(x)
        and x.dtype != np.float64
        and x.shape[-1:] == w.shape[:1]
        and (b is None or (type(b) is np.ndarray and b.shape == w.shape[1:] and alike(x, b)))
        and (VNNI or x.size < MANY * x.shape[-1])
    )


def quantized_linear(x: np.ndarray, w: Quantized, b: np.ndarray | None = None) -> np.ndarray:
    """As `ops.quantized.quantized_linear`."""
    return quantized_rows(x, w, b).astype(x.dtype, copy=False)


def quantized_rows(x: np.ndarray, w: Quantized, b: np.ndarray | None) -> np.ndarray:
    """x ŵ + b in float32; a large product is divided among the cores, unless replicas' threads have them already."""
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)
    y = np.empty((len(rows), w.shape[1]), np.float32)
    alone = threading.current_thread() is threading.main_thread()
    limit = len(rows) * w.numbers.size // PART if alone else 1
    on_cores(len(w.numbers), quantized_part, rows, arrays_of(w), y, limit=limit)
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], w.shape[1])


def quantized_part(first: int, last: int, x: np.ndarray, w: tuple, y: np.ndarray) -> None:
    """Some panels of columns of y = x ŵ."""
    multiply_quantized(x, w, first * PANEL, y[:, first * PANEL : last * PANEL])


quantized.quantized_linear.add_twin(np.ndarray, fits_quantized, quantized_linear, fast=True)


@compiled
def step(means: Any, x: Any, y: Any, weights: Any, stored: Any, memory: Any, angles: Any, seen: Any) -> None:
    """The rows y (B, C) that a block gives for x (B, C). means: see `multiply_rows`; None for one row.

    weights: whether the norms come first; the norms (γ, β, eps); and of each branch the pairs (w, b), with no elements
    where there is no array. stored: keys (B, G, D, S) and values (B, G, S, D). memory: of a decoder block, keys and
    values (B, H, M, D) and how much of them each sequence sees, (B,). seen: the first and the last place.
    """
    pre, norms, attention, cross, forward = weights
    h, n, G = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32), stored[0].shape[1]
    for b in range(x.shape[0]):
        copy(x[b], h[b])
    sums = np.empty((max(G, units(forward)) if means is None else 1, x.shape[0], x.shape[1]), np.float32)
    enter(h, pre, norms[0], n)
    attention_part(0, G, means, n, attention, stored, angles, seen, sums)
    leave(h, sums[:G], attention[-1], pre, norms[0])
    if memory is not None:
        enter(h, pre, norms[1], n)
        cross_part(0, G, means, n, cross, memory, sums)
        leave(h, sums[:G], cross[-1], pre, norms[1])
    enter(h, pre, norms[-1], n)
    forward_part(0, units(forward), means, n, forward, sums)
    leave(h, sums[: units(forward)], forward[-1], pre, norms[-1])
    for b in range(x.shape[0]):
        copy(h[b], y[b])


@compiled
def units(forward: Any) -> Any:
    """How many parts the hidden layer has."""
    return (width(forward[1][0]) + UNIT - 1) // UNIT


@compiled
def enter(h: Any, pre: Any, norm: Any, n: Any) -> None:
    """n = norm(h), or h for a post-norm block."""
    for b in range(h.shape[0]):
        if pre:
            normalise(h[b], norm, n[b])
        else:
            copy(h[b], n[b])


@compiled
def leave(h: Any, sums: Any, layer: Any, pre: Any, norm: Any) -> None:
    """h += Σ sums + bias, and then h = norm(h) in a post-norm block."""
    for b in range(h.shape[0]):
        for i in range(1, sums.shape[0]):
            shift(sums[0, b], sums[i, b])
        shift(h[b], sums[0, b])
        shift(h[b], layer[1])
        if not pre:
            normalise(h[b], norm, h[b])


@compiled
def normalise(x: Any, norm: Any, y: Any) -> None:
    """A layer norm of the row x (C,), or an RMS norm if there is no beta. y may be x."""
    (gamma, beta, eps), first, mean, squares = norm, np.float32(0), np.float32(0), np.float32(0)
    if beta.size:
        first, mean, squares = centre(x)
    else:
        for c in range(x.size):
            squares = plus(squares, x[c] * x[c])
    rstd = np.float32(1) / np.sqrt(squares / np.float32(x.size) + np.float32(eps))
    for c in range(x.size):
        y[c] = ((x[c] - first) - mean) * rstd * read(gamma[c])
    shift(y, beta)


@compiled
def shift(x: Any, b: Any) -> None:
    """x += b, if b has elements."""
    for i in range(b.size):
        x[i] += read(b[i])


@compiled
def project(means: Any, x: Any, layer: Any, first: Any, size: Any) -> Any:
    """x w + b for rows x (B, I): `size` columns from the first on, which are all if there are several rows."""
    (w, b), y = layer, np.empty((x.shape[0], size), np.float32)
    if means is None:
        times(x[0], w, first, y[0])
    else:
        multiply_rows(means, x, w, y)
    for row in range(x.shape[0]):
        shift(y[row], b[first : first + size])
    return y


@compiled
def add_up(means: Any, x: Any, layer: Any, first: Any, size: Any, sums: Any) -> None:
    """sums_i = x w for the rows of w from i size on, which x (1, I) begins with i = first; all in one for several x."""
    if means is None:
        times_parts(x[0], layer[0], first * size, size, sums[first:, 0])
    else:
        multiply_rows(means, x, layer[0], sums[0])


@compiled
def attention_part(
    first: Any, last: Any, means: Any, n: Any, layers: Any, stored: Any, angles: Any, seen: Any, sums: Any
) -> None:
    """sums_g (B, C): what the queries that read key head g add to self-attention's output, for first ≤ g < last."""
    (query, key, value, unify), (keys, values), (cos, sin), (start, past) = layers, stored, angles, seen
    B, G, D, S = keys.shape
    size, count, places = width(query[0]) // G, last - first, past + 1 - start
    q = project(means, n, query, first * size, count * size)
    k = project(means, n, key, first * D, count * D)
    v = project(means, n, value, first * D, count * D)
    z = np.empty(up(places, LANES), np.float32)
    room = min(z.size, S - start)  # whole vectors, if there is room; what follows the last place does not count
    for b in range(B):
        rotate(q[b], cos, sin)
        rotate(k[b], cos, sin)
        for g in range(count):
            for d in range(D):
                keys[b, first + g, d, past] = narrow(k[b, g * D + d], keys)
                values[b, first + g, past, d] = narrow(v[b, g * D + d], values)
        for h in range(q.shape[1] // D):
            head, g = q[b, h * D : h * D + D], first + h * D // size
            multiply(head, keys[b, g], start, z[:room])
            average(z, places, values[b, g, start:], head)
    add_up(means, q, unify, first, size, sums)


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
def cross_part(first: Any, last: Any, means: Any, n: Any, layers: Any, memory: Any, sums: Any) -> None:
    """sums_h (B, C): what head h adds to the output of cross-attention, for first ≤ h < last."""
    (keys, values, lengths), (query, _, _, unify) = memory, layers
    B, _, M, D = keys.shape
    q, z = project(means, n, query, first * D, (last - first) * D), np.empty(up(M, LANES), np.float32)
    for b in range(B):
        places = min(max(lengths[b], 0), M)
        for h in range(first, last):
            head = q[b, (h - first) * D : (h - first + 1) * D]
            if places:
                multiply_transposed(head, keys[b, h], 0, z[:places])
                average(z[: up(places, LANES)], places, values[b, h], head)
            else:
                head[:] = 0
    add_up(means, q, unify, first, D, sums)


@compiled
def average(z: Any, places: Any, values: Any, y: Any) -> None:
    """y = Σ_s p_s values_s with p = softmax(z/√D), for values (places, D) and y (D,)."""
    sum_of_row = exponentials(z, places, np.float32(1 / (math.sqrt(y.size) * math.log(2))))
    multiply(z[:places], values, 0, y)
    for d in range(y.size):
        y[d] /= sum_of_row


@vectorised
def exponentials(z: Any, n: Any, scale: Any) -> Any:
    """z_s = 2^(scale (z_s − top)) for s < n, where top is the largest of them, and 0 after them. Returns their sum."""
    z[n:] = -np.inf
    top, terms = load(z, (0,)), filled(z, 0.0)
    for s in range(LANES, z.size, LANES):
        top = larger(top, load(z, (s,)))
    maximum = largest(top)
    for s in range(0, z.size, LANES):
        power = exp2((load(z, (s,)) - maximum) * scale)
        store(z, (s,), power)
        terms = terms + power
    return total(terms)


@compiled
def forward_part(first: Any, last: Any, means: Any, n: Any, layers: Any, sums: Any) -> None:
    """sums_i (B, C): what unit i of the hidden layer adds to the output, for first ≤ i < last."""
    kind, up, gate, down = layers
    start, stop = first * UNIT, min(last * UNIT, width(up[0]))
    u = project(means, n, up, start, stop - start)
    if width(gate[0]):
        g = project(means, n, gate, start, stop - start)
        for b in range(g.shape[0]):
            activate(g[b], 4)
            for i in range(g.shape[1]):
                u[b, i] *= g[b, i]
    for b in range(u.shape[0]):
        activate(u[b], kind)
    add_up(means, u, down, first, UNIT, sums)


@compiled
def sigmoid(x: Any) -> Any:
    return ONE / (ONE + exp(-x))


@compiled
def activate(h: Any, kind: int) -> None:
    """h = f(h), see `ACTIVATIONS`."""
    if kind == 1:
        for i in range(h.size):
            h[i] = np.float32(0) if h[i] < 0 else h[i]
    elif kind == 2:
        for i in range(h.size):
            h[i] *= HALF * (ONE + erf(ROOT_HALF * h[i]))
    elif kind == 3:
        for i in range(h.size):
            h[i] *= sigmoid(TANH * h[i] * (ONE + CUBE * h[i] * h[i]))  # ½ (1 + tanh u) = sigmoid(2 u)
    elif kind == 4:
        for i in range(h.size):
            h[i] *= sigmoid(h[i])

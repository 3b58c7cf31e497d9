"""One new token through a decoder block in compiled code: a block with cross-attention between its two halves.

The mathematics is that of `numpy_decoder`, and the pieces are those of `numba_extend`. A decoder block is half a
block, with norm1 and the self-attention, followed by a block whose attention is the cross-attention, with norm2, norm3
and the feed-forward layer. So its weights are those of two blocks.

The keys of the memory are (B, H, M, D), so the scores Σ_d q_d K_md are a row times a transposed matrix. Only the part
of the memory that a sequence may see is read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..nn import CrossAttention, DecoderBlock, SelfAttention
from ..nn.decoder_block import extend_decoder_block
from ..nn.stack import Stored
from ..ops import Padding, Pattern
from .numba_code import as_bits, compiled
from .numba_extend import (
    ACTIVATIONS,
    NO_ANGLES,
    PART,
    UNIT,
    add_attended,
    add_parts,
    arrays_of_layers,
    attention,
    attention_part,
    exponentials,
    feedforward,
    feedforward_part,
    first_norm,
    last_norm,
    on_cores,
    prepared,
    room_for,
    second_norm,
    shift,
)
from .numba_math import alike
from .numba_multiply import means, multiply, multiply_rows, multiply_transposed
from .numba_rows import up
from .numba_vectors import LANES

plain = extend_decoder_block.twins[np.ndarray]


@extend_decoder_block.twin(np.ndarray, fast=True)
def extend(
    x: np.ndarray,
    block: Any,
    stored: Stored,
    past: int,
    memory: tuple[np.ndarray, np.ndarray],
    pattern: Pattern | None = None,
) -> np.ndarray:
    """As the NumPy twin, which handles everything else: several new tokens, and patterns that are not `Padding`."""
    weights = weights_of(block) if x.shape[1] == 1 else None
    if weights is None or not memory_fits(x, memory, block.cross, weights):
        return plain(x, block, stored, past, memory, pattern)
    lengths, (first, second) = lengths_of(pattern, memory[0]), weights
    if lengths is None or lengths.shape != (len(x),):
        return plain(x, block, stored, past, memory, pattern)
    keys, values = stored[0].swapaxes(2, 3), stored[1]
    if not (room_for(x, keys, values, past, block.attention, first) and (len(x) == 1 or means() is not None)):
        return plain(x, block, stored, past, memory, pattern)
    kind, pre = ACTIVATIONS[block.feedforward.up.activation], block.norm == "pre"
    options = (block.norm1.eps, block.norm2.eps, kind, pre), (block.norm2.eps, block.norm3.eps, kind, pre)
    rows = as_bits(np.ascontiguousarray(x[:, 0]))
    y = np.empty_like(rows)
    stored_bits, memory_bits = (as_bits(keys), as_bits(values)), (*map(as_bits, memory), lengths)
    arguments = rows, stored_bits, memory_bits, y, first, second, options, (0, past)
    if len(x) > 1:
        step(means(), *arguments)
    elif second[12].size < PART or keys.shape[2] % LANES:
        step(None, *arguments)
    else:
        step_on_cores(*arguments)
    return y.view(x.dtype)[:, None]


def step_on_cores(
    x: np.ndarray, stored: tuple, memory: tuple, y: np.ndarray, first: tuple, second: tuple, options: tuple, seen: tuple
) -> None:
    """As `step` for one row x (1, C), by several cores, each with some of the heads and some of the units."""
    (_, C), H, units = x.shape, stored[0].shape[1], -(-second[12].shape[1] // UNIT)
    attended, looked, fed = (np.empty((parts, C), np.float32) for parts in (H, H, units))
    g, n = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    on_cores(H, attention_part, x, *stored, first, options[0], NO_ANGLES, seen, attended)
    add_attended(x, attended, first, options[0], g, n)
    on_cores(H, cross_part, n, memory, second, looked)
    on_cores(units, feedforward_part, g, looked, second, options[1], fed)
    add_parts(g, looked, fed, second, options[1], y)


def weights_of(block: Any) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]] | None:
    """The weights of the two blocks that `step` takes; None for a block of other parts, or of another type."""
    known = (
        type(block).branches is DecoderBlock.branches
        and type(block.attention) is SelfAttention
        and type(block.cross) is CrossAttention
    )
    if not known:
        return None
    arrays = arrays_of_layers((block.norm1, block.norm2), block.attention, block.feedforward)
    others = arrays_of_layers((block.norm2, block.norm3), block.cross, block.feedforward)
    first = None if arrays is None else prepared(block.attention, arrays)
    second = None if others is None else prepared(block.cross, others)
    return None if first is None or second is None else (first, second)


def lengths_of(pattern: Pattern | None, keys: np.ndarray) -> np.ndarray | None:
    """How much of the memory with these keys (B, H, M, D) each sequence sees, (B,); None for other patterns."""
    if pattern is None:
        return np.full(len(keys), keys.shape[2])
    return np.ascontiguousarray(pattern.lengths, np.int64) if type(pattern) is Padding else None


def memory_fits(x: np.ndarray, memory: Any, cross: Any, weights: tuple) -> bool:
    """Whether keys and values (B, H, M, D) of a memory belong to x (B, 1, C) and to these weights."""
    (first, second), (keys, values), D = weights, memory, cross.head_width
    C, HD = second[4].shape
    return (
        alike(x, keys, values, cross.query.w.data)
        and keys.flags.c_contiguous
        and values.flags.c_contiguous
        and keys.ndim == 4
        and keys.shape == values.shape == (len(x), HD // D, keys.shape[2], D)
        and HD % D == 0
        and second[6].shape[1] == HD
        and first[4].shape[0] == C
    )


@compiled
def look(q: Any, bias: Any, keys: Any, values: Any, lengths: Any, y: Any) -> None:
    """y (B, H D): attention of the queries q (B, H D), which have no bias yet, to the memory.

    keys, values (B, H, M, D): sequence b sees the first lengths[b] of M places.
    """
    (B, H, M, D), scale = keys.shape, np.float32(1 / (math.sqrt(keys.shape[3]) * math.log(2)))
    z = np.empty(up(M, LANES), np.float32)
    for b in range(B):
        shift(q[b], bias)
        places = min(max(lengths[b], 0), M)
        scores = z[: up(places, LANES)]
        for h in range(H):
            own = y[b, h * D : h * D + D]
            own[:] = 0
            if places:
                multiply_transposed(q[b, h * D : h * D + D], keys[b, h], 0, scores[:places])
                sum_of_row = exponentials(scores, places, scale)
                multiply(scores[:places], values[b, h], 0, own)
                for d in range(D):
                    own[d] /= sum_of_row


@compiled
def step(
    means: Any, x: Any, stored: Any, memory: Any, y: Any, first: Any, second: Any, options: Any, seen: Any
) -> None:  # fmt: skip
    """The rows y (B, C) that a decoder block gives for x (B, C), with products as in `multiply_rows`."""
    (keys, values), ((eps1, eps2, kind, pre), (_, eps3, _, _)) = stored, options
    norm1, norm2, norm3 = (first[0], first[1], eps1), (first[2], first[3], eps2), (second[2], second[3], eps3)
    h, n, f = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    first_norm(x, pre, norm1, h, n)
    attention(means, n, keys, values, first, NO_ANGLES, seen, f)
    second_norm(h, f, first[11], pre, norm1, norm2, n)
    cross(means, n, memory, second, f)
    second_norm(h, f, second[11], pre, norm2, norm3, n)
    feedforward(means, n, second, kind, f)
    last_norm(h, f, second[15], pre, norm3, y)


@compiled
def cross(means: Any, n: Any, memory: Any, weights: Any, y: Any) -> None:
    """The rows y (B, C) that cross-attention gives for n (B, C), without its last bias."""
    wq, bq, wu, (keys, values, lengths) = weights[4], weights[5], weights[10], memory
    q, joined = np.empty((n.shape[0], wq.shape[1]), np.float32), np.empty((n.shape[0], wq.shape[1]), np.float32)
    multiply_rows(means, n, wq, q)
    look(q, bq, keys, values, lengths, joined)
    multiply_rows(means, joined, wu, y)


@compiled
def cross_part(first: Any, last: Any, n: Any, memory: Any, weights: Any, sums: Any) -> None:
    """sums_h (C,): what head h adds to the output of cross-attention for the row n (1, C), for first ≤ h < last."""
    wq, bq, wu, (keys, values, lengths) = weights[4], weights[5], weights[10], memory
    (_, _, M, D), count = keys.shape, last - first
    q, joined = np.empty((1, count * D), np.float32), np.empty((1, count * D), np.float32)
    multiply(n[0], wq, first * D, q[0])
    own_keys = keys[0, first:last].reshape((1, count, M, D))
    own_values = values[0, first:last].reshape((1, count, M, D))
    look(q, bq[first * D : last * D], own_keys, own_values, lengths, joined)
    for h in range(first, last):
        start = (h - first) * D
        multiply(joined[0, start : start + D], wu[h * D : (h + 1) * D], 0, sums[h])

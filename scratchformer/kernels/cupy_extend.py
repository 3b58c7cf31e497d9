"""One new token of each sequence through a model on a GPU, in few kernels: five for a block, and two for the model.

The kernels are in `multiply.cu` and `attend.cu`. What changes from token to token, which are the ids and the number of
stored positions, is read from the GPU's memory. So the step can be recorded as a CUDA graph (`generation.KeyValueCache`).

- A product with one row takes as long as reading the matrix. A kernel normalises its input by itself, and adds the bias,
  the activation, and what goes past the branch. Queries, keys and values are one product, and so are gate and up of a
  SwiGLU, whose product is formed when `down` reads it.
- One kernel rotates the query and the key, stores key and value, and attends. All sums are in float32 (float64 for
  float64), and only what is stored between kernels is rounded. Logits of half-precision models are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from .. import nn
from ..backend import Array, device_of
from ..nn.embedding import extend_by_token
from ..ops.rotary import rotary_tables
from .cupy_code import BYTES, TYPES, alike, kernel, real, vector

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
MAX_ROWS = 4  # rows of the input that a block multiplies
MAX_BATCH = 32  # sequences; for more of them the products of a library are faster
BLOCKS = 264  # two for each processor of an H200
SHARED = 40_960  # bytes of the input of an output layer, in shared memory
MAX_HEAD_WIDTH = 1024


def fits(numbers: Array, embedding: Any, stack: Any, output: Any, stored: list) -> bool:
    """Whether all layers are known, have their usual shapes, and lie on the current GPU in one type."""
    tokens, positions = embedding.embeddings[0], embedding.positions
    table = tokens.table.data if type(tokens) is nn.TokenEmbedding else None
    if (
        len(embedding.embeddings) > 1
        or type(positions) not in (nn.PositionEmbedding, type(None))
        or embedding.norm is not None
        or embedding.scale != 1
        or getattr(getattr(table, "dtype", None), "name", "") not in TYPES
        or not 2 <= numbers.size <= 1 + MAX_BATCH
        or numbers.dtype != np.int64
        or type(numbers) is not cupy.ndarray
        or not type(output) in (nn.TiedOutput, nn.Linear)
        or type(stack.norm) not in (nn.LayerNorm, nn.RMSNorm, type(None))
        or len(stored) != len(stack.blocks)
    ):
        return False
    C, B = table.shape[1], numbers.size - 1
    maps, arrays = [], [table] if positions is None else [table, positions.table.data]
    norms = [] if stack.norm is None else [stack.norm]
    if type(output) is nn.Linear:
        maps.append((output, C, table.shape[0], None))
    elif C * real(table.dtype).itemsize > SHARED or output.b is not None:
        return False
    else:
        arrays.append(output.table.data)
    for block, (keys, values, *others) in zip(stack.blocks, stored, strict=True):
        if others or not known(block, C):
            return False
        attention, forward = block.attention, block.feedforward
        G, D = attention.kv_heads, attention.head_width
        HD, GD = attention.heads * D, G * D
        maps += [(attention.query, C, HD, None), (attention.key, C, GD, None), (attention.value, C, GD, None)]
        maps.append((attention.unify, HD, C, None))
        F = forward.up.w.data.shape[-1]
        gates = [forward.gate] if type(forward) is nn.SwiGLU else []
        maps += [(forward.up, C, F, None if gates else forward.up.activation), (forward.down, F, C, None)]
        maps += [(gate, C, F, None) for gate in gates]
        norms += block.norm1, block.norm2
        arrays += keys.swapaxes(2, 3), values
        if keys.shape != values.shape or values.shape[:2] != (B, G) or values.shape[3] != D:
            return False
    for layer, d_in, d_out, activation in maps:
        if type(layer) is not nn.Linear or layer.w.data.shape != (d_in, d_out) or layer.activation != activation:
            return False
        arrays += [layer.w.data] if layer.b is None else [layer.w.data, layer.b.data]
    for norm in norms:
        arrays += [norm.gamma.data] if type(norm) is nn.RMSNorm else [norm.gamma.data, norm.beta.data]
    return alike(*arrays) and all(x.flags.c_contiguous for x in arrays)


def known(block: Any, C: int) -> bool:
    """Whether a block has nothing but layers that the kernels compute, for vectors of width C."""
    branches = (getattr(block, "first", None), getattr(block, "second", None))
    if any(type(each) is not nn.Residual or each.order != block.norm for each in branches) or isinstance(
        block, nn.DecoderBlock
    ):
        return False
    attention, forward = block.attention, block.feedforward
    return (
        type(block).extend is nn.Block.extend
        and type(attention) in (nn.SelfAttention, nn.RotarySelfAttention)
        and attention.d_model == C
        and attention.head_width <= MAX_HEAD_WIDTH
        and type(forward) in (nn.FeedForward, nn.SwiGLU)
        and type(forward.up) is nn.Linear
        and isinstance(forward.up.activation, str | None)
        and {type(block.norm1), type(block.norm2)} <= {nn.LayerNorm, nn.RMSNorm}
    )


def by_token(numbers: Array, embedding: Any, stack: Any, output: Any, stored: list) -> Array:
    """As `nn.embedding.extend_by_token`."""
    table = embedding.embeddings[0].table.data
    positions = table if embedding.positions is None else embedding.positions.table.data
    (_, C), x = table.shape, cupy.empty((numbers.size - 1, table.shape[1]), table.dtype)
    embed = kernel("attend", "embed", x.dtype.name, **widths(*stored[0]))
    given = numbers, table, positions, np.int32(positions is not table), x, np.int32(C)
    embed((-(-C // 128), len(x)), (128,), given)
    for block, (keys, values) in zip(stack.blocks, stored, strict=True):
        x = through(block, x, numbers, keys, values)
    return logits(x, output, stack.norm)


def through(block: Any, x: Array, numbers: Array, keys: Array, values: Array) -> Array:
    """As `nn.block.extend_block`, for x (B, C)."""
    attention, forward, pre = block.attention, block.feedforward, block.norm == "pre"
    projections = multiply(x, (attention.query, attention.key, attention.value), block.norm1 if pre else None)
    a = attend(projections, attention, numbers, keys, values)
    h = multiply(a, (attention.unify,), residual=x)
    h = h if pre else block.norm1(h)
    gated = type(forward) is nn.SwiGLU
    u = multiply(h, (forward.gate, forward.up) if gated else (forward.up,), block.norm2 if pre else None)
    y = multiply(u, (forward.down,), residual=h, gated=gated)
    return y if pre else block.norm2(y)


def read(x: Array, norm: Any, gated: bool = False) -> tuple[list, int]:
    """The arguments INPUT of `multiply.cu` for rows x (B, K), or (B, 2 K) if gated; and ROWS."""
    centred = type(norm) is nn.LayerNorm
    gamma = x if norm is None else norm.gamma.data
    normed = np.int32(norm is not None), np.int32(centred), real(x.dtype).type(0 if norm is None else norm.eps)
    sizes = np.int32(len(x)), np.int32(x.shape[1] // (1 + gated))
    arguments = [x, np.int32(gated), gamma, norm.beta.data if centred else gamma, *normed, *sizes]
    return arguments, min(MAX_ROWS, 1 << (len(x) - 1).bit_length())


def multiply(
    x: Array,
    maps: Sequence[Any],
    norm: Any = None,
    residual: Array | None = None,
    gated: bool = False,
    dtype: Any = None,
) -> Array:
    """What up to three `Linear`s give for the rows of x (B, K), side by side; `residual` is added to it.

    norm: of x, or None. gated: x is (B, 2 K), and silu(x_k) x_{K + k} is multiplied. dtype: of the result.
    """
    inputs, ROWS = read(x, norm, gated)
    sizes = [each.w.data.shape[1] for each in maps]
    y = cupy.empty((len(x), sum(sizes)), dtype or x.dtype)
    V = min(vector(x.dtype, BYTES, N * x.itemsize, each.w.data.data.ptr) for N, each in zip(sizes, maps, strict=True))
    LANES = next((n for n in (8, 4) if sum(sizes) >= BLOCKS * n * V), 2)
    arguments, biases = [], 0
    for i in range(3):
        layer = maps[i] if i < len(maps) else None
        w = x if layer is None else layer.w.data
        has_bias = layer is not None and layer.b is not None
        biases |= has_bias << i
        arguments += [w, layer.b.data if has_bias else w, np.int32(0 if layer is None else sizes[i])]
    activation = np.int32(ACTIVATIONS[maps[0].activation])
    arguments += [np.int32(biases), activation, x if residual is None else residual, np.int32(residual is not None), y]
    run = kernel("multiply", "multiply", x.dtype.name, V=V, ROWS=ROWS, LANES=LANES, OUT=TYPES[y.dtype.name])
    run((sum(-(-N // (LANES * V)) for N in sizes), -(-len(x) // ROWS)), (512,), (*inputs, *arguments))
    return y


def widths(keys: Array, values: Array) -> dict[str, int]:
    """The constants of `attend.cu` for stored keys and values (B, G, S, D), the keys in memory (B, G, D, S)."""
    *_, S, D = values.shape
    KEYS = min(2, vector(keys.dtype, BYTES, S * keys.itemsize, keys.data.ptr))
    return dict(V=vector(values.dtype, BYTES, D * values.itemsize, values.data.ptr), KEYS=KEYS, D=D)


def attend(x: Array, layer: Any, numbers: Array, keys: Array, values: Array) -> Array:
    """Each query attends to the stored keys and values, its own included, which are stored first: (B, H D).

    x: (B, (H + 2 G) D), queries, keys and values. With s up to the new position t, and from t − W + 1 on for a window,

        z_s = Σ_d q_d K_sd/√D        p_s = exp(z_s − m)/Σ_s' exp(z_s' − m)        y_d = Σ_s p_s V_sd
    """
    (B, G, S, D), H, rotary = values.shape, layer.heads, type(layer) is nn.RotarySelfAttention
    y, wide = cupy.empty((B, H * D), x.dtype), real(x.dtype)
    cos = sin = cupy.empty(1, wide)
    if rotary:
        cos, sin = rotary_tables(S, D, 0, layer.base, layer.scaling, wide.type, device_of(x))
    run = kernel("attend", "attend", x.dtype.name, **widths(keys, values))
    sizes = np.int32(H), np.int32(G), np.int32(S), np.int32(getattr(layer, "window", None) or 0)
    tables = cos, sin, np.int32(rotary)
    run((H, B), (512,), (numbers, x, *tables, keys.swapaxes(2, 3), values, y, *sizes, wide.type(1 / math.sqrt(D))))
    return y


def logits(x: Array, output: Any, norm: Any) -> Array:
    """The logits (B, V) of x (B, C), which `norm` normalises, in float32 for half precision."""
    if type(output) is nn.Linear:
        return multiply(x, (output,), norm, dtype=real(x.dtype))
    table, wide = output.table.data, real(x.dtype)
    inputs, rows = read(x, norm)
    (N, K), y = table.shape, cupy.empty((len(x), len(table)), wide)
    ROWS = min(rows, 1 << (SHARED // (K * wide.itemsize)).bit_length() - 1)
    V = vector(x.dtype, BYTES, K * x.itemsize, table.data.ptr)
    run = kernel("multiply", "multiply_transposed", x.dtype.name, V=V, ROWS=ROWS, LANES=2, OUT=TYPES[x.dtype.name])
    has_bias = output.b is not None
    given = table, output.b.data if has_bias else table, np.int32(N), np.int32(has_bias), y
    run((min(-(-N // 16), 2 * BLOCKS), -(-len(x) // ROWS)), (512,), (*inputs, *given))
    return y


extend_by_token.add_twin(cupy.ndarray, fits, by_token, fast=True)

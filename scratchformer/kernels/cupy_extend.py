"""One new token of each sequence through a model on a GPU, in few kernels: five for a block, and two for the model.

The kernels are in `multiply.cu` and `attend.cu`. What changes from token to token, which are the ids and the number of
stored positions, is read from the GPU's memory. So the step can be recorded as a CUDA graph: see `TokenStep`.

- A product with one row takes as long as reading the matrix. The kernel also normalises its input, and adds the bias,
  the activation, and what goes past the branch. Queries, keys and values are one product, and so are gate and up of a
  SwiGLU; `down` multiplies the two as it reads them. (In a block with the norms after the sums, these are two kernels
  more.)
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
NORMS = nn.LayerNorm, nn.RMSNorm
Shaped = tuple[Array, tuple[int, ...]]  # an array and the shape that it should have


def fits(numbers: Array, embedding: Any, stack: Any, output: Any, stored: list) -> bool:
    """Whether all layers are known, have their usual shapes, and lie on the current GPU in one type."""
    tokens, positions = embedding.embeddings[0], embedding.positions
    if not (
        type(numbers) is cupy.ndarray
        and numbers.dtype == np.int64
        and 2 <= numbers.size <= 1 + MAX_BATCH
        and len(embedding.embeddings) == 1
        and type(tokens) is nn.TokenEmbedding
        and type(positions) in (nn.PositionEmbedding, type(None))
        and embedding.norm is None
        and embedding.scale == 1
        and type(stack.norm) in (*NORMS, type(None))
        and type(output) in (nn.TiedOutput, nn.Linear)
        and len(stored) == len(stack.blocks)
        and all(map(known, stack.blocks))
    ):
        return False
    B, (V, C), length = numbers.size - 1, tokens.table.data.shape, stored[0][1].shape[2]
    shapes: list[Shaped] = [(tokens.table.data, (V, C))]
    if positions is not None:
        shapes.append((positions.table.data, (max(length, len(positions.table.data)), C)))
    if type(output) is nn.TiedOutput:
        if C * real(output.table.data.dtype).itemsize > SHARED:
            return False
        shapes += [(output.table.data, (V, C))] + [(b.data, (V,)) for b in [output.b] if b is not None]
    else:
        shapes += of_map(output, C, V)
    for block, (keys, values) in zip(stack.blocks, stored, strict=True):
        attention, forward = block.attention, block.feedforward
        G, D = attention.kv_heads, attention.head_width
        HD, GD, F = attention.heads * D, G * D, forward.up.w.data.shape[-1]
        shapes += [(keys.swapaxes(2, 3), (B, G, D, length)), (values, (B, G, length, D))]
        shapes += of_map(attention.query, C, HD) + of_map(attention.key, C, GD) + of_map(attention.value, C, GD)
        shapes += of_map(attention.unify, HD, C) + of_map(forward.up, C, F) + of_map(forward.down, F, C)
        shapes += of_map(forward.gate, C, F) if type(forward) is nn.SwiGLU else []
    for norm in (stack.norm, *(norm for block in stack.blocks for norm in (block.norm1, block.norm2))):
        shapes += [] if norm is None else [(norm.gamma.data, (C,))]
        shapes += [(norm.beta.data, (C,))] if type(norm) is nn.LayerNorm else []
    arrays = [array for array, _ in shapes]
    return (
        alike(*arrays)
        and all(array.shape == shape and array.flags.c_contiguous for array, shape in shapes)
        and numbers.device == arrays[0].device
    )


def of_map(layer: Any, d_in: int, d_out: int) -> list[Shaped]:
    """The arrays of a `Linear`, each with its shape."""
    return [(layer.w.data, (d_in, d_out))] + [(b.data, (d_out,)) for b in [layer.b] if b is not None]


def known(block: Any) -> bool:
    """Whether a block has nothing but layers that the kernels compute."""
    if not isinstance(block, nn.Block) or type(block).extend is not nn.Block.extend:
        return False
    branches = block.first, block.second
    if any(type(each) is not nn.Residual or each.order != block.norm or each.after for each in branches):
        return False
    attention, forward = block.attention, block.feedforward
    if type(attention) not in (nn.SelfAttention, nn.RotarySelfAttention) or attention.head_width > MAX_HEAD_WIDTH:
        return False
    if getattr(attention, "rotary_width", 0) not in (0, attention.head_width):
        return False
    maps = [attention.query, attention.key, attention.value, attention.unify]
    if type(forward) is nn.SwiGLU:
        maps += forward.gate, forward.up, forward.down
    elif type(forward) is nn.FeedForward and isinstance(getattr(forward.up, "activation", 0), str | None):
        maps += (forward.down,)
    else:
        return False
    return (
        all(type(each) is nn.Linear and each.activation is None for each in maps)
        and type(forward.up) is nn.Linear
        and {type(block.norm1), type(block.norm2)} <= {*NORMS}
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
    """What up to three `Linear`s give for the rows of x (B, K), side by side, with the activation of the first; plus
    `residual`.

    norm: of x, or None. gated: x is (B, 2 K), and silu(x_k) x_{K + k} is multiplied. dtype: of the result.
    """
    inputs, ROWS = read(x, norm, gated)
    sizes = [each.w.data.shape[1] for each in maps]
    y = cupy.empty((len(x), sum(sizes)), dtype or x.dtype)
    V = min(vector(x.dtype, BYTES, N * x.itemsize, each.w.data.data.ptr) for N, each in zip(sizes, maps, strict=True))
    LANES = next((n for n in (8, 4) if sum(sizes) >= BLOCKS * n * V), 2)
    arguments, biases = [], 0
    for i in range(3):
        layer: Any = maps[i] if i < len(maps) else None
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
    (B, G, S, D), H, rotary = values.shape, layer.heads, getattr(layer, "rotary_width", 0) > 0
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

"""One new token through a block, or a decoder block, on NumPy: the reference's arithmetic in fewer calls.

For a single token each weight matrix is multiplied by a vector. That takes as long as reading the matrix, some tens of
microseconds; checks, caches for backward and reshaping would take as long again. So the whole block is computed here,
on arrays (B, C), or (C,) for one sequence, and intermediate results are changed in place. With a pattern or a window,
only the keys that the token may see are read. With rotary positions, the angles come from one table for all tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import nn, ops
from ..nn.block import Stored, extend_block
from ..nn.decoder_block import extend_decoder_block
from ..ops import Pattern, activation_pair, sinusoidal_positions
from ..ops.attention import masked_softmax
from ..ops.rotary import rotary_tables, rotate
from .numpy_attention import REAL

SELF = (nn.SelfAttention,), (nn.RelativeSelfAttention,), (nn.RotarySelfAttention,)
CROSS = nn.SelfAttention, nn.CrossAttention


def parts_of(block: Any) -> tuple[tuple, tuple]:
    """The norms and the attentions of a block or a decoder block; none if its branches are not theirs."""
    branches = (block.first, block.second, *([block.third] if isinstance(block, nn.DecoderBlock) else []))
    if any(type(each) is not nn.Residual or each.order != block.norm or each.after for each in branches):
        return (), ()
    return tuple([each.norm for each in branches]), tuple([each.branch for each in branches[:-1]])


def fits(
    x: np.ndarray, block: Any, stored: Stored, past: int, pattern: Pattern | None = None, memory: Stored = ()
) -> bool:
    """For one new token, if all layers are known, and self-attention has no pattern that differs between sequences."""
    norms, attentions = parts_of(block)
    kinds, H = tuple(map(type, attentions)), getattr(block.attention, "heads", 0)
    return (
        x.shape[1:2] == (1,)
        and (kinds == CROSS or kinds in SELF)
        and {*map(type, norms)} <= {nn.LayerNorm, nn.RMSNorm}
        and getattr(block.attention, "rotary_width", 0) in (0, getattr(block.attention, "head_width", 0))
        and type(block.feedforward) in (nn.FeedForward, nn.SwiGLU)
        and all(type(a) is np.ndarray and a.dtype == x.dtype for a in (x, *stored, *memory, norms[0].gamma.data))
        and x.dtype in REAL
        and {len(x)} == {*map(len, (*stored, *memory))}
        and 0 <= past < stored[0].shape[2]
        and isinstance(pattern, Pattern | None)
        and (
            pattern is None
            or kinds == CROSS
            or (kinds[0] is not nn.RotarySelfAttention and not any(p.differs for _, p in pattern.of_heads(H)))
        )
    )


def extend(
    x: np.ndarray, block: Any, stored: Stored, past: int, pattern: Pattern | None = None, memory: Any = ()
) -> np.ndarray:
    """As `nn.block.extend_block` and `nn.decoder_block.extend_decoder_block`."""
    order, last = block.norm, block.norm3 if memory else block.norm2
    h = x[0, 0] if len(x) == 1 else x[:, 0]
    h = around(block.norm1, order, h, lambda n: attend(n, block.attention, stored, past, None if memory else pattern))
    if memory:
        h = around(block.norm2, order, h, lambda n: look(n, block.cross, memory[0], memory[1], pattern))
    return around(last, order, h, lambda n: feed_forward(n, block.feedforward)).reshape(x.shape)


extend_block.add_twin(np.ndarray, fits, extend)
extend_decoder_block.add_twin(np.ndarray, fits, extend)


def around(norm: Any, order: str, x: np.ndarray, branch: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """As `Residual.around`; what the branch returns is changed in place."""
    y = branch(x if order == "post" else normalise(x, norm))
    y += x
    return normalise(y, norm) if order == "post" else y


def normalise(x: np.ndarray, norm: Any) -> np.ndarray:
    if type(norm) is nn.RMSNorm:
        y = x / root_mean_square(x, norm.eps)[..., None]
        y *= norm.gamma.data
        return y
    y, _ = normalised(x, norm.eps)
    y *= norm.gamma.data
    y += norm.beta.data
    return y


def root_mean_square(x: np.ndarray, eps: float) -> np.ndarray:
    """√(1/C Σ_c x_c² + eps) for each row of x (..., C)."""
    return np.sqrt(np.vecdot(x, x) / x.shape[-1] + eps)


def normalised(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """x̂ (..., C) and 1/σ (..., 1) of the rows of x (..., C)."""
    C = x.shape[-1]
    ones = np.ones(C, x.dtype)
    mean = x @ ones / C
    xhat = x - mean[..., None]
    sigma = root_mean_square(xhat, eps)
    if (np.abs(mean) > sigma).any():  # then the rounding of the mean counts
        xhat -= (xhat @ ones / C)[..., None]
        sigma = root_mean_square(xhat, eps)
    rstd = 1 / sigma[..., None]
    xhat *= rstd
    return xhat, rstd


def affine(x: np.ndarray, layer: Any) -> np.ndarray:
    f = layer.activation if type(layer) is nn.Linear else layer
    if not isinstance(f, str | None):  # such as a LoRA
        return layer(x)
    y = x @ layer.w.data
    if layer.b is not None:
        y += layer.b.data
    return y if f is None else activation_pair(f)[0](y)[0]


def feed_forward(x: np.ndarray, layer: Any) -> np.ndarray:
    u = affine(x, layer.up)
    if type(layer) is nn.SwiGLU:
        g = affine(x, layer.gate)
        u *= ops.silu(g)[0]
    return affine(u, layer.down)


def attend(x: np.ndarray, layer: Any, stored: Stored, past: int, pattern: Pattern | None) -> np.ndarray:
    """Self-attention of the token at place `past` to itself and to earlier tokens.

    The K query heads that share one of the G heads of keys and values are read together, as rows of one matrix.
    """
    (keys, values), S, start, by_place = stored, past + 1, 0, None
    B, G, _, D = keys.shape
    q, k = affine(x, layer.query), affine(x, layer.key).reshape(B, G, 1, D)
    q *= 1 / math.sqrt(D)
    q = q.reshape(B, G, -1, D)  # (B, G, K, D)
    if type(layer) is nn.RotarySelfAttention:
        start = max(0, S - (layer.window or S))
        if layer.rotary_width:
            angles = angles_at(past, D, layer, q.dtype)
            q, k = rotate(q, *angles), rotate(k, *angles)
    keys[:, :, past] = k[:, :, 0]
    values[:, :, past] = affine(x, layer.value).reshape(B, G, D)
    if type(layer) is nn.RelativeSelfAttention:
        by_place = scores_by_place(q, layer, S)
        q = q + layer.content_bias.data[:, None] / math.sqrt(D)
    y = np.empty_like(q)
    for heads, columns in visible(pattern, G, start, S):
        z = q[:, heads] @ keys[:, heads, columns].swapaxes(2, 3)  # (B, heads, K, keys)
        if by_place is not None:
            z += by_place[:, heads, :, columns]
        if z.size:
            z -= np.maximum.reduce(z, axis=3, keepdims=True)
        np.exp(z, out=z)
        z /= np.add.reduce(z, axis=3, keepdims=True)
        np.matmul(z, values[:, heads, columns], out=y[:, heads])  # 0 if there are no keys
    return affine(y.reshape(*x.shape[:-1], -1), layer.unify)


def visible(pattern: Pattern | None, H: int, start: int, S: int) -> list[tuple[slice, slice | np.ndarray]]:
    """Groups of heads, each with the keys that a query at the last of S places may see."""
    if pattern is None:
        return [(slice(0, H), slice(start, S))]
    last, columns = slice(0, 1, 1), slice(0, S, 1)
    tables = [(heads, p.mask(0, last, columns, 1, S, np)) for heads, p in pattern.of_heads(H)]
    return [(heads, np.flatnonzero(np.broadcast_to(table, (1, S)))) for heads, table in tables]


def angles_at(place: int, D: int, layer: Any, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines (1, D/2) by which `ops.rotary` rotates the vectors at a place, from tables for many."""
    cos, sin = rotary_tables(1 << place.bit_length(), D, 0, layer.base, layer.scaling, dtype)
    return cos[place : place + 1], sin[place : place + 1]


def scores_by_place(q: np.ndarray, layer: Any, S: int) -> np.ndarray:
    """What relative attention adds to the scores of q (B, H, 1, D), at the last of S places: (B, H, 1, S).

    With P_ec the sinusoids of distance e, and q already divided by √D, the reference computes vectors of distances:

        a := position_bias        r_ehd := Σ_c P_ec W_chd
        y_bhts = Σ_d (q_bhtd + a_hd/√D) r_ehd with e = S − 1 − s

    They would have to be kept for every layer, or computed again for every token. With the two sums exchanged, W is
    multiplied by one query instead of S sinusoids:

        u_bhtc = Σ_d (q_bhtd + a_hd/√D) W_chd        y_bhts = Σ_c u_bhtc P_ec with e = S − 1 − s
        u = (q + layer.position_bias.data[:, None] / math.sqrt(D)) @ w
    """
    (_, H, _, D), C = q.shape, layer.d_model
    w = layer.position.w.data.reshape(C, H, D).transpose(1, 2, 0)
    u = (q + layer.position_bias.data[:, None] / math.sqrt(D)) @ w  # (B, H, 1, C)
    clocks = clock_faces(1 << (S - 1).bit_length(), C, q.dtype)
    return (u @ clocks[:S].T)[..., ::-1]  # distance 0 is the last place


@functools.lru_cache(maxsize=8)
def clock_faces(length: int, C: int, dtype: np.dtype) -> np.ndarray:
    """The sinusoids (length, C) of distances from 0 on."""
    return sinusoidal_positions(length, C, np, dtype)


def look(x: np.ndarray, layer: Any, keys: np.ndarray, values: np.ndarray, pattern: Pattern | None) -> np.ndarray:
    """The output of `layer.attend` for one query a sequence, x (B, C)."""
    B, D = len(keys), layer.head_width
    q = affine(x, layer.query)
    q *= 1 / math.sqrt(D)
    if pattern is not None:
        pattern.check(B)
    p = masked_softmax(q.reshape(B, -1, 1, D) @ keys.swapaxes(2, 3), pattern)
    return affine((p @ values).reshape(*x.shape[:-1], -1), layer.unify)

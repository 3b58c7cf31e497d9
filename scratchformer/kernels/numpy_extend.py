"""One new token through a block on NumPy: the reference's arithmetic in fewer calls, as Python takes half the time.

For a single token each weight matrix is multiplied by a vector. That takes as long as reading the matrix, some tens of
microseconds; checks, caches for backward and reshaping would take as long again. So the whole block is computed here,
on arrays (B, C), or (C,) for one sequence, and intermediate results are changed in place. Matrices too large for the
processor's caches, such as those of GPT-2, are read by several cores at once.

With a pattern or a window, only the keys that the token may see are read. With rotary positions, the angles come from
one table for all tokens.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..backend import cores
from ..nn import (
    Block,
    FeedForward,
    LayerNorm,
    Linear,
    RelativeSelfAttention,
    Residual,
    RMSNorm,
    RotarySelfAttention,
    SelfAttention,
    SwiGLU,
    TiedOutput,
)
from ..nn.block import extend_block
from ..nn.embedding import extend_output
from ..nn.stack import Stored
from ..ops import Pattern, sinusoidal_positions
from ..ops.rotary import rotary_tables, rotate
from .numpy_arrays import normalised, one_real_dtype, root_mean_square
from .numpy_dense import activate

CORES = cores()
PART = 1 << 20  # elements of a matrix that are worth a core of their own: one reads 4 MB in about 0.1 ms

Keys = slice | np.ndarray  # some of the stored ones

plain = extend_block.reference


@extend_block.twin(np.ndarray)
def extend(x: np.ndarray, block: Block, stored: Stored, past: int, pattern: Pattern | None = None) -> np.ndarray:
    """As `nn.block.extend_block`, which does the rest: layers not known here, several new tokens, and patterns that
    differ between sequences.

    The output of a causal block at the last position depends on earlier positions only through their keys and values,
    which are stored. So it is enough to compute one row. In a pre-norm block, the norm comes first:

        μ = mean_c(x_c)        σ = √(mean_c((x_c − μ)²) + eps)        x̂_c = γ1_c (x_c − μ)/σ + β1_c

    With K_hsd and V_hsd the keys and values of S = past + 1 positions, the last of which is new,

        q_hd = Σ_c x̂_c Wq_chd        K_hsd = Σ_c x̂_c Wk_chd with s = past        V_hsd = Σ_c x̂_c Wv_chd with s = past

    With relative positions, P_ec are the sinusoids of distance e, and r_ehd is its vector (see `relative_attention`):

        u := content_bias        w := position_bias        r_ehd := Σ_c P_ec Wr_chd
        a_hs = Σ_d (q_hd + u_hd) K_hsd        b_he = Σ_d (q_hd + w_hd) r_ehd
        p_hs = softmax_s((a_hs + b_he)/√D) with e = past − s

    This r would have to be kept for every layer, or computed again for every token. With the two sums of b exchanged,
    Wr is multiplied by one query instead of S sinusoids:

        b_he = Σ_c P_ec Σ_d (q_hd + w_hd) Wr_chd

    The output of attention is added to x, and that of the feed-forward layer to this sum:

        attended_c := x_c + bo_c + Σ_{h,d,s} p_hs V_hsd Wo_hdc
        μ2 = mean_c(attended_c)        σ2 = √(mean_c((attended_c − μ2)²) + eps)
        f_c = γ2_c (attended_c − μ2)/σ2 + β2_c
        y_c = attended_c + b2_c + Σ_f W2_fc max(0, b1_f + Σ_c' f_c' W1_c'f)

    Every line above is a product of a vector and a matrix, or a few operations on one row:

        rows = x[0, 0] if x.shape[0] == 1 else x[:, 0]
        attended = around(first, rows, lambda n: attend(n, first.branch, stored, past, seen))
        return around(second, attended, lambda n: ROW[type(second.branch)](n, second.branch)).reshape(x.shape)

    The work for a token grows with S only where the stored keys and values are read, and with relative positions also
    P. (There is no backward: generation differentiates nothing.)
    """
    first, second = block.branches()
    norm: Any = first.norm
    known = (
        type(first) is type(second) is Residual
        and type(first.branch) in ATTENTION
        and ROW.keys() >= {type(first.norm), type(second.norm), type(second.branch)}
    )
    seen = visible(first.branch, stored[0], pattern, past + 1) if known and x.shape[1] == 1 else None
    if seen is None or not one_real_dtype(x, *stored, norm.gamma.data):
        return plain(x, block, stored, past, pattern)
    rows = x[0, 0] if x.shape[0] == 1 else x[:, 0]
    attended = around(first, rows, lambda n: attend(n, first.branch, stored, past, seen))
    return around(second, attended, lambda n: ROW[type(second.branch)](n, second.branch)).reshape(x.shape)


def around(residual: Residual, x: np.ndarray, branch: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """As `Residual.around`; what the branch returns is changed in place."""
    norm = ROW[type(residual.norm)]
    if residual.order == "post":
        s = branch(x)
        s += x
        return norm(s, residual.norm)
    y = branch(norm(x, residual.norm))
    y += x
    return y


@extend_output.twin(np.ndarray)
def output_row(x: np.ndarray, output: Any) -> np.ndarray:
    """As `nn.embedding.extend_output`: the logits of one row, with a large matrix divided among the cores.

    With x_c the row, and w_cv a matrix or the transpose of a table,

        y_v = Σ_c x_c w_cv + b_v

    Each of I cores can sum over a part of the rows of w; the parts are then added:

        y_v = b_v + Σ_i Σ_{c, ⌊C i/I⌋ ≤ c < ⌊C (i + 1)/I⌋} x_c w_cv

    This is how a matrix with contiguous rows is divided. A transposed table has contiguous columns, so there each core
    computes the logits of a part of the vocabulary instead, and nothing is added:

        y = product(x[0, 0], w)
        y += output.b.data
        return y[None, None]

    Each core reads a part of w, and reading w is nearly all of the work. (There is no backward, as in `extend`.)
    """
    w: np.ndarray | None = None
    if type(output) is TiedOutput:
        w = output.table.data.T
    elif type(output) is Linear and output.activation is None:
        w = output.w.data
    if w is None or x.shape[:2] != (1, 1) or not one_real_dtype(x, w):
        return extend_output.reference(x, output)
    y = product(x[0, 0], w)
    if output.b is not None:
        y += output.b.data
    return y[None, None]


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x w. For one row, (I,), a large w is divided among the cores, in parts that are contiguous in memory.

    These are rows of w, whose products add up to y; or columns, if w is a transposed table, each giving a part of y.
    """
    parts = min(CORES, w.size // PART) if x.ndim == 1 else 1
    if parts < 2:
        return x @ w
    by_rows = w.flags.c_contiguous
    size = w.shape[0 if by_rows else 1]
    slices = [slice(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
    pairs = [(x[s], w[s]) if by_rows else (x, w[:, s]) for s in slices]
    waiting = [pool().submit(operator.matmul, a, b) for a, b in pairs[1:]]
    found = [np.matmul(*pairs[0]), *(f.result() for f in waiting)]
    return sum(found[1:], found[0]) if by_rows else np.concatenate(found)


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Threads that wait for a part of a product."""
    return ThreadPoolExecutor(CORES)


def affine(x: np.ndarray, layer: Linear) -> np.ndarray:
    if type(layer) is not Linear or layer.activation is not None:  # such as a LoRA
        return layer(x)
    y = product(x, layer.w.data)
    if layer.b is not None:
        y += layer.b.data
    return y


def normalise(x: np.ndarray, norm: LayerNorm) -> np.ndarray:
    xhat, _ = normalised(x, norm.eps)
    xhat *= norm.gamma.data
    xhat += norm.beta.data
    return xhat


def rms_normalise(x: np.ndarray, norm: RMSNorm) -> np.ndarray:
    y = x / root_mean_square(x, norm.eps)[..., None]
    y *= norm.gamma.data
    return y


def visible(layer: Any, keys: np.ndarray, pattern: Pattern | None, S: int) -> list[tuple[slice, Keys]] | None:
    """Groups of key heads, each with the keys that a query at the last of S places may see.

    None if sequences differ, or if query heads that share a key head do.
    """
    G, start = keys.shape[1], 0
    if type(layer) is RotarySelfAttention:
        if pattern is None:
            start = max(0, S - (layer.window or S))
        else:
            pattern = layer.seen(pattern, causal=False)
    if pattern is None:
        return [(slice(0, G), slice(start, S))]
    H = layer.query.w.data.shape[1] // keys.shape[3]
    groups = pattern.of_heads(H)
    if any(own.differs for _, own in groups) or (G < H and len(groups) > 1):
        return None
    last, columns = slice(0, 1, 1), slice(0, S, 1)
    tables = (np.broadcast_to(own.mask(0, last, columns, 1, S, np), (1, S)) for _, own in groups)
    found: list[tuple[slice, Keys]] = [
        (heads, np.flatnonzero(table)) for (heads, _), table in zip(groups, tables, strict=True)
    ]
    return found if G == H else [(slice(0, G), found[0][1])]


def attend(x: np.ndarray, layer: Any, stored: Stored, past: int, seen: list[tuple[slice, Keys]]) -> np.ndarray:
    """Self-attention of the token at place `past` to itself and to earlier tokens, but only to those in `seen`.

    The K query heads that share one of the G heads of keys and values are read together, as rows of one matrix.
    """
    keys, values = stored
    B, G, _, D = keys.shape
    q, k = affine(x, layer.query), affine(x, layer.key).reshape(B, G, 1, D)
    q *= 1 / math.sqrt(D)
    q, by_place = q.reshape(B, G, -1, D), None  # (B, G, K, D)
    if type(layer) is RotarySelfAttention:
        angles = angles_at(past, D, layer, q.dtype)
        q, k = rotate(q, *angles), rotate(k, *angles)
    keys[:, :, past] = k[:, :, 0]
    values[:, :, past] = affine(x, layer.value).reshape(B, G, D)
    if type(layer) is RelativeSelfAttention:
        by_place = scores_by_place(q, layer, past + 1)
        q = q + layer.content_bias.data[:, None] / math.sqrt(D)
    y = np.empty_like(q)
    for heads, columns in seen:
        z = q[:, heads] @ keys[:, heads, columns].swapaxes(2, 3)  # (B, heads, K, keys)
        if by_place is not None:
            z += by_place[:, heads, :, columns]
        if z.size:
            z -= np.maximum.reduce(z, axis=3, keepdims=True)
        np.exp(z, out=z)
        z /= np.add.reduce(z, axis=3, keepdims=True)
        np.matmul(z, values[:, heads, columns], out=y[:, heads])  # 0 if there are no keys
    return affine(y.reshape(*x.shape[:-1], -1), layer.unify)


def angles_at(place: int, D: int, layer: RotarySelfAttention, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines (1, D/2) by which `ops.rotary` rotates the vectors at a place, from tables for many."""
    cos, sin = rotary_tables(1 << place.bit_length(), D, 0, layer.base, layer.scaling, dtype)
    return cos[place : place + 1], sin[place : place + 1]


def scores_by_place(q: np.ndarray, layer: RelativeSelfAttention, S: int) -> np.ndarray:
    """(B, H, 1, S): (q + w) · r_δ of each head, for q (B, H, 1, D) at the last of S places; it is scaled by 1/√D."""
    (_, H, _, D), C = q.shape, layer.d_model
    w = layer.position.w.data.reshape(C, H, D).transpose(1, 2, 0)
    u = (q + layer.position_bias.data[:, None] / math.sqrt(D)) @ w  # (B, H, 1, C)
    clocks = clock_faces(1 << (S - 1).bit_length(), C, q.dtype)
    return (u @ clocks[:S].T)[..., ::-1]  # distance 0 is the last place


@functools.lru_cache(maxsize=8)
def clock_faces(length: int, C: int, dtype: np.dtype) -> np.ndarray:
    """The sinusoids (length, C) of distances from 0 on."""
    return sinusoidal_positions(length, C, np, dtype)


def feed_forward(x: np.ndarray, layer: Any) -> np.ndarray:
    up = layer.up
    if type(up) is not Linear or up.activation is None or up.b is None:
        return affine(affine(x, up), layer.down)
    h = product(x, up.w.data)
    h += up.b.data
    return affine(activate(h, up.activation, out=h), layer.down)


def gated(x: np.ndarray, layer: SwiGLU) -> np.ndarray:
    g = affine(x, layer.gate)
    activate(g, "silu", out=g)
    g *= affine(x, layer.up)
    return affine(g, layer.down)


# The layers known here; those in ROW treat every position by itself.
ATTENTION = (SelfAttention, RelativeSelfAttention, RotarySelfAttention)
ROW: dict[type, Callable[[np.ndarray, Any], np.ndarray]] = {
    LayerNorm: normalise,
    RMSNorm: rms_normalise,
    FeedForward: feed_forward,
    SwiGLU: gated,
}

"""Attention with relative positions on a GPU: products of cuBLASLt, and the softmax of `cupy_attention` between them.

CuPy's products, which the reference has, cannot be part of a CUDA graph.
"""

from __future__ import annotations

import cupy
from cupy.lib.stride_tricks import as_strided

from .. import ops
from ..backend import Array, widen
from ..ops.patterns import Pattern
from ..ops.relative import check_relative_attention
from .cupy_attention import by_heads, by_positions, matrices, scores, softmax, table_of
from .cupy_code import alike, contiguous, real
from .cupy_products import available, padded, product, readable
from .numpy_half import add_twin_in_half


def shifted(b: Array, B: int) -> Array:
    """Scores by distance (H, B T, R) viewed by key: (B, H, T, S), as `ops.relative_shift` has them. In memory the
    window of a row begins one number further left than that of the row before.
    """
    (H, rows, R), (of_H, row, item) = b.shape, b.strides
    T = rows // B
    return as_strided(b[..., T - 1 :], (B, H, T, R - T + 1), (T * row, of_H, row - item, item))


def with_bias(q: Array, bias: Array) -> Array:
    """q (B, H, T, D) plus a bias (H, D), in the type of q."""
    return (widen(q) + widen(bias)[:, None]).astype(q.dtype, copy=False)


def accepts(
    q: Array, k: Array, v: Array, r: Array, content_bias: Array, position_bias: Array, pattern: Pattern | None = None
) -> bool:
    if not (alike(q, k, v, r, content_bias, position_bias) and available() and q.size and k.size):
        return False
    check_relative_attention(q, k, v, r, content_bias, position_bias, pattern)
    return True


def relative_attention(
    q: Array, k: Array, v: Array, r: Array, content_bias: Array, position_bias: Array, pattern: Pattern | None = None
) -> tuple[Array, tuple]:
    """As `ops.relative_attention`. For half precision the scores are float32, and the other factors are rounded.

    The vectors of distances belong to a head, but not to a sequence. So the queries of all sequences are multiplied
    with those of their head as one matrix, and the backward of this product sums over the sequences too.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    whole, table = (0, slice(0, T), slice(0, S)), table_of(pattern, H, T, S)
    qu, qw = contiguous(with_bias(q, content_bias)), contiguous(with_bias(q, position_bias).swapaxes(0, 1))
    of_k, of_v, r = matrices(by_heads(k), H), matrices(by_heads(v), H), readable(r)
    z = scores(matrices(qu, H), of_k).reshape(B, H, T, S)
    z += shifted(product(qw.reshape(H, B * T, D), r.swapaxes(1, 2), padded((H, B * T, S + T - 1), z.dtype)), B)
    p, y = softmax("softmax", (z.reshape(B * H, T, S),), table, whole, q), cupy.empty(q.shape, q.dtype)
    product(p, of_v, matrices(y, H))
    return by_positions(y), (qu, qw, of_k, of_v, r, table, p)


def relative_attention_backward(dy: Array, cache: tuple) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(dq, dk, dv, dr, dcontent_bias, dposition_bias), as `ops.relative_attention_backward`; in half precision the last
    two are float32.
    """
    qu, qw, of_k, of_v, r, table, p = cache
    (B, H, T, D), S, wide = qu.shape, of_k.shape[1], real(qu.dtype)
    of_dy, of_qw = matrices(by_heads(dy), H), qw.reshape(H, B * T, D)
    da = softmax("softmax_backward", (scores(of_dy, of_v), p), table, (0, slice(0, T), slice(0, S)), qu)
    db = padded((H, B * T, S + T - 1), da.dtype, cupy.zeros)
    shifted(db, B)[...] = da.reshape(B, H, T, S)
    dqu = product(da, of_k, cupy.empty((B * H, T, D), wide)).reshape(qu.shape)
    dqw = product(db, r, cupy.empty((H, B * T, D), wide)).reshape(qw.shape).swapaxes(0, 1)
    dk, dv = (cupy.empty((B, H, S, D), wide) for _ in range(2))
    product(da.swapaxes(1, 2), matrices(qu, H), matrices(dk, H))
    product(p.swapaxes(1, 2), of_dy, matrices(dv, H))
    dr = product(db.swapaxes(1, 2), of_qw, cupy.empty(r.shape, wide))
    du, dw = dqu.sum(axis=(0, 2)), dqw.sum(axis=(0, 2))
    dq, dk, dv = (by_positions(x.astype(qu.dtype, copy=False)) for x in (dqu + dqw, dk, dv))
    return dq, dk, dv, dr.astype(r.dtype, copy=False), du, dw


add_twin_in_half(ops.relative_attention, ops.relative_attention_backward, cupy.ndarray, fast=True)
ops.relative_attention.add_twin(cupy.ndarray, accepts, relative_attention, relative_attention_backward, fast=True)

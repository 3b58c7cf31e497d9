"""One new token through a block on NumPy: the reference's arithmetic in few calls, since here Python is half the time.

For a token a product with a weight matrix is a product with a vector: it takes as long as reading the matrix, some
tens of microseconds, and checks, caches for backward and reshaping would take as long again. So all of the block
stands here, on arrays (B, C), or (C,) for one sequence, with intermediate results changed in place.
"""

from __future__ import annotations

import math

import numpy as np

from ..nn import FeedForward, LayerNorm, Linear, SelfAttention, TransformerBlock
from ..nn.block import extend_block
from .numpy_arrays import one_real_dtype
from .numpy_dense import activate

plain = extend_block.reference


@extend_block.twin(np.ndarray)
def extend(x: np.ndarray, block: TransformerBlock, keys: np.ndarray, values: np.ndarray, past: int) -> np.ndarray:
    """As `nn.block.extend_block`."""
    parts = (block.norm1, block.attention, block.norm2, block.feedforward)
    known = tuple(type(part) for part in parts) == (LayerNorm, SelfAttention, LayerNorm, FeedForward)
    if not known or x.shape[1] != 1 or not one_real_dtype(x, keys, values, block.norm1.gamma.data):
        return plain(x, block, keys, values, past)
    rows = x[0, 0] if x.shape[0] == 1 else x[:, 0]
    if block.norm == "post":
        a = attend(rows, block, keys, values, past)
        a += rows
        h = normalise(a, block.norm1)
        y = feed_forward(h, block)
        y += h
        return normalise(y, block.norm2).reshape(x.shape)
    h = attend(normalise(rows, block.norm1), block, keys, values, past)
    h += rows
    y = feed_forward(normalise(h, block.norm2), block)
    y += h
    return y.reshape(x.shape)


def affine(x: np.ndarray, layer: Linear) -> np.ndarray:
    y = x @ layer.w.data
    if layer.b is not None:
        y += layer.b.data
    return y


def normalise(x: np.ndarray, norm: LayerNorm) -> np.ndarray:
    C = x.shape[-1]
    xhat = x - np.add.reduce(x, axis=-1, keepdims=True) / C
    xhat /= np.sqrt(np.vecdot(xhat, xhat) / C + norm.eps)[..., None]
    xhat *= norm.gamma.data
    xhat += norm.beta.data
    return xhat


def attend(x: np.ndarray, block: TransformerBlock, keys: np.ndarray, values: np.ndarray, past: int) -> np.ndarray:
    """Self-attention of the token at place `past` to all before it and to itself."""
    layer, (B, H, _, D) = block.attention, keys.shape
    keys[:, :, past] = affine(x, layer.key).reshape(B, H, D)
    values[:, :, past] = affine(x, layer.value).reshape(B, H, D)
    q = affine(x, layer.query)
    q *= 1 / math.sqrt(D)
    z = keys[:, :, : past + 1] @ q.reshape(B, H, D, 1)  # (B, H, S, 1)
    z -= np.maximum.reduce(z, axis=2, keepdims=True)
    np.exp(z, out=z)
    z /= np.add.reduce(z, axis=2, keepdims=True)
    y = z.reshape(B, H, 1, past + 1) @ values[:, :, : past + 1]  # (B, H, 1, D)
    return affine(y.reshape(*x.shape[:-1], H * D), layer.unify)


def feed_forward(x: np.ndarray, block: TransformerBlock) -> np.ndarray:
    h = affine(x, block.feedforward.up)
    return affine(activate(h, block.feedforward.up.activation, out=h), block.feedforward.down)

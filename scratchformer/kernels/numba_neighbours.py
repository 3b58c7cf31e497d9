"""The search for the nearest keys in compiled code: first all blocks in bfloat16, then the best ones in float32."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..generation.neighbours import BLOCK, NeighbourOutput, largest, largest_in, nearest_keys
from .mkl_products import product, products
from .numba_code import compiled
from .numba_elementwise import copy_into

KEYS = 8 * BLOCK  # in one product: their scores for 256 vectors stay in cache
ROUNDED: WeakKeyDictionary[NeighbourOutput, np.ndarray] = WeakKeyDictionary()  # a layer's keys (N, C), as bits


@nearest_keys.twin(np.ndarray, fast=True)
def nearest(x: np.ndarray, layer: Any) -> tuple[np.ndarray, np.ndarray]:
    """As `generation.neighbours.nearest_keys`, for float32.

    If bfloat16 is multiplied faster than float32 here (see `mkl_products`), the maxima of the blocks are those of
    rounded keys. As a maximum may then be a little too small, half as many blocks again are searched. The scores in
    these blocks are computed from the keys in float32, so only a key in another block can be missed.
    """
    library = products()
    if library is None or x.dtype != np.float32 or layer.keys.dtype != np.float32:
        return nearest_keys.reference(x, layer)
    x, K, count = np.ascontiguousarray(x), layer.neighbours, len(layer.keys)
    maxima = np.empty((count, len(x)), np.float32)
    if library.bfloat16:
        maxima_of_rows(library, as_bfloat16(x), rounded_keys(layer), layer.halves, maxima)
        K += K // 2
    else:
        maxima_of_blocks(library, x, layer.keys, layer.halves, maxima)
    blocks = largest(maxima.T, min(K, count))
    scores = np.empty((*blocks.shape, BLOCK), np.float32)
    scores_in_blocks(x, layer.keys, layer.halves, blocks, scores)
    return largest_in(scores, blocks, layer.neighbours)


def rounded_keys(layer: NeighbourOutput) -> np.ndarray:
    """The keys of a layer in bfloat16, (N, C), as bits; made once."""
    if layer not in ROUNDED:
        ROUNDED[layer] = as_bfloat16(layer.keys.swapaxes(1, 2).reshape(-1, layer.keys.shape[1]))
    return ROUNDED[layer]


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of x, rounded."""
    bits = np.empty(x.shape, np.uint16)
    copy_into(x.ravel(), bits.ravel())
    return bits


@compiled
def maxima_of_rows(library: Any, x: Any, keys: Any, halves: Any, maxima: Any) -> None:
    """Write the maxima (N/BLOCK, n) of the scores of x (n, C) in each block of keys (N, C), both bits."""
    scores = np.empty((min(KEYS, len(keys)), len(x)), np.float32)
    for first in range(0, len(keys), KEYS):
        part = keys[first : first + KEYS]
        product(library, part, False, x, True, 0, scores[: len(part)])
        for start in range(0, len(part), BLOCK):
            block = (first + start) // BLOCK
            write_maxima(scores[start : start + BLOCK], halves[block], maxima[block])


@compiled
def maxima_of_blocks(library: Any, x: Any, keys: Any, halves: Any, maxima: Any) -> None:
    """The same for keys (N/BLOCK, C, BLOCK), both float32."""
    scores = np.empty((BLOCK, len(x)), np.float32)
    for block in range(len(keys)):
        product(library, keys[block], True, x, True, 0, scores)
        write_maxima(scores, halves[block], maxima[block])


@compiled
def write_maxima(scores: Any, halves: Any, maxima: Any) -> None:
    """maxima_n = max_k(scores_kn − halves_k)"""
    maxima[:] = -np.inf
    for k in range(len(scores)):
        row, half = scores[k], halves[k]
        for n in range(maxima.size):
            maxima[n] = max(maxima[n], row[n] - half)


@compiled
def scores_in_blocks(x: Any, keys: Any, halves: Any, blocks: Any, scores: Any) -> None:
    """Write the scores (n, B, BLOCK) of x (n, C) in the blocks of each row, (n, B)."""
    for n in range(len(x)):
        for i in range(blocks.shape[1]):
            block, to = blocks[n, i], scores[n, i]
            to[:] = -halves[block]
            for c in range(x.shape[1]):
                factor, row = x[n, c], keys[block, c]
                for k in range(to.size):
                    to[k] += factor * row[k]

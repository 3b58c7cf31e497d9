"""The search for the nearest keys in compiled code: all blocks, in bfloat16 where that is faster, then the best ones in
float32.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..kernels.mkl_products import product, products, widen
from ..kernels.numba_code import compiled
from ..kernels.numba_multiply import half
from .neighbours import NeighbourOutput, largest, largest_of_blocks, nearest_keys

MORE = 8  # the fewest blocks that are searched beyond K after rounding
ROUNDED: WeakKeyDictionary[NeighbourOutput, tuple[np.ndarray, np.ndarray]] = WeakKeyDictionary()
_rounding = threading.Lock()


def fits(x: np.ndarray, layer: Any) -> bool:
    same = x.dtype == layer.keys.dtype == np.float32 and x.ndim == 2 and x.shape[1] == layer.keys.shape[1]
    return same and products() is not None


def nearest(x: np.ndarray, layer: Any) -> tuple[np.ndarray, np.ndarray]:
    """As `neighbours.nearest_keys`, for float32.

    If bfloat16 is multiplied faster than float32 here (see `mkl_products`), the maxima of the blocks are those of
    rounded keys. Rounding may change their order, so max(8, K/2) more blocks are searched. The scores in these blocks
    are computed from the keys in float32. So a key is missed only if its block was not chosen.
    """
    library: Any = products()
    x, K, (count, _, size) = np.ascontiguousarray(x), layer.neighbours, layer.keys.shape
    maxima = np.empty((count, len(x)), np.float32)
    if library.bfloat16:
        K += max(MORE, K // 2)
        write_maxima(library, half(x), *rounded(layer), False, maxima)
    else:
        write_maxima(library, x, layer.keys, layer.halves, True, maxima)
    blocks = np.ascontiguousarray(largest(maxima.T, min(K, count)))
    scores = np.empty((*blocks.shape, size), np.float32)
    scores_in_blocks(x, layer.keys, layer.halves, blocks, scores)
    return largest_of_blocks(scores, blocks, layer.neighbours)


nearest_keys.add_twin(np.ndarray, fits, nearest, fast=True)


def rounded(layer: NeighbourOutput) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a layer in bfloat16, as bits (N/BLOCK, BLOCK, C), and half of each one's square, infinite where that
    of the key is. They are made once, although several threads may ask for them.
    """
    with _rounding:
        if layer not in ROUNDED:
            bits = np.stack([half(np.ascontiguousarray(block.T)) for block in layer.keys])
            halves = np.stack([np.vecdot(keys, keys) / 2 for keys in map(widen, bits)])
            ROUNDED[layer] = bits, np.where(np.isfinite(layer.halves), halves, layer.halves)
        return ROUNDED[layer]


@compiled
def write_maxima(library: Any, x: Any, keys: Any, halves: Any, transposed: Any, maxima: Any) -> None:
    """The maxima (N/BLOCK, n) of the scores of x (n, C) in each block of keys (N/BLOCK, BLOCK, C), which may be stored
    as (N/BLOCK, C, BLOCK).
    """
    scores = np.empty((halves.shape[1], len(x)), np.float32)
    maxima[:] = -np.inf
    for block in range(len(keys)):
        product(library, keys[block], transposed, x, True, 0, scores)
        maximum = maxima[block]
        for k in range(len(scores)):
            row, half = scores[k], halves[block, k]
            for n in range(maximum.size):
                maximum[n] = max(maximum[n], row[n] - half)


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

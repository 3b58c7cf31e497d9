"""The search for the nearest keys in compiled code: all blocks, in bfloat16 where that is faster, then the best ones in
float32.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..generation.neighbours import NeighbourOutput, largest, largest_in, nearest_keys
from .mkl_products import product, products
from .numba_code import compiled, plus
from .numba_math import narrow, read
from .numba_multiply import half

KEYS = 1024  # in one product, about: their scores for 256 vectors stay in cache
MORE = 8  # the fewest blocks that are searched beyond K after rounding


class Rounded(NamedTuple):
    """The keys of a layer in bfloat16, and half of each one's square."""

    keys: np.ndarray  # (N, C), bits
    halves: np.ndarray  # (N/BLOCK, BLOCK), float32


ROUNDED: WeakKeyDictionary[NeighbourOutput, Rounded] = WeakKeyDictionary()
_rounding = threading.Lock()


@nearest_keys.twin(np.ndarray, fast=True)
def nearest(x: np.ndarray, layer: Any) -> tuple[np.ndarray, np.ndarray]:
    """As `generation.neighbours.nearest_keys`, for float32.

    If bfloat16 is multiplied faster than float32 here (see `mkl_products`), the maxima of the blocks are those of
    rounded keys. Rounding may change their order, so max(8, K/2) more blocks are searched. The scores in these blocks
    are computed from the keys in float32. So a key is missed only if its block was not chosen.
    """
    library, keys, halves = products(), layer.keys, layer.halves
    if library is None or not fits(x, keys):
        return nearest_keys.reference(x, layer)
    x, K = np.ascontiguousarray(x), layer.neighbours
    maxima = np.empty((len(keys), len(x)), np.float32)
    if library.bfloat16:
        K += max(MORE, K // 2)
        maxima_of_rows(library, half(x), *rounded(layer), maxima)
    else:
        maxima_of_blocks(library, x, keys, halves, maxima)
    blocks = np.ascontiguousarray(largest(maxima.T, min(K, len(keys))))
    scores = np.empty((*blocks.shape, halves.shape[1]), np.float32)
    scores_in_blocks(x, keys, halves, blocks, scores)
    return largest_in(scores, blocks, layer.neighbours)


def fits(x: np.ndarray, keys: np.ndarray) -> bool:
    """Whether compiled code can compare x (n, C) with these keys."""
    return x.dtype == keys.dtype == np.float32 and x.ndim == 2 and x.shape[1] == keys.shape[1]


def rounded(layer: NeighbourOutput) -> Rounded:
    """The rounded keys of a layer; made once, although several threads may ask for them."""
    with _rounding:
        if layer not in ROUNDED:
            blocks, C, size = layer.keys.shape
            found = Rounded(np.empty((blocks * size, C), np.uint16), np.empty((blocks, size), np.float32))
            round_keys(layer.keys, layer.halves, *found)
            ROUNDED[layer] = found
        return ROUNDED[layer]


@compiled
def round_keys(keys: Any, halves: Any, bits: Any, rounded_halves: Any) -> None:
    """Write the rounded keys, and half of each one's square; infinite where that of the key is."""
    for block in range(keys.shape[0]):
        for k in range(keys.shape[2]):
            row, half = bits[block * keys.shape[2] + k], np.float32(0)
            for c in range(row.size):
                row[c] = narrow(keys[block, c, k], row)
                half = plus(half, read(row[c]) * read(row[c]) / np.float32(2))
            rounded_halves[block, k] = half if np.isfinite(halves[block, k]) else halves[block, k]


@compiled
def maxima_of_rows(library: Any, x: Any, keys: Any, halves: Any, maxima: Any) -> None:
    """Write the maxima (N/BLOCK, n) of the scores of x (n, C) in each block of keys (N, C), both bits."""
    size = halves.shape[1]
    step = max(1, KEYS // size) * size
    scores = np.empty((min(step, len(keys)), len(x)), np.float32)
    for first in range(0, len(keys), step):
        part = keys[first : first + step]
        product(library, part, False, x, True, 0, scores[: len(part)])
        for start in range(0, len(part), size):
            block = (first + start) // size
            write_maxima(scores[start : start + size], halves[block], maxima[block])


@compiled
def maxima_of_blocks(library: Any, x: Any, keys: Any, halves: Any, maxima: Any) -> None:
    """The same for keys (N/BLOCK, C, BLOCK), both float32."""
    scores = np.empty((keys.shape[2], len(x)), np.float32)
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

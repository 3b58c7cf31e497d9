"""Equal elements: where a maximum, a median or a sorted order has no single derivative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CLOSE = 8 * float(np.finfo(np.float64).eps)  # numbers that differ by less, relative to their size, are equal
_GAP = 1e-6  # how far they are set apart, relative to their size
_ORDERS = 8  # the most orders in which they are set apart


def equals(x: np.ndarray, value: float) -> np.ndarray:
    """1 for each element that is equal to `value`, 0 for the others."""
    return (np.abs(x - value) <= _CLOSE * abs(value)).astype(float)


def repeated(x: np.ndarray) -> bool:
    """Whether some elements are equal."""
    return in_ties([x]).size > 0


def in_ties(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The elements of all arrays that are equal to another one."""
    if not arrays:
        return np.empty(0)
    ordered = np.sort(np.concatenate([x.ravel() for x in arrays]))
    near = np.diff(ordered) <= _CLOSE * np.abs(ordered[1:])
    return np.concatenate([ordered[1:][near], ordered[:-1][near]])


def set_apart(arrays: Sequence[np.ndarray], sizes: Sequence[np.ndarray]) -> tuple[list[list[np.ndarray]], float]:
    """The arrays with all their equal elements set a little apart, in several orders, and the smallest distance.

    `sizes` has the size of each element, above 0. Every element is the smallest of its equals in one of the orders, the
    largest in another, and in the middle in others, if there are as many orders as equals. There are no orders if no
    elements are equal.
    """
    if not arrays:
        return [], 0.0
    x, gap = (np.concatenate([part.ravel() for part in parts]) for parts in (arrays, sizes))
    rng = np.random.default_rng(0)
    place = rng.permutation(x.size)
    place = place[np.argsort(x[place], kind="stable")]
    first = np.concatenate([[True], np.diff(x[place]) > _CLOSE * np.abs(x[place][1:])])
    group = np.cumsum(first) - 1
    start = np.flatnonzero(first)[group]
    counts = np.diff(np.append(np.flatnonzero(first), x.size))[group]
    rank = np.arange(x.size) - start
    orders = min(int(counts.max()), _ORDERS)
    if orders < 2:
        return [], 0.0
    # Several groups of equals take their orders independently of each other.
    orders = orders if np.count_nonzero(first & (counts > 1)) == 1 else _ORDERS
    turns = rng.permuted(np.tile(np.arange(orders), (group[-1] + 1, 1)), axis=1)
    results = []
    for i in range(orders):
        apart = x.copy()
        apart[place] += _GAP * gap[place] * (1 + (rank - (-turns[group, i] * counts // orders)) % counts)
        parts = np.split(apart, np.cumsum([part.size for part in arrays])[:-1])
        results.append([part.reshape(old.shape) for part, old in zip(parts, arrays, strict=True)])
    return results, _GAP * float(gap[place][counts > 1].min())

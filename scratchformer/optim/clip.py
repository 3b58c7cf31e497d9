"""Clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..backend import Array
from .optimizer import pieces


def global_norm(grad: Array, map: Callable = map) -> float:
    """‖g‖, the root of the sum of squares of a flat gradient (P,), in double precision: the squares of a large, finite
    gradient overflow in its own. map: as for `Optimizer.step`.
    """

    def squares(part: slice) -> Array:
        wide = grad[part].astype(np.float64)
        return wide @ wide

    return math.sqrt(float(sum(map(squares, pieces(grad)))))


def clip_by_global_norm(grad: Array, max_norm: float, map: Callable = map) -> float:
    """Scale a flat gradient (P,) in place so that its norm is at most `max_norm`; returns the norm it had.

    The direction is kept: all gradients of the model are scaled by the same number. A norm that is not finite is
    returned and nothing is scaled. map: applies a function to independent pieces, as for `Optimizer.step`.
    Source: Pascanu et al., "On the difficulty of training RNNs", 2013, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a number > 0, got {max_norm}")
    norm = global_norm(grad, map)
    if math.isfinite(norm) and norm > max_norm:

        def scale(part: slice) -> None:
            grad[part] *= max_norm / norm

        list(map(scale, pieces(grad)))
    return norm

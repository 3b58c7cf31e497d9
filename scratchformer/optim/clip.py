"""Clipping by the global norm."""

from __future__ import annotations

import math

import numpy as np

from ..backend import Array
from .optimizer import pieces


def global_norm(grad: Array) -> float:
    """‖g‖, the root of the sum of squares of a flat gradient (P,), in double precision: the squares of a large, finite
    gradient overflow in its own.
    """
    parts = (grad[part].astype(np.float64) for part in pieces(grad))
    return math.sqrt(float(sum(part @ part for part in parts)))


def clip_by_global_norm(grad: Array, max_norm: float) -> float:
    """Scale a flat gradient (P,) in place so that its norm is at most `max_norm`; returns the norm it had.

    The direction is kept: all gradients of the model are scaled by the same number. A norm that is not finite is
    returned and nothing is scaled. Source: Pascanu et al., "On the difficulty of training RNNs", 2013, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a number > 0, got {max_norm}")
    norm = global_norm(grad)
    if math.isfinite(norm) and norm > max_norm:
        grad *= max_norm / norm
    return norm

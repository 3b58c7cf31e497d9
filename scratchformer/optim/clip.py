"""Clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from ..backend import Array, array_module
from ..checks import expect_floating, expect_number
from ..dispatch import operation
from .optimizer import pieces


@operation
def sum_of_squares(x: Array) -> Array:
    """Σ_i x_i² of an array (n,), in float64."""
    wide = x.astype(np.float64)
    return wide @ wide


@operation
def scale(x: Array, share: float | Array) -> None:
    """Multiply an array (n,) in place. share: a number; on a GPU it may be an array () there.

    With x0 for x before,

        x_i = share x0_i
    """
    x *= share


def global_norm(
    grad: Array | Sequence[Array], map: Callable = map, gather: Callable = lambda own: [own]
) -> float | Array:
    """‖g‖, the root of the sum of squares of a flat gradient (P,), or of several arrays taken together. It is computed
    in float64, since in float32 the squares of a large but finite gradient overflow. map: as for `Optimizer.step`.
    gather: for a gradient of which every process has a part; makes of a list the lists of all processes, in order.
    On a GPU the norm is an array () there, since for a number the host would have to wait.
    """
    total = sum(chain(*gather(list(map(sum_of_squares, _cut(grad))))))
    xp = array_module(total)
    return math.sqrt(float(total)) if xp is np else xp.sqrt(total)


def clip_by_global_norm(
    grad: Array | Sequence[Array], max_norm: float, map: Callable = map, gather: Callable = lambda own: [own]
) -> float | Array:
    """Scale gradients in place so that their norm is at most `max_norm`. Returns their norm before scaling, see
    `global_norm`.

    grad: a flat gradient (P,), such as `model.flat.grad`, or several arrays taken together, such as
    `optimizer.gradients()`. All are scaled by the same number, so the direction is preserved. If the norm is not
    finite, nothing is scaled. map: applies a function to independent pieces, as for `Optimizer.step`. gather: see
    `global_norm`.

    With g the gradient before and c after,

        norm = √(Σ_i g_i²)        c_i = min(1, max_norm/norm) g_i        √(Σ_i c_i²) = min(norm, max_norm)

    Source: Pascanu et al., "On the difficulty of training RNNs", 2013, algorithm 1.
    """
    expect_number("max_norm", max_norm, zero=False, infinite=True)
    norm = global_norm(grad, map, gather)
    share = share_for(norm, max_norm)
    if not isinstance(share, float) or share != 1:
        list(map(lambda piece: scale(piece, share), _cut(grad)))
    return norm


def share_for(norm: float | Array, max_norm: float) -> float | Array:
    """The number by which a gradient of this norm is multiplied, so that its norm is at most `max_norm`; 1 if the norm
    is not finite. On a GPU it is an array (), as the norm is.
    """
    xp = array_module(norm)
    if xp is np:
        return max_norm / norm if math.isfinite(norm) and norm > max_norm else 1.0
    too_long = xp.isfinite(norm) & (norm > max_norm)  # which the host does not know
    return xp.where(too_long, max_norm / xp.where(too_long, norm, 1), 1)


def _cut(grad: Array | Sequence[Array]) -> list[Array]:
    """Views of one or several arrays, in pieces of cache size."""
    arrays: list[Array] = [*grad] if isinstance(grad, list | tuple) else [grad]
    found = []
    for g in arrays:
        expect_floating(grad=g)
        if not g.flags.c_contiguous:
            raise ValueError("grad: expected contiguous arrays, since they are scaled in place")
        flat = g.reshape(-1)
        found += [flat[part] for part in pieces(flat)]
    return found

"""Fixed position encodings: computed, not learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, Device, cosine, current_device, is_numpy_like, kept, power, sine, to_device
from ..checks import MAX_SIZE, expect_at_least, expect_floating_type, expect_memory, expect_positive

MAX_KEPT = 1 << 16  # positions of a table that is longer than a text needs
BASE = 10_000  # wavelengths run from 2π to BASE · 2π


def sinusoidal_positions(length: int, d_model: int, xp: Any = np, dtype: Any = np.float32, start: int = 0) -> Array:
    """P[t, 2i] = sin(t / 10000^(2i/C)), P[t, 2i+1] = cos(t / 10000^(2i/C)): a clock face for each pair of columns.

    length: T, positions `start` ... `start` + T − 1. d_model: C; if odd, the last pair has no cosine.
    Returns P (T, C), an array of the library `xp`.

    Column c belongs to pair ⌊c/2⌋, whose hand turns by θ_c from one position to the next:

        P := y
        θ_c = 10000^(−2⌊c/2⌋/C)
        P_tc = sin((start + t) θ_c) where c mod 2 = 0, cos((start + t) θ_c) elsewhere

    From one position to the next, the hand of each pair turns by θ_c, wherever it was (the angle-sum formulas):

        P_{t+1,c} = P_tc cos(θ_c) + P_{t,c+1} sin(θ_c) for t + 1 < T, c + 1 < C, c mod 2 = 0
        P_{t+1,c} = P_tc cos(θ_c) − P_{t,c−1} sin(θ_c) for t + 1 < T, c mod 2 = 1

    P depends on no parameter and no input, so there is nothing to differentiate: where it is added to x, dy passes
    through unchanged.

    Source: Vaswani et al., "Attention is all you need", 2017, section 3.5.
    """
    expect_positive(length=length, d_model=d_model)
    expect_at_least(-MAX_SIZE, start=start)
    expect_floating_type("dtype", dtype)
    length, d_model, start = int(length), int(d_model), int(start)
    expect_memory(2 * length * d_model, "positions", length=length, d_model=d_model)  # they are float64 at first
    first, size = kept_range(start, length, xp)
    table = _table(size, d_model, first, np.dtype(dtype), current_device(xp))
    return table[start - first : start - first + length].copy()


def kept_range(start: int, length: int, xp: Any) -> tuple[int, int]:
    """The first position of a table that is kept, and the number of its positions.

    It contains the `length` positions from `start` on; on a GPU, to which a table must be copied, also so many around
    them that it still serves when the text, or the memory before it, grows. Far from position 0 it contains no others.
    """
    if xp is np or not is_numpy_like(xp):
        return start, length
    reach = 1 << (max(-start, start + length) - 1).bit_length()
    first = -reach if start < 0 else 0
    return (first, reach - first) if reach - first <= max(MAX_KEPT, 4 * length) else (start, length)


@kept(8)
def _table(length: int, d_model: int, start: int, dtype: np.dtype, device: Device) -> Array:
    """The encodings of these positions, kept for the next call."""
    t = np.arange(start, start + length)[:, None]  # (T, 1)
    pair = np.arange(0, d_model, 2)  # (⌈C/2⌉,)
    angle = t / np.array([power(BASE, x) for x in pair / d_model])  # (T, ⌈C/2⌉), float64
    table = np.empty((length, d_model))
    table[:, 0::2] = sine(angle)
    table[:, 1::2] = cosine(angle[:, : d_model // 2])
    return to_device(table, device, dtype)

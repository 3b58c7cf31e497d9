"""The precision of training: which types there are, and the loss scale of float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..backend import CPU, Array, Device
from ..checks import expect_number, expect_one_of, expect_positive
from ..dispatch import turned_off
from ..ops.rounding import bfloat16

PRECISIONS = ("float32", "bfloat16", "float16", "tf32")
FIRST_SCALE, MIN_SCALE, MAX_SCALE = 2.0**15, 1.0, 2.0**24  # loss scales
PATIENCE = 500  # batches without an overflow after which the scale doubles


def half_type(precision: str, device: Device) -> np.dtype | None:
    """The type in which models on a device compute, or None if it is their own.

    Raises ValueError for another word, for "tf32" on a CPU, and for bfloat16 on a GPU without the fast twins;
    ImportError if bfloat16 needs a package that is missing.
    """
    expect_one_of("precision", precision, PRECISIONS)
    if precision == "tf32" and device is CPU:
        raise ValueError("precision: tf32 is for products on a GPU, and this model is on the CPU: use bfloat16")
    if precision in ("float32", "tf32"):
        return None
    if precision == "float16":
        return np.dtype(np.float16)
    if device is not CPU and device.index is not None and (setting := turned_off()):
        raise ValueError(f"precision: bfloat16 on a GPU needs the fast twins, which {setting} turns off")
    return bfloat16(device)


def advice(half: Array | None) -> str:
    """What would make computing in the type of these weights faster; "" if nothing is missing."""
    if not isinstance(half, np.ndarray):
        return ""
    if half.dtype == np.float16:
        return " (slow on a CPU: use float32, or bfloat16 if scratchformer doctor recommends it)"
    if find_spec("numba"):
        return ""
    return f" (slow, since NumPy has no fast products in {half.dtype}: pip install 'scratchformer[fast]')"


class LossScale:
    """S, by which the gradient of the loss is multiplied before backward in float16, and the sum of all gradients
    divided after it.

    scale: the first S, a power of two. patience: N, the number of good batches after which S doubles. `skipped` counts
    the batches that were skipped.

    Why it cancels. A backward is linear in the gradient that it is given: each dx_i is a sum of dy_o times derivatives
    J_oi = ∂y_o/∂x_i that do not depend on dy. So if dy is S times as large, then dx is too, through all layers down to
    the gradients of the weights, where one division removes it:

        dx_i = Σ_o dy_o J_oi        g_i := Σ_o (S dy_o) J_oi = S Σ_o dy_o J_oi
        dx_i = g_i/S

    Why a power of two. A floating-point number is m 2^e with 1 ≤ abs(m) < 2, and rounding concerns the digits of m.
    Multiplying by S = 2^k adds k to e and leaves m unchanged, so S adds no error of its own, unless e leaves the range
    of the type:

        S = 2^k        dy_o = m_o 2^e_o        S dy_o = m_o 2^(e_o + k)

    How S is chosen. It should be as large as possible, since gradients below 2⁻²⁵ become 0 in float16, but no gradient
    may exceed 65,504. Nobody knows beforehand how large they become. So S grows until the gradient of a batch t
    overflows, o_t = 1. That batch is skipped and S is halved. With scale_t for S after batch t, and c_t for the number
    of good batches since it changed:

        c_t = c_{t−1} + 1 where o_t = 0 and c_{t−1} + 1 < N, 0 elsewhere for t ≥ 1
        scale_t = scale_{t−1}/2 where o_t = 1,
            min(2 scale_{t−1}, largest) where c_{t−1} + 1 = N, scale_{t−1} elsewhere for t ≥ 1

    If S is at its smallest, 1, an overflow is no longer the fault of S, and the run has diverged.

    Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2.
    """

    def __init__(self, scale: float = FIRST_SCALE, patience: int = PATIENCE) -> None:
        expect_number("scale", scale, zero=False)
        expect_positive(patience=patience)
        self.scale, self.patience = float(scale), patience
        self.good = self.skipped = 0

    def skips(self, norm: float) -> bool:
        """Whether to skip a batch whose gradient has this norm: it is not finite, and S can still be halved."""
        if math.isfinite(norm):
            self.good += 1
            if self.good >= self.patience:
                self.scale, self.good = min(2 * self.scale, MAX_SCALE), 0
            return False
        if self.scale == MIN_SCALE:
            return False
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
        return True

    def measured(self) -> dict[str, float]:
        """What a log says of it."""
        return {"loss_scale": self.scale, "skipped_batches": self.skipped}

    def state(self) -> dict[str, float]:
        """What a snapshot must save."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.scale, self.good, self.skipped = float(state["scale"]), state["good"], state["skipped"]

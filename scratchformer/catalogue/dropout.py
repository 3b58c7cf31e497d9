"""Dropout, and dropout with an addition in one loop."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..rng import Key, random_uint16
from ..testing.draw import Sizes
from .entry import Arguments, OperationEntry, given


def drawn(x: np.ndarray, p: float, key: Key, *_: np.ndarray) -> dict[str, np.ndarray]:
    """The random integers."""
    return {"u": random_uint16(key, x.size).reshape(x.shape).astype(float)}


def dropout(d: Sizes, p: float | None = None) -> Arguments:
    x = d("B T C")
    if p is None:
        u = random_uint16(d.key, x.size)
        p = (float(np.sort(u)[x.size // 3]) - 0.3) / 65536  # rounded up; one element is just kept
    return given(x, p, d.key)


ENTRIES = [
    OperationEntry("dropout", names=drawn, analytic=True)
    .case("", lambda d: given(d("B T C"), 0.4, d.key))
    .derivation("", dropout)
    .derivation("nearly all", partial(dropout, p=1 - 1e-6))
    .mistake(
        "The scale is left out of backward",
        "All gradients further back are too small by the factor 1 − p.",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale",
        wrong="dx_i = dy_i k_i",
    )
    .mistake(
        "One object with one mask is used in two places",
        "The second forward overwrites the mask of the first, whose backward then lets gradients through that forward "
        "dropped. Here masks are in caches, not in layers.",
        name="one dropout object in two places: the second forward overwrites the first mask",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale",
        wrong="dx_i = dy_i scale",
        code="self.mask = rng.random(x.shape) > p",
        file="nn/dropout.py",
        replace={
            "return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)": (
                "y, self.mask = (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)\n"
                "        return y, self.mask"
            ),
            "return dy if cache is None else ops.dropout_backward(dy, cache)": (
                "return dy if self.mask is None else ops.dropout_backward(dy, self.mask)"
            ),
        },
        tests="tests/nn/test_dropout.py",
    )
    .mistake(
        "Neither forward nor backward is scaled",
        "The gradient is right, but activations are smaller in training than when the model is used.",
        name="dropout: not scaled by 1/(1 - p)",
        replace={"keep.reshape(shape), LEVELS / (LEVELS - threshold)": "keep.reshape(shape), 1.0"},
    ),
    OperationEntry("dropout_add", names=drawn, analytic=True)
    .case("", lambda d: given(d("B T C"), 0.4, d.key, d("B T C")))
    .derivation(""),
]

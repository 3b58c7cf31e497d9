"""Positions: rotations, sinusoids and their frequencies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import ops
from ..testing.draw import Draw, Sizes
from .entry import Arguments, OperationEntry, given

# For a head of three pairs: one keeps its frequency, one is slowed down, and one is in between.
SCALING = {"factor": 8.0, "low_freq_factor": 0.05, "high_freq_factor": 0.5, "original_max_position_embeddings": 4}
LLAMA3 = {"rope_type": "llama3", **SCALING}
KINDS = {"none": None, "linear": {"rope_type": "linear", "factor": 8.0}, "llama3": LLAMA3}


def rotary(d: Draw, **options: Any) -> Arguments:
    d.sizes["D"] = 2 * d.D
    return given(d("B H T D"), **options)


def later(d: Sizes) -> Arguments:
    d.sizes |= {"B": 2, "H": 3, "T": 5, "D": 8}
    return given(d("B H T D"), 3)


def sinusoids(d: Sizes) -> Arguments:
    d.sizes["C"] = 5  # more than one pair
    return given(d.T, d.C, dtype=np.float64, start=3)


def kinds_of_scaling(D: int, base: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The kind as a number, and the numbers of a scaling."""
    numbers = {kind: float(number) for number, kind in enumerate(KINDS)}
    return numbers | SCALING | {"scaling": numbers[scaling["rope_type"] if scaling else "none"]}


def frequencies(d: Sizes, kind: str) -> Arguments:
    return given(6, 100.0, KINDS[kind])


ENTRIES = [
    OperationEntry(
        "rotary",
        names=lambda x, start=0, **options: {"θ": ops.rotary_frequencies(x.shape[-1], **options)},
        analytic=True,
        helpers=True,
    )
    .case("", rotary)
    .case("later, linear", partial(rotary, start=7, base=50.0, scaling={"rope_type": "linear", "factor": 3.0}))
    .case("llama3", partial(rotary, start=2, base=100.0, scaling=LLAMA3))
    .derivation("", later)
    .mistake(
        "Rotated forward once more",
        "The transpose of a rotation is the rotation back. Position 0 is right, and the error grows with the angle.",
        name="rotary positions: backward rotates forward",
        equation="dx_bhtd = dy_bhtd cos_ti − σ_d dy_bhtj sin_ti with i = i_d, j = j_d",
        wrong="dx_bhtd = dy_bhtd cos_ti + σ_d dy_bhtj sin_ti with i = i_d, j = j_d",
        code="dx = rotate(dy, cos, sin)",
        replace={
            "dx = rotate(dy, cache.cos, -cache.sin)\n    return": "dx = rotate(dy, cache.cos, cache.sin)\n    return"
        },
    )
    .mistake(
        "Neighbours form a pair, not one number from each half",
        "The result is a rotation too, and its gradient is right, but published weights expect the other pairs.",
        name="rotary positions: neighbours form a pair, not one number from each half",
        replace={
            "a, b = x[..., :half], x[..., half:]": "a, b = x[..., ::2], x[..., 1::2]",
            "    half = x.shape[-1] // 2\n": "",
        },
        tests="tests/ops/test_rotary.py -k equation",
    ),
    OperationEntry("sinusoidal_positions")
    .derivation("", sinusoids)
    .mistake(
        "100,000 instead of 10,000",
        "Nothing fails, since no gradient depends on it, but published weights were trained with other positions.",
        name="sinusoids with base 100,000",
        equation="θ_c = 10000^(−2⌊c/2⌋/C)",
        wrong="θ_c = 100000^(−2⌊c/2⌋/C)",
        replace={"BASE = 10_000 ": "BASE = 100_000 "},
    ),
    OperationEntry("rotary_frequencies", names=kinds_of_scaling)
    .derivation("", partial(frequencies, kind="none"))
    .derivation("linear", partial(frequencies, kind="linear"))
    .derivation("llama3", partial(frequencies, kind="llama3")),
]

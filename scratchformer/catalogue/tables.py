"""Tables and positions, and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops
from ..rng import Key, random_uint16
from ..testing.draw import Draw, Sizes
from .entry import Arguments, OperationEntry, given

# For a head of three pairs: one keeps its frequency, one is slowed down, and one is in between.
SCALING = {"factor": 8.0, "low_freq_factor": 0.05, "high_freq_factor": 0.5, "original_max_position_embeddings": 4}
LLAMA3 = {"rope_type": "llama3", **SCALING}
BETAS = {"beta_fast": 0.06, "beta_slow": 0.01}  # for yarn: the pairs between 1 and 3 are slowed in part
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4, **BETAS}
KINDS = {"none": None, "linear": {"rope_type": "linear", "factor": 8.0}, "llama3": LLAMA3, "yarn": YARN}


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
    return numbers | SCALING | BETAS | {"scaling": numbers[scaling["rope_type"] if scaling else "none"]}


def frequencies(d: Sizes, kind: str) -> Arguments:
    return given(6, 100.0, KINDS[kind])


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
    OperationEntry(
        "rotary",
        names=lambda x, start=0, **options: {"θ": ops.rotary_frequencies(x.shape[-1], **options)},
        analytic=True,
        helpers=True,
    )
    .extension("several sequences and heads", "sequence|head", "bh")
    .case("", rotary)
    .case("later, linear", rotary, start=7, base=50.0, scaling={"rope_type": "linear", "factor": 3.0})
    .case("llama3", rotary, start=2, base=100.0, scaling=LLAMA3)
    .case("yarn", rotary, start=2, base=100.0, scaling=YARN)
    .derivation("", later)
    .mistake(
        "Rotated forward once more",
        "The transpose of a rotation is the rotation back. Position 0 is right, and the error grows with the angle.",
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
        equation="θ_c = 10000^(−2⌊c/2⌋/C)",
        wrong="θ_c = 100000^(−2⌊c/2⌋/C)",
        replace={"BASE = 10_000 ": "BASE = 100_000 "},
    ),
    OperationEntry("rotary_frequencies", names=kinds_of_scaling)
    .derivation("", frequencies, kind="none")
    .derivation("linear", frequencies, kind="linear")
    .derivation("llama3", frequencies, kind="llama3")
    .derivation("yarn", frequencies, kind="yarn"),
    OperationEntry("embedding", analytic=True, helpers=True)
    .case("", lambda d: given(d.integers("B T", d.V), d("V C")))
    .mistake(
        "A buffered addition",
        "Only the last occurrence of each token counts. Frequent tokens lose nearly all of their gradient. Batches "
        "without a repeated token pass every test.",
        equation="dtable_vc = Σ_n dy_nc ∂y_nc/∂table_vc = Σ_n [ids_n = v] dy_nc",
        wrong="dtable_vc = Σ_n [ids_n = v, Σ_n' [n' > n, ids_n' = v] = 0] dy_nc",
        code="dtable[ids] += dy",
        replace={"dtable = scatter_add(dtable, ids, dy)\n    if out": "dtable[ids] += dy\n    if out"},
    )
    .survivors(
        "embedding_backward",
        {
            "dtable = zeros_like(dy, cache.shape) if out is None or dy.dtype != dtype else out -> "
            "dtable = zeros_like(dy, cache.shape)": "a table of its own is added to out afterwards"
        },
    ),
    OperationEntry("gather", analytic=True)
    .extension("several sequences", "several sequences", "b")
    .case("", lambda d: given(d("B T C"), d.integers("B K", d.T)))
    .case("one place again and again", lambda d: given(d("B T C"), d.integers("B K", 1)))
    .mistake(
        "Assigned instead of added",
        "Where a position is taken twice, only the last gradient is left.",
        equation="dx_btc = Σ_k dy_bkc ∂y_bkc/∂x_btc = Σ_k [places_bk = t] dy_bkc",
        wrong="dx_btc = Σ_k [places_bk = t, Σ_l [l > k, places_bl = t] = 0] dy_bkc",
        code="dx[rows, places] = dy",
    )
    .mistake(
        "Every row takes from the first",
        "Positions of other sequences are read, and get the gradient.",
        replace={"    rows = xp.arange(B)[:, None] * T + places": "    rows = xp.arange(B)[:, None] * 0 + places"},
    ),
    OperationEntry("dropout", names=drawn, analytic=True)
    .case("", lambda d: given(d("B T C"), 0.4, d.key))
    .derivation("", dropout)
    .derivation("nearly all", dropout, p=1 - 1e-6)
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
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale",
        wrong="dx_i = dy_i scale",
        code="self.mask = rng.random(x.shape) > p",
        file="nn/pointwise.py",
        replace={
            "return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)": (
                "y, self.mask = (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)\n"
                "        return y, self.mask"
            ),
            "return dy if cache is None else ops.dropout_backward(dy, cache)": (
                "return dy if self.mask is None else ops.dropout_backward(dy, self.mask)"
            ),
        },
    )
    .mistake(
        "Neither forward nor backward is scaled",
        "The gradient is right, but activations are smaller in training than when the model is used.",
        replace={"x.dtype), LEVELS / (LEVELS - threshold)": "x.dtype), 1.0"},
    ),
    OperationEntry("dropout_add", names=drawn, analytic=True).case(
        "", lambda d: given(d("B T C"), 0.4, d.key, d("B T C"))
    ),
]

"""The derivations of the twins in `kernels/`, which are checked on the twins themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ... import ops
from .case import DerivationCase, Sizes


def twin(name: str, *args: Any, names: Mapping[str, Any] | None = None, **options: Any) -> DerivationCase:
    """The NumPy twin of an operation and of its backward."""
    op = getattr(ops, name).twins[np.ndarray]
    (op_backward,) = getattr(ops, f"{name}_backward").twins.values()
    return DerivationCase(op, op_backward, args, names or {}, options)


def cross_entropy(d: Sizes) -> DerivationCase:
    """Two rows do not count: the last of two sequences of the batch."""
    logits, targets = d("B T V"), d.integers("B T", d.V)
    targets[:2, -1] = ops.IGNORED
    rows = {"targets": np.maximum(targets, 0).ravel()}
    return twin("cross_entropy", logits, targets, ops.IGNORED, label_smoothing=0.1, names=rows)


def dense(d: Sizes) -> DerivationCase:
    names = {name: number for number, name in enumerate(ops.ACTIVATIONS)}
    activation = [*names][d.seed % len(names)]
    x, w, b = d("B T I"), d("I O"), d("O")
    return twin("dense", x, w, b, activation, names=names | {"activation": names[activation]})


def allowed(d: Sizes) -> tuple[ops.Pattern | None, np.ndarray]:
    """A pattern by which every query sees a key, and its table (B, H, T, S)."""
    d.sizes |= dict(zip("TS", sorted((d.T, d.S)), strict=True))
    edges = d.generator.random((d.S, d.S)) < 0.5
    pattern = [None, ops.Causal(), ops.Edges(edges | np.eye(d.S, dtype=bool))][d.seed % 3]
    table = (pattern or ops.Full()).table(d.H, d.T, d.S, np)
    return pattern, np.broadcast_to(np.True_ if table is None else table, (d.B, d.H, d.T, d.S))


def large_scores(d: Sizes, k: np.ndarray) -> np.ndarray:
    """k with a common vector added, so that the scores of a row are large but differ little: a twin subtracts m."""
    return k + 200 * d("D")


def attention(d: Sizes) -> DerivationCase:
    """J tiles of W = 2 keys."""
    d.sizes |= {"G": 2, "H": 4}
    pattern, table = allowed(d)
    arrays, names = (large_scores(d, d("B G S D")), d("B G S D")), {"allowed": table, "W": 2, "J": -(-d.S // 2)}
    return twin("attention", d("B H T D"), *arrays, pattern, names=names)


def relative_attention(d: Sizes) -> DerivationCase:
    """The tile has every second query from the second on, and every second key from the first on."""
    pattern, table = allowed(d)
    d.sizes["R"] = d.S + d.T - 1
    tile = {"t₀": 1, "s₀": 0, "κ": 2, "X": d.T // 2, "Y": -(-d.S // 2), "E": d.T // 2 + -(-d.S // 2) - 1}
    names = tile | {"allowed": table, "R": d.R, "I": d.T * d.R}
    k, arrays = large_scores(d, d("B H S D")), (d("B H S D"), d("H R D"), d("H D"), d("H D"))
    return twin("relative_attention", d("B H T D"), k, *arrays, pattern, names=names)


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "attention.numpy": attention,
    "cross_entropy.numpy": cross_entropy,
    "dense.numpy": dense,
    "dropout.numpy": lambda d: twin("dropout", d("B T C"), 0.25, d.key),
    "embedding.numpy": lambda d: twin("embedding", d.integers("B T", d.V), d("V C")),
    "layernorm.numpy": lambda d: twin("layernorm", d("B T C"), d("C"), d("C")),
    "relative_attention.numpy": relative_attention,
    "rmsnorm.numpy": lambda d: twin("rmsnorm", d("B T C"), d("C")),
    "swiglu.numpy": lambda d: twin("swiglu", d("B T F"), d("B T F")),
}

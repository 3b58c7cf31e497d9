"""The derivations of the operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import ops
from .case import DerivationCase, Sizes, reference


def attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"G": 2, "H": 4, "B": 3, "T": 5, "S": 6 + d.seed % 2}  # S ≥ T: every query sees a key
    pattern = [None, ops.Causal(), ops.Local(1)][d.seed % 3]
    q, k, v = d("B H T D"), d("B G S D"), d("B G S D")
    table = (pattern or ops.Full()).table(d.H, d.T, d.S, np)
    table = np.ones((d.T, d.S)) if table is None else table
    mask = np.broadcast_to(table, (d.B, d.H, d.T, d.S))
    return reference("attention", q, k, v, pattern, names={"m": mask})


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "linear": lambda d: reference("linear", d("B T I"), d("I O"), d("O")),
    "softmax": lambda d: reference("softmax", d("B T V")),
    "log_softmax": lambda d: reference("log_softmax", d("B T V")),
    "layernorm": lambda d: reference("layernorm", d("B T C"), d("C"), d("C")),
    "attention": attention,
}

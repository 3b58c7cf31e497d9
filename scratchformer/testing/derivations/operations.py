"""The derivations of the operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ... import ops
from ...rng import random_uint16
from .case import DerivationCase, Sizes, reference


def attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"G": 2, "H": 4}
    pattern = [None, ops.Causal(), ops.Local(1)][d.seed % 3]
    q, k, v = d("B H T D"), d("B G S D"), d("B G S D")
    table = (pattern or ops.Full()).table(d.H, d.T, d.S, np)
    table = np.ones((d.T, d.S)) if table is None else table
    mask = np.broadcast_to(table, (d.B, d.H, d.T, d.S))
    return reference("attention", q, k, v, pattern, names={"m": mask})


ACTIVATIONS = {name: float(number) for number, name in enumerate(ops.ACTIVATIONS)}



def relu(d: Sizes) -> DerivationCase:
    x = d("B T C")
    x[0, 0, 0] = 0  # the kink
    return reference("relu", x)


def gelu(d: Sizes, approximate: str = "none") -> DerivationCase:
    names = {"none": 0.0, "approximate": float(approximate != "none")}
    return reference("gelu", d("B T C"), names=names, approximate=approximate)


def dense(d: Sizes, activation: str = "relu") -> DerivationCase:
    names = ACTIVATIONS | {"activation": ACTIVATIONS[activation]}
    return reference("dense", d("B T I"), d("I O"), d("O"), names=names, activation=activation)


def dropout(d: Sizes) -> DerivationCase:
    x, key, p = d("B T C"), d.key, d.generator.uniform(0.1, 0.9)
    return reference("dropout", x, p, key, names={"u": random_uint16(key, x.size).reshape(x.shape).astype(float)})


def pool(name: str, d: Sizes, padding: bool = False) -> DerivationCase:
    x, lengths = d("B T C"), d.lengths() if padding else np.full(d.B, d.T)
    if padding:
        lengths[0] = 0
        x[-1, 1] = x[-1, 0]  # ties
    return reference(name, x, lengths if padding else None, names={"lengths": lengths})


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "linear": lambda d: reference("linear", d("B T I"), d("I O"), d("O")),
    "relu": relu,
    "gelu": gelu,
    "gelu, tanh": partial(gelu, approximate="tanh"),
    "silu": lambda d: reference("silu", d("B T C")),
    "tanh": lambda d: reference("tanh", d("B T C")),
    "dense": dense,
    "dense, gelu": partial(dense, activation="gelu"),
    "dense, gelu_tanh": partial(dense, activation="gelu_tanh"),
    "dense, silu": partial(dense, activation="silu"),
    "swiglu": lambda d: reference("swiglu", d("B T F"), d("B T F")),
    "softmax": lambda d: reference("softmax", d("B T V")),
    "log_softmax": lambda d: reference("log_softmax", d("B T V")),
    "layernorm": lambda d: reference("layernorm", d("B T C"), d("C"), d("C")),
    "rmsnorm": lambda d: reference("rmsnorm", d("B T C"), d("C")),
    "embedding": lambda d: reference("embedding", d.integers("B T", d.V), d("V C")),
    "gather": lambda d: reference("gather", d("B T C"), d.integers("B K", d.T)),
    "dropout": dropout,
    "mean_pool": partial(pool, "mean_pool"),
    "mean_pool, padding": partial(pool, "mean_pool", padding=True),
    "max_pool": partial(pool, "max_pool"),
    "max_pool, padding": partial(pool, "max_pool", padding=True),
    "attention": attention,
}

"""The derivations of the operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ... import ops
from ...rng import random_uint16
from .case import DerivationCase, Sizes, reference


def pattern_and_mask(d: Sizes) -> tuple[ops.Pattern | None, np.ndarray]:
    """A pattern, and the pairs that it allows (B, H, T, S)."""
    pattern = [None, ops.Causal(), ops.Local(1), ops.Padding(d.lengths("S"))][d.seed % 4]
    table = (pattern or ops.Full()).table(d.H, d.T, d.S, np)
    return pattern, np.broadcast_to(np.True_ if table is None else table, (d.B, d.H, d.T, d.S))


def attention(d: Sizes) -> DerivationCase:
    small(d)
    d.sizes |= {"G": 2, "H": 4}
    pattern, mask = pattern_and_mask(d)
    return reference("attention", d("B H T D"), d("B G S D"), d("B G S D"), pattern, names={"m": mask})


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


def small(d: Sizes) -> None:
    """Sizes from 2 to 6, where many indices meet in one product."""
    d.left = [size for size in d.left if size <= 6]


def relative_shift(d: Sizes) -> DerivationCase:
    d.sizes["R"] = d.S + d.T - 1
    return reference("relative_shift", d("B H T R"))


def relative_attention(d: Sizes) -> DerivationCase:
    small(d)
    d.sizes["R"] = d.S + d.T - 1
    q, k, v, r, biases = d("B H T D"), d("B H S D"), d("B H S D"), d("H R D"), (d("H D"), d("H D"))
    pattern, mask = pattern_and_mask(d)
    return reference("relative_attention", q, k, v, r, *biases, pattern, names={"m": mask})


def cross_entropy(d: Sizes, ignore_index: int | None = None, **options: float) -> DerivationCase:
    targets = d.integers("B T", d.V)
    if ignore_index is not None:
        targets[0, 0] = ignore_index
    return reference("cross_entropy", d("B T V"), targets, ignore_index, **options)


def sinusoidal_positions(d: Sizes) -> DerivationCase:
    return reference("sinusoidal_positions", d.T, d.C, dtype=np.float64, start=d.seed % 3)


# For a head of three pairs: one keeps its frequency, one is slowed down, and one is in between.
SCALING = {"factor": 8.0, "low_freq_factor": 0.05, "high_freq_factor": 0.5, "original_max_position_embeddings": 4}


def rotary_frequencies(d: Sizes, kind: str = "default") -> DerivationCase:
    kinds = {"default": 0.0, "linear": 1.0, "llama3": 2.0}
    scaling = {"default": None, "linear": {"rope_type": kind, "factor": 8.0}, "llama3": {"rope_type": kind, **SCALING}}
    names = kinds | SCALING | {"scaling": kinds[kind]}
    return reference("rotary_frequencies", 6, 10000.0, scaling[kind], names=names)


def rotary(d: Sizes) -> DerivationCase:
    d.sizes["D"] = 2 * d.I
    names = {"θ": ops.rotary_frequencies(d.D)}
    return reference("rotary", d("B H T D"), d.seed % 3, names=names)


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
    "cross_entropy": cross_entropy,
    "cross_entropy, ignored": partial(cross_entropy, ignore_index=-1),
    "cross_entropy, smoothing": partial(cross_entropy, label_smoothing=0.1),
    "cross_entropy, smoothing, ignored": partial(cross_entropy, ignore_index=0, label_smoothing=0.1),
    "layernorm": lambda d: reference("layernorm", d("B T C"), d("C"), d("C")),
    "rmsnorm": lambda d: reference("rmsnorm", d("B T C"), d("C")),
    "embedding": lambda d: reference("embedding", d.integers("B T", d.V), d("V C")),
    "gather": lambda d: reference("gather", d("B T C"), d.integers("B K", d.T)),
    "sinusoidal_positions": sinusoidal_positions,
    "rotary_frequencies": rotary_frequencies,
    "rotary_frequencies, linear": partial(rotary_frequencies, kind="linear"),
    "rotary_frequencies, llama3": partial(rotary_frequencies, kind="llama3"),
    "rotary": rotary,
    "dropout": dropout,
    "mean_pool": partial(pool, "mean_pool"),
    "mean_pool, padding": partial(pool, "mean_pool", padding=True),
    "max_pool": partial(pool, "max_pool"),
    "max_pool, padding": partial(pool, "max_pool", padding=True),
    "attention": attention,
    "relative_shift": relative_shift,
    "relative_attention": relative_attention,
}

"""The derivations of the operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ... import ops
from ...ops.cross_entropy import given_targets
from ...rng import Key, random_uint16
from .case import DerivationCase, Sizes


def padding(d: Sizes) -> ops.Pattern:
    lengths = d.lengths("S")
    lengths[0] = 0  # a sequence that is all padding
    return ops.Padding(lengths)


PATTERNS: dict[str, Callable[[Sizes], ops.Pattern]] = {
    "full": lambda d: ops.Full(),
    "causal": lambda d: ops.Causal(),
    "local": lambda d: ops.Local(1),
    "padding": padding,
}


def allowed(q: np.ndarray, k: np.ndarray, pattern: ops.Pattern | None) -> dict[str, np.ndarray]:
    """The pairs that a pattern allows, (B, H, T, S)."""
    shape = (*q.shape[:3], k.shape[2])
    table = (pattern or ops.Full()).table(shape[1], shape[2], shape[3], np)
    return {"m": np.broadcast_to(np.True_ if table is None else table, shape)}


def drawn(x: np.ndarray, p: float, key: Key, *_: np.ndarray) -> dict[str, np.ndarray]:
    """The random integers of dropout."""
    return {"u": random_uint16(key, x.size).reshape(x.shape).astype(float)}


def whole(x: np.ndarray, lengths: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Lengths that say that nothing is padding, if there are none."""
    return {"lengths": np.full(x.shape[0], x.shape[1]) if lengths is None else lengths}


ACTIVATIONS = {name: float(number) for number, name in enumerate(ops.ACTIVATIONS)}

# What a derivation uses besides the arguments and the cache, given the arguments.
NAMES: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": lambda q, k, v, pattern=None: allowed(q, k, pattern),
    "relative_attention": lambda q, k, v, r, content_bias, position_bias, pattern=None: allowed(q, k, pattern),
    "dense": lambda x, w, b, activation="relu": ACTIVATIONS | {"activation": ACTIVATIONS[activation]},
    "cross_entropy": lambda logits, targets, ignore_index=None, **_: given_targets(logits, targets, ignore_index, 0),
    "dropout": drawn,
    "dropout_add": drawn,
    "gelu": lambda x, approximate="none": {"none": 0.0, "approximate": float(approximate != "none")},
    "max_pool": whole,
    "mean_pool": whole,
    "rotary": lambda x, start=0, **options: {"θ": ops.rotary_frequencies(x.shape[-1], **options)},
}


def reference(name: str, *args: Any, names: Mapping[str, Any] | None = None, **options: Any) -> DerivationCase:
    """The reference of an operation and of its backward, if it has one."""
    op, op_backward = getattr(ops, name), getattr(ops, f"{name}_backward", None)
    if names is None:
        names = NAMES[name](*args, **options) if name in NAMES else {}
    if op_backward is None:
        return DerivationCase(op, None, args, names, options)
    return DerivationCase(op.reference, op_backward.reference, args, names, options)


def attention(d: Sizes, kind: str = "full") -> DerivationCase:
    d.sizes |= {"B": 2, "G": 2, "H": 4}
    d.left = [size for size in d.left if size in (3, 5, 6)]
    q, k, v, pattern = d("B H T D"), d("B G S D"), d("B G S D"), PATTERNS[kind](d)
    return reference("attention", q, k, v, pattern)


def relu(d: Sizes) -> DerivationCase:
    x = d("B T C")
    x[0, 0, 0] = 0  # the kink
    return reference("relu", x)


def layernorm(d: Sizes) -> DerivationCase:
    d.left.remove(2)  # with C = 2 nothing is left of the gradient: normalising removes two directions
    return reference("layernorm", d("B T C"), d("C"), d("C"))


def dropout(d: Sizes, p: float | None = None) -> DerivationCase:
    x = d("B T C")
    if p is None:
        u = random_uint16(d.key, x.size)
        p = (float(np.sort(u)[x.size // 3]) - 0.3) / 65536  # rounded up; one element is just kept
    return reference("dropout", x, p, d.key)


def pool(name: str, d: Sizes, padding: bool = False) -> DerivationCase:
    x, lengths = d("B T C"), d.lengths() if padding else None
    if lengths is not None:
        lengths[0] = 0
        x[-1, 1] = x[-1, 0]  # ties
    return reference(name, x, lengths)


def relative_shift(d: Sizes) -> DerivationCase:
    d.sizes["R"] = d.S + d.T - 1
    return reference("relative_shift", d("B H T R"))


def relative_attention(d: Sizes, kind: str = "full") -> DerivationCase:
    d.sizes["R"] = d.S + d.T - 1
    q, k, v, r, biases = d("B H T D"), d("B H S D"), d("B H S D"), d("H R D"), (d("H D"), d("H D"))
    return reference("relative_attention", q, k, v, r, *biases, PATTERNS[kind](d))


def cross_entropy(d: Sizes, ignore_index: int | None = None, ignored: int = 1, **options: Any) -> DerivationCase:
    """ignored: how many of the targets; all but one if it is −1."""
    targets = d.integers("B T", d.V)
    if ignore_index is not None:
        targets.reshape(-1)[:ignored] = ignore_index
    return reference("cross_entropy", d("B T V"), targets, ignore_index, **options)


def sinusoidal_positions(d: Sizes) -> DerivationCase:
    d.sizes["C"] = 5  # more than one pair
    return reference("sinusoidal_positions", d.T, d.C, dtype=np.float64, start=3)


# For a head of three pairs: one keeps its frequency, one is slowed down, and one is in between.
SCALING = {"factor": 8.0, "low_freq_factor": 0.05, "high_freq_factor": 0.5, "original_max_position_embeddings": 4}


def rotary_frequencies(d: Sizes, kind: str = "none") -> DerivationCase:
    kinds = {"none": 0.0, "linear": 1.0, "llama3": 2.0}
    scaling = {"none": None, "linear": {"rope_type": kind, "factor": 8.0}, "llama3": {"rope_type": kind, **SCALING}}
    names = kinds | SCALING | {"scaling": kinds[kind]}
    return reference("rotary_frequencies", 6, 100.0, scaling[kind], names=names)


def rotary(d: Sizes) -> DerivationCase:
    d.sizes |= {"B": 2, "H": 3, "T": 5, "D": 8}
    return reference("rotary", d("B H T D"), 3)


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "add": lambda d: reference("add", d("B T C"), d("B T C")),
    "linear": lambda d: reference("linear", d("B T I"), d("I O"), d("O")),
    "relu": relu,
    "squared_relu": lambda d: reference("squared_relu", d("B T C")),
    "gelu": lambda d: reference("gelu", d("B T C")),
    "gelu, tanh": lambda d: reference("gelu", d("B T C"), approximate="tanh"),
    "silu": lambda d: reference("silu", d("B T C")),
    "tanh": lambda d: reference("tanh", d("B T C")),
    "dense": lambda d: reference("dense", d("B T I"), d("I O"), d("O")),
    "dense, gelu": lambda d: reference("dense", d("B T I"), d("I O"), d("O"), activation="gelu"),
    "dense, gelu_tanh": lambda d: reference("dense", d("B T I"), d("I O"), d("O"), activation="gelu_tanh"),
    "dense, silu": lambda d: reference("dense", d("B T I"), d("I O"), d("O"), activation="silu"),
    "swiglu": lambda d: reference("swiglu", d("B T F"), d("B T F")),
    "softmax": lambda d: reference("softmax", d("B T V")),
    "log_softmax": lambda d: reference("log_softmax", d("B T V")),
    "cross_entropy": cross_entropy,
    "cross_entropy, ignored": partial(cross_entropy, ignore_index=-1),
    "cross_entropy, all ignored": partial(cross_entropy, ignore_index=-100, ignored=1000),
    "cross_entropy, one counted": partial(cross_entropy, ignore_index=-100, ignored=-1),
    "cross_entropy, smoothing": partial(cross_entropy, label_smoothing=0.1),
    "cross_entropy, smoothing, ignored": partial(cross_entropy, ignore_index=0, label_smoothing=0.1),
    "soft_cross_entropy": lambda d: reference("soft_cross_entropy", d("B T V"), d("B T V")),
    "layernorm": layernorm,
    "rmsnorm": lambda d: reference("rmsnorm", d("B T C"), d("C")),
    "embedding": lambda d: reference("embedding", d.integers("B T", d.V), d("V C")),
    "gather": lambda d: reference("gather", d("B T C"), d.integers("B K", d.T)),
    "sinusoidal_positions": sinusoidal_positions,
    "rotary_frequencies": rotary_frequencies,
    "rotary_frequencies, linear": partial(rotary_frequencies, kind="linear"),
    "rotary_frequencies, llama3": partial(rotary_frequencies, kind="llama3"),
    "rotary": rotary,
    "dropout": dropout,
    "dropout, nearly all": partial(dropout, p=1 - 1e-6),
    "dropout_add": lambda d: reference("dropout_add", d("B T C"), 0.4, d.key, d("B T C")),
    "mean_pool": partial(pool, "mean_pool"),
    "mean_pool, padding": partial(pool, "mean_pool", padding=True),
    "max_pool": partial(pool, "max_pool"),
    "max_pool, padding": partial(pool, "max_pool", padding=True),
    "attention": attention,
    "attention, causal": partial(attention, kind="causal"),
    "attention, local": partial(attention, kind="local"),
    "attention, padding": partial(attention, kind="padding"),
    "relative_shift": relative_shift,
    "relative_attention": relative_attention,
    "relative_attention, causal": partial(relative_attention, kind="causal"),
    "relative_attention, padding": partial(relative_attention, kind="padding"),
}

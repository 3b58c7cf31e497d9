"""The derivations of the twins in `kernels/`, which are checked on the twins themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import nn, ops
from ...dispatch import fast
from ...ops import precision
from ...ops.dropout import decide
from ...optim import adam as adam_module
from ...optim.adam import adam_step
from . import operations
from .case import DerivationCase, Sizes


def twin(name: str, *args: Any, names: Mapping[str, Any] | None = None, **options: Any) -> DerivationCase:
    """The NumPy twin of an operation and of its backward."""
    op = getattr(ops, name).twins[np.ndarray]
    return DerivationCase(op, backward_of(op), args, names or {}, options)


def backward_of(twin: Callable) -> Callable:
    """The backward in the module of a twin."""
    backwards = getattr(ops, f"{twin.__name__}_backward").twins.values()
    return next(backward for backward in backwards if backward.__module__ == twin.__module__)


def compiled(case: Callable[[Sizes], DerivationCase]) -> Callable[[Sizes], DerivationCase]:
    """The same case for the twin that runs inside `fast()`. `case` may also be one of the reference."""

    def of_fast_twin(d: Sizes) -> DerivationCase:
        found = case(d)
        with fast():  # registers it
            module = next(m for m in (ops, adam_module, precision) if hasattr(m, found.op.__name__))
        op = getattr(module, found.op.__name__).fast_twins[np.ndarray]
        return found._replace(op=op, op_backward=found.op_backward and backward_of(op))

    return of_fast_twin


def cross_entropy(d: Sizes) -> DerivationCase:
    """The last rows of two sequences do not count."""
    logits, targets = d("B T V"), d.integers("B T", d.V)
    targets[:2, -1] = ops.IGNORED
    rows = {"targets": np.maximum(targets, 0).ravel()}
    return twin("cross_entropy", logits, targets, ops.IGNORED, label_smoothing=0.1, names=rows)


def dense(d: Sizes, activation: str = "relu") -> DerivationCase:
    names = {name: number for number, name in enumerate(ops.ACTIVATIONS)}
    x, w, b = d("B T I"), d("I O") / d.scale**2, d("O") / d.scale  # h of order 1: far out, φ is lost in 1 − Φ
    return twin("dense", x, w, b, activation, names=names | {"activation": names[activation]})


def dropout(d: Sizes) -> DerivationCase:
    """With the mask, which the compiled twin does not keep."""
    x = d("B T C")
    keep, scale = decide(0.25, d.key, x.shape, np)
    return twin("dropout", x, 0.25, d.key, names={"keep": keep, "scale": scale})


def layernorm(d: Sizes) -> DerivationCase:
    """Rows of at least three numbers: with two, x̂ is 1 and −1, and dx is nearly 0."""
    d.left.remove(2)
    return twin("layernorm", d("B T C"), d("C"), d("C"))


def allowed(d: Sizes) -> tuple[ops.Pattern | None, np.ndarray]:
    """A pattern by which every query sees a key, and its table (B, H, T, S)."""
    d.sizes |= dict(zip("TS", sorted((d.T, d.S)), strict=True))
    edges = d.generator.random((d.S, d.S)) < 0.5
    pattern = [None, ops.Causal(), ops.Edges(edges | np.eye(d.S, dtype=bool))][d.seed % 3]
    table = (pattern or ops.Full()).table(d.H, d.T, d.S, np)
    return pattern, np.broadcast_to(np.True_ if table is None else table, (d.B, d.H, d.T, d.S))


def keys(d: Sizes, letters: str) -> np.ndarray:
    """Keys for queries of any scale: the scores of a row are large, so that m is subtracted, but they differ little."""
    return (d(letters) + 200 * d("D")) / d.scale**2


def attention(d: Sizes) -> DerivationCase:
    """J tiles of W = 2 keys."""
    d.sizes |= {"B": 2, "G": 2, "H": 4}
    d.left = [size for size in d.left if size in (3, 5, 6)]
    pattern, table = allowed(d)
    names = {"allowed": table, "W": 2, "J": -(-d.S // 2)}
    return twin("attention", d("B H T D"), keys(d, "B G S D"), d("B G S D"), pattern, names=names)


def compiled_attention(d: Sizes) -> DerivationCase:
    """The fast twin: tiles of W = 2 keys, and of as many queries, and a pattern of intervals."""
    d.sizes |= {"B": 2, "G": 2, "H": 4}
    d.left = [size for size in d.left if size in (3, 5, 6)]
    d.sizes |= dict(zip("TS", sorted((d.T, d.S)), strict=True))
    pattern = [None, ops.Causal(), ops.Local(1), ops.Padding(np.array([d.S, d.S - 1]))][d.seed % 4]
    names = {"W": 2, "J": -(-d.S // 2), "I": -(-d.T // 2)}
    with fast():  # registers the twin
        op = ops.attention.fast_twins[np.ndarray]
    (op_backward,) = (twin for twin in ops.attention_backward.twins.values() if twin.__module__ == op.__module__)
    return DerivationCase(op, op_backward, (d("B H T D"), keys(d, "B G S D"), d("B G S D"), pattern), names)


def relative_attention(d: Sizes) -> DerivationCase:
    """The tile has every second query, and every second key, from the second on."""
    d.sizes |= {"B": 2, "T": 4, "S": 7}
    d.left = [size for size in d.left if size in (2, 3)]
    pattern, table = allowed(d)
    d.sizes["R"] = d.S + d.T - 1
    tile = {"t₀": 1, "s₀": 1, "κ": 2, "X": d.T // 2, "Y": d.S // 2, "E": d.T // 2 + d.S // 2 - 1}
    names = tile | {"allowed": table, "R": d.R, "I": d.T * d.R}
    arrays = keys(d, "B H S D"), d("B H S D"), d("H R D") / d.scale**2, d("H D"), d("H D")
    return twin("relative_attention", d("B H T D"), *arrays, pattern, names=names)


def round_into(d: Sizes) -> DerivationCase:
    return DerivationCase(precision.round_into, None, (d("F"), np.zeros(d.F)))


def adam(d: Sizes) -> DerivationCase:
    w, g, m, v = d("F"), d("F"), d("F"), d("F") ** 2
    before = {"w0": w.copy(), "m0": m.copy(), "v0": v.copy(), "β1": 0.9, "β2": 0.99}
    return DerivationCase(adam_step.twins[np.ndarray], None, (w, g, m, v, 0.01, (0.9, 0.99), 1e-3, 3), before)


def scores_by_place(d: Sizes) -> DerivationCase:
    """Of a token after others, for a block with relative positions."""
    from ...kernels.numpy_extend import scores_by_place

    C = d.sizes.setdefault("C", d.H * d.D)
    d.sizes["T"] = 1
    layer = nn.RelativeSelfAttention(C, d.H).to(dtype=np.float64)
    layer.position_bias.data[...] = d("H D")
    W = d("C H D")
    layer.position.w.data[...] = W.reshape(C, -1)
    names = {"W": W, "P": ops.sinusoidal_positions(d.S, C, np, np.float64), "position_bias": layer.position_bias.data}
    return DerivationCase(scores_by_place, None, (d("B H T D"), layer, d.S), names)


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "adam_step.numpy": adam,
    "attention.numpy": attention,
    "cross_entropy.numpy": cross_entropy,
    "dense.numpy": dense,
    "dense.numpy, gelu": partial(dense, activation="gelu"),
    "dense.numpy, gelu_tanh": partial(dense, activation="gelu_tanh"),
    "dense.numpy, silu": partial(dense, activation="silu"),
    "dropout.numpy": lambda d: twin("dropout", d("B T C"), 0.25, d.key),
    "embedding.numpy": lambda d: twin("embedding", d.integers("B T", d.V), d("V C")),
    "layernorm.numpy": layernorm,
    "relative_attention.numpy": relative_attention,
    "rmsnorm.numpy": lambda d: twin("rmsnorm", d("B T C"), d("C")),
    "scores_by_place.numpy": scores_by_place,
    "swiglu.numpy": lambda d: twin("swiglu", d("B T F"), d("B T F")),
}

COMPILED = {
    **{name: CASES[f"{name}.numpy"] for name in ("adam_step", "cross_entropy", "embedding", "layernorm")},
    **{name: CASES[f"{name}.numpy"] for name in ("rmsnorm", "swiglu")},
    "dropout": dropout,
    **{name: operations.CASES[name] for name in ("add", "linear", "rotary", "symmetric_kl")},
    "round_into": round_into,
}

if find_spec("numba"):
    CASES |= {f"{name}.numba": compiled(case) for name, case in COMPILED.items()}
    for activation in "", ", gelu", ", gelu_tanh", ", silu":
        CASES[f"dense.numba{activation}"] = compiled(CASES[f"dense.numpy{activation}"])
    CASES["attention.numba"] = compiled_attention

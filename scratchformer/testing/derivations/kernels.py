"""The derivations of the twins in `kernels/`, which are checked on the twins themselves."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import nn, ops
from ...dispatch import fast, twins_of
from ...ops.dropout import decide
from . import operations
from .case import DerivationCase, Sizes


def twin(
    name: str, *args: Any, names: Mapping[str, Any] | None = None, cache: str = "", **options: Any
) -> DerivationCase:
    """The NumPy twin of an operation and of its backward. cache: the names of what its cache has."""
    op = twin_of(getattr(ops, name))
    return DerivationCase(naming(op, cache), backward_of(op), args, names or {}, options)


def naming(op: Callable, cache: str) -> Callable:
    """`op`, which gives these names to what its cache has: equations can then refer to it."""
    if not cache:
        return op
    kind = namedtuple("kind", cache)  # type: ignore[misc]  # mypy wants to know the names

    @wraps(op)
    def named(*args: Any, **options: Any) -> tuple[Any, Any]:
        y, kept = op(*args, **options)
        return y, kind(*kept)

    return named


def twin_of(op: Any, fast: bool = False) -> Any:
    """The forward of a NumPy or, with `fast`, of a compiled twin."""
    return next(t.forward for t in twins_of(op, fast=fast) if not t.forward.__module__.endswith(".numpy_half"))


def backward_of(twin: Callable) -> Callable:
    """The backward in the module of a twin."""
    found: Callable = getattr(import_module(twin.__module__), f"{twin.__name__}_backward")
    return found


def compiled(case: Callable[[Sizes], DerivationCase]) -> Callable[[Sizes], DerivationCase]:
    """The same case for the twin that runs inside `fast()`. `case` may also be one of the reference."""

    def of_fast_twin(d: Sizes) -> DerivationCase:
        found = case(d)
        with fast():  # registers it
            op = twin_of(getattr(ops, found.op.__name__), fast=True)
        names = {"dense": DENSE}.get(op.__name__, "")
        return found._replace(op=naming(op, names), op_backward=found.op_backward and backward_of(op))

    return of_fast_twin


DENSE = "linear kept activation"  # what the caches of its twins have


def dense(d: Sizes, activation: str = "relu") -> DerivationCase:
    names = {name: number for number, name in enumerate(ops.ACTIVATIONS)}
    x, w, b = d("B T I"), d("I O") / d.scale**2, d("O") / d.scale  # h of order 1: far out, φ is lost in 1 − Φ
    names["activation"] = names[activation]
    return twin("dense", x, w, b, activation, names=names, cache=DENSE)


def dropout(d: Sizes) -> DerivationCase:
    """With the mask, which the compiled twin does not keep."""
    x = d("B T C")
    keep, scale = decide(0.25, d.key, x.shape, np)
    return twin("dropout", x, 0.25, d.key, names={"keep": keep, "scale": scale})


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
    arrays = d("B H T D"), keys(d, "B G S D"), d("B G S D")
    return twin("attention", *arrays, pattern, names=names, cache="q k v y shift log_sum bounds pattern")


def compiled_attention(d: Sizes) -> DerivationCase:
    """The fast twin: tiles of W = 2 keys, and of as many queries, and a pattern of intervals."""
    d.sizes |= {"B": 2, "G": 2, "H": 4}
    d.left = [size for size in d.left if size in (3, 5, 6)]
    d.sizes |= dict(zip("TS", sorted((d.T, d.S)), strict=True))
    pattern = [None, ops.Causal(), ops.Local(1), ops.Padding(np.array([d.S, d.S - 1]))][d.seed % 4]
    names = {"W": 2, "J": -(-d.S // 2), "I": -(-d.T // 2)}
    with fast():  # registers the twin
        op = twin_of(ops.attention, fast=True)
    arrays = d("B H T D"), keys(d, "B G S D"), d("B G S D")
    named = naming(op, "q k v y shift inverse begin end amx")
    return DerivationCase(named, backward_of(op), (*arrays, pattern), names)


def relative_attention(d: Sizes) -> DerivationCase:
    """The tile has every second query, and every second key, from the second on."""
    d.sizes |= {"B": 2, "T": 4, "S": 7}
    d.left = [size for size in d.left if size in (2, 3)]
    pattern, table = allowed(d)
    d.sizes["R"] = d.S + d.T - 1
    tile = {"t₀": 1, "s₀": 1, "κ": 2, "X": d.T // 2, "Y": d.S // 2, "E": d.T // 2 + d.S // 2 - 1}
    names = tile | {"allowed": table, "R": d.R, "I": d.T * d.R}
    arrays = keys(d, "B H S D"), d("B H S D"), d("H R D") / d.scale**2, d("H D"), d("H D")
    return twin(
        "relative_attention", d("B H T D"), *arrays, pattern, names=names, cache="arrays y shift log_sum bounds pattern"
    )


def extend_block(d: Sizes) -> DerivationCase:
    """A token after `past` others through a pre-norm block with relative positions, its weights by head."""
    C, H, past = d.sizes.setdefault("C", d.H * d.D), d.H, d.S
    block = nn.TransformerBlock(C, H, "pre", d_ff=d.F, causal=True, relative=True, eps=1e-3).to(dtype=np.float64)
    for p in block.parameters():
        p.data[...] = d.generator.standard_normal(p.data.shape)
    attention: Any = block.attention
    forward: Any = block.feedforward
    stored = d.generator.standard_normal((2, 1, H, past + 2, d.D))
    weights = {
        **{f"W{n}": getattr(attention, layer).w.data.reshape(C, H, d.D) for n, layer in PROJECTIONS.items()},
        **{"Wo": attention.unify.w.data.reshape(H, d.D, C), "bo": attention.unify.b.data},
        **{"W1": forward.up.w.data, "b1": forward.up.b.data, "W2": forward.down.w.data, "b2": forward.down.b.data},
        **{
            f"{n}{i}": getattr(norm, n).data
            for i, norm in ((1, block.norm1), (2, block.norm2))
            for n in ("gamma", "beta")
        },
        **{n: getattr(attention, n).data for n in ("content_bias", "position_bias")},
    }
    after = {"K": lambda: stored[0, 0, :, : past + 1], "V": lambda: stored[1, 0, :, : past + 1]}
    names = weights | after | {"eps": 1e-3, "P": ops.sinusoidal_positions(past + 1, C, np, np.float64)}
    d.sizes |= {"B": 1, "T": 1}
    twin = twin_of(nn.block.extend_block)
    return DerivationCase(twin, None, (d("B T C"), block, tuple(stored), past), names)


PROJECTIONS = {"q": "query", "k": "key", "v": "value", "r": "position"}


def extend_decoder_block(d: Sizes) -> DerivationCase:
    """A token after `past` others through a pre-norm decoder block, which sees two positions of a memory of three."""
    C, H, past, M = d.sizes.setdefault("C", d.H * d.D), d.H, d.S, 3
    block = nn.DecoderBlock(C, H, "pre", d_ff=d.F, bias=False, eps=1e-3).to(dtype=np.float64)
    for p in block.parameters():
        p.data[...] = d.generator.standard_normal(p.data.shape)
    attention, cross = block.attention, block.cross
    forward: Any = block.feedforward
    stored, memory = (d.generator.standard_normal((2, 1, H, length, d.D)) for length in (past + 2, M))
    maps: dict[str, Any] = {"Wq": attention.query, "Wk": attention.key, "Wv": attention.value, "Wr": cross.query}
    outputs: dict[str, Any] = {"bo": attention.unify, "bu": cross.unify}
    norms = (1, block.norm1), (2, block.norm2), (3, block.norm3)
    weights = {
        **{name: layer.w.data.reshape(C, H, d.D) for name, layer in maps.items()},
        **{"Wo": attention.unify.w.data.reshape(H, d.D, C), "Wu": cross.unify.w.data.reshape(H, d.D, C)},
        **{name: layer.b.data for name, layer in outputs.items()},
        **{"W1": forward.up.w.data, "b1": forward.up.b.data, "W2": forward.down.w.data, "b2": forward.down.b.data},
        **{f"{n}{i}": getattr(norm, n).data for i, norm in norms for n in ("gamma", "beta")},
    }
    after = {"K": lambda: stored[0, 0, :, : past + 1], "V": lambda: stored[1, 0, :, : past + 1]}
    names = weights | after | {"A": memory[0, 0], "E": memory[1, 0], "ℓ": M - 1, "eps": 1e-3}
    d.sizes |= {"B": 1, "T": 1, "M": M}
    twin = twin_of(nn.decoder_block.extend_decoder_block)
    args = d("B T C"), block, tuple(stored), past, tuple(memory), ops.Padding(np.array([M - 1]))
    return DerivationCase(twin, None, args, names)


def extend_output(d: Sizes) -> DerivationCase:
    """A row times a matrix that three cores could divide."""
    d.sizes |= {"B": 1, "T": 1}
    output = nn.Linear(d.C, d.V).to(dtype=np.float64)
    for p, letters in zip(output.parameters(), ("C V", "V"), strict=True):
        p.data[...] = d(letters)
    names = {**{p.name: p.data for p in output.parameters()}, "I": 3}
    return DerivationCase(twin_of(nn.embedding.extend_output), None, (d("B T C"), output), names)


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "attention.numpy": attention,
    "dense.numpy": dense,
    "dense.numpy, gelu": partial(dense, activation="gelu"),
    "dense.numpy, gelu_tanh": partial(dense, activation="gelu_tanh"),
    "dense.numpy, silu": partial(dense, activation="silu"),
    "extend_block.numpy": extend_block,
    "extend_decoder_block.numpy": extend_decoder_block,
    "extend_output.numpy": extend_output,
    "relative_attention.numpy": relative_attention,
}

COMPILED = {
    "dropout": dropout,
    **{name: operations.CASES[name] for name in ("embedding", "linear", "rotary")},
}

if find_spec("numba"):
    CASES |= {f"{name}.numba": compiled(case) for name, case in COMPILED.items()}
    for activation in "", ", gelu", ", gelu_tanh", ", silu":
        CASES[f"dense.numba{activation}"] = compiled(CASES[f"dense.numpy{activation}"])
    CASES["attention.numba"] = compiled_attention

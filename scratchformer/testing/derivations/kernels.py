"""The derivations of the twins in `kernels/`, which are checked on the twins themselves."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import nn, ops
from ...dispatch import fast, twins_of
from . import operations
from .case import DerivationCase, Sizes


def twin(
    name: str, *args: Any, names: Mapping[str, Any] | None = None, cache: str = "", **options: Any
) -> DerivationCase:
    """The NumPy twin of an operation and of its backward. cache: the names of what its cache has."""
    op = twin_of(getattr(ops, name))
    return DerivationCase(naming(op, cache), backward_of(op), args, names or {}, options)


def naming(op: Callable, cache: str) -> Callable:
    """`op` with a cache whose entries have these names, so that equations can refer to them."""
    if not cache:
        return op
    kind = namedtuple("kind", cache)  # type: ignore[misc]  # mypy wants to know the names

    @wraps(op)
    def named(*args: Any, **options: Any) -> tuple[Any, Any]:
        y, kept = op(*args, **options)
        return y, kind(*kept)

    return named


def twin_of(op: Any, fast: bool = False) -> Any:
    """The forward of a twin for NumPy arrays; with `fast`, of a compiled one."""
    others = ".numpy_half", "compiler.twins"  # their derivations are those of the references
    return next(t.forward for t in twins_of(op, fast=fast) if not t.forward.__module__.endswith(others))


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
        return found._replace(op=op, op_backward=found.op_backward and backward_of(op))

    return of_fast_twin


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
    "attention.numpy": attention,
    "relative_attention.numpy": relative_attention,
    "scores_by_place.numpy": scores_by_place,
}

if find_spec("numba"):
    CASES["linear.numba"] = compiled(operations.CASES["linear"])
    CASES["attention.numba"] = compiled_attention

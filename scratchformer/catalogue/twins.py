"""Twins that are written by hand, in `kernels/`. Their derivations are checked on the twins themselves."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from .. import nn, ops
from ..dispatch import fast, twins_of
from ..testing.draw import Sizes
from .attention import shared_heads
from .entry import SAME_SHAPE, DerivationCase, Entry


def of_twin(
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
    return getattr(import_module(twin.__module__), f"{twin.__name__}_backward")


def compiled(d: Sizes, operation: Any) -> DerivationCase:
    with fast():  # registers the twin
        op = twin_of(operation, fast=True)
    return DerivationCase(op, backward_of(op), (d("B T I"), d("I O"), d("O")))


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
    shared_heads(d)
    pattern, table = allowed(d)
    names = {"allowed": table, "W": 2, "J": -(-d.S // 2)}
    arrays = d("B H T D"), keys(d, "B G S D"), d("B G S D")
    return of_twin("attention", *arrays, pattern, names=names, cache="q k v y shift log_sum bounds pattern")


def compiled_attention(d: Sizes) -> DerivationCase:
    """The fast twin: tiles of W = 2 keys, and of as many queries, and a pattern of intervals."""
    shared_heads(d)
    d.sizes |= dict(zip("TS", sorted((d.T, d.S)), strict=True))
    pattern = [None, ops.Causal(), ops.Local(1), ops.Padding(np.array([d.S, d.S - 1]))][d.seed % 4]
    names = {"W": 2, "J": -(-d.S // 2), "I": -(-d.T // 2)}
    with fast():
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
    return of_twin(
        "relative_attention", d("B H T D"), *arrays, pattern, names=names, cache="arrays y shift log_sum bounds pattern"
    )


def scores_by_place(d: Sizes) -> DerivationCase:
    """Of a token after others, for a block with relative positions."""
    from ..kernels.numpy_extend import scores_by_place

    C = d.sizes.setdefault("C", d.H * d.D)
    d.sizes["T"] = 1
    layer = nn.RelativeSelfAttention(C, d.H).to(dtype=np.float64)
    layer.position_bias.data[...] = d("H D")
    W = d("C H D")
    layer.position.w.data[...] = W.reshape(C, -1)
    names = {"W": W, "P": ops.sinusoidal_positions(d.S, C, np, np.float64), "position_bias": layer.position_bias.data}
    return DerivationCase(scores_by_place, None, (d("B H T D"), layer, d.S), names)


def other_arrays(line: str, *others: tuple[str, str]) -> dict[str, str]:
    """Changes of a line, each of which takes the shape of another array: survivors."""
    return {f"{line} -> {line.replace(right, other, 1)}": SAME_SHAPE for right, other in others}


HEADS = other_arrays(
    "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v))",
    *(("(q, k, v)", others) for others in ("(q, k, k)", "(q, v, k)", "(q, v, v)", "(y, k, v)")),
)
GROUPS = "for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype"
TESTS = "tests/kernels/test_twins.py"

ENTRIES = [
    Entry(
        "attention.numpy",
        "kernels/numpy_attention.py",
        tests=f"{TESTS} tests/ops/test_attention.py tests/ops/test_all_operations.py "
        "-k 'without_heads or attention and (agrees or refused)'",
    )
    .derivation("", attention)
    .mistake(
        "A tile leaves out the row sum of dy times y",
        "It is the second term of the softmax's gradient: without it the rows of dz do not sum to 0.",
        replace={"output_delta = with_column(output, -delta)": "output_delta = with_column(output, 0 * delta)"},
        tests="tests/kernels/test_twins.py -k attention",
    )
    .mistake(
        "The log-sum-exp is kept without the row's maximum",
        "Where scores are large, backward and forward compute different probabilities.",
        replace={
            "(log_sum, ()) if bound <= SAFE else (shift, after)": "log_sum, ()",
            "np.ascontiguousarray(queries), (shift, log_sum)": "np.ascontiguousarray(queries), (log_sum,)",
        },
        tests="tests/kernels/test_twins.py -k attention",
    )
    .mistake(
        "All heads take the first head's pattern",
        "The other heads see, and pass gradients to, the wrong keys.",
        replace={
            "for heads, part in pattern.of_heads(H):": "for heads, part in [(slice(0, H), pattern.of_heads(H)[0][1])]:"
        },
        tests="tests/kernels -k each",
    )
    .mistake(
        "Part of a group overwrites the gradient of the part before it",
        "With shared keys, the gradients of all query heads of the group add up.",
        replace={"if heads.start % shared == 0:": "if True:"},
        tests="tests/kernels/test_twins.py -k grouped",
    )
    .survivors(
        "attention_backward",
        HEADS
        | other_arrays("(_, H, _, D), G = q.shape, k.shape[1]", ("q.", "y."), ("k.", "v."))
        | other_arrays(
            "for (part, runs), bound in zip(groups_of(q, k, v, pattern), bounds, strict=True):",
            *(("q, k, v", others) for others in ("y, k, v", "dq, k, v", "q, v, v", "q, dk, v", "q, k, k", "q, k, dv")),
        ),
    ),
    Entry(
        "relative_attention.numpy",
        "kernels/numpy_relative.py",
        tests=f"{TESTS} tests/ops/test_all_operations.py -k 'relative and (agrees or refused)'",
    )
    .derivation("", relative_attention)
    .mistake(
        "The last tile overwrites the gradient of r",
        "All tiles and sequences share r: their gradients are summed.",
        replace={"            dr[heads][near] += (db": "            dr[heads][near] = (db"},
        tests="tests/kernels/test_twins.py -k relative",
    )
    .survivors(
        "relative_attention_backward",
        HEADS
        | other_arrays("(_, _, T, D), S = q.shape, k.shape[2]", ("q.", "y."), ("k.", "v."))
        | other_arrays(f"{GROUPS}), bounds, strict=True):", ("q.shape", "dq.shape"), ("q.shape", "y.shape"))
        | {"shifted(db)[...] = da -> shifted(db)[...] += da": "db is 0 before"},
    ),
    Entry("scores_by_place.numpy", "kernels/numpy_extend.py")
    .derivation("", scores_by_place)
    .mistake(
        "one new token: query heads read the wrong head of keys",
        replace={"q = q.reshape(B, G, -1, D)": "q = q.reshape(B, -1, G, D).swapaxes(1, 2)"},
        tests="tests/kernels/test_extend.py -k rotary",
    )
    .mistake(
        "one new token: the window is one too wide",
        replace={"S - (layer.window or S)": "S - 1 - (layer.window or S)"},
        tests="tests/kernels/test_extend.py -k window",
    )
    .mistake(
        "a kernel: the new token overwrites the last key",
        replace={"keys[:, :, past] =": "keys[:, :, past - 1] ="},
        tests="tests/kernels/test_extend.py",
    ),
]
if find_spec("numba"):
    ENTRIES += [
        Entry(f"{op.__name__}.numba", "kernels/numba_linear.py", tests=f"{TESTS} -k {op.__name__}").derivation(
            "", compiled, operation=op
        )
        for op in (ops.linear, ops.dense)
    ]
    ENTRIES += [
        Entry(
            "attention.numba", "kernels/numba_attention.py", tests="tests/kernels/test_numba_attention.py"
        ).derivation("", compiled_attention),
        # A part of it, for another processor.
        Entry("amx.numba", "kernels/numba_amx.py", tests="tests/kernels/test_numba_attention.py"),
        Entry("portable.numba", "kernels/numba_portable.py", tests="tests/kernels/test_portable.py"),
    ]

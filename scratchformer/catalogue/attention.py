"""Attention, with absolute and with relative positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..testing.draw import Draw, Sizes
from .entry import Arguments, OperationEntry, given

SCORES = "dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')"
KEYS = "dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd"
Rule = Callable[[Any], ops.Pattern | None]  # of a draw

PRODUCT = "dp = widen(dy) @ xp.matrix_transpose(widen(v))"
WIDENED = {  # survivors of both backwards
    f"{PRODUCT} -> {line}": "NumPy widens the other factor itself; PyTorch refuses factors of two types"
    for line in ("dp = dy @ xp.matrix_transpose(widen(v))", "dp = widen(dy) @ xp.matrix_transpose(v)")
}


def attention(d: Draw, pattern: Rule = lambda d: None, keys: str = "S", group: int = 0, scale: float = 1) -> Arguments:
    """group: the number of query heads that share each of two key heads. scale: that of the queries; with a large one,
    a kernel must subtract each row's maximum, or exponentials overflow.
    """
    if group:
        d.sizes["G"], d.sizes["H"] = 2, 2 * group
    heads = "G" if group else "H"
    q, k, v = d("B H T D"), d(f"B {heads} {keys} D"), d(f"B {heads} {keys} D")
    return given(scale * q, k, v, pattern(d))


def relative_attention(d: Draw, pattern: Rule = lambda d: None, keys: str = "S", scale: float = 1) -> Arguments:
    q, k, v, biases = d("B H T D"), d(f"B H {keys} D"), d(f"B H {keys} D"), (d("H D"), d("H D"))
    d.sizes["R"] = k.shape[2] + d.T - 1
    return given(scale * q, k, v, d("H R D"), *biases, pattern(d))


def relative_shift(d: Draw) -> Arguments:
    d.sizes["R"] = d.S + d.T - 1
    return given(d("B H T R"))


def causal(d: Draw) -> ops.Pattern:
    return ops.Causal()


def padding(d: Draw) -> ops.Pattern:
    return ops.Padding(d.lengths())


def empty(d: Draw) -> ops.Pattern:
    """Padding, of which some sequences have nothing else."""
    return ops.Padding(d.integers("B", 2))


def local_or_strided(d: Draw) -> ops.Pattern:
    return ops.Causal() & (ops.Local(1) | ops.Strided(2))


def each(d: Draw, *patterns: ops.Pattern | None) -> ops.Pattern:
    """A pattern for each head, again and again."""
    return ops.Heads(*(patterns * d.H)[: d.H])


def halves(d: Draw) -> ops.Pattern:
    """Causal, with a pattern for each half of the heads."""
    return ops.Causal() & ops.Heads(ops.SameBlock(3), ops.Strided(2) | ops.BlockEnds(3)) & padding(d)


def of_four_heads(d: Draw) -> Arguments:
    d.sizes["H"] = 4
    return attention(d, halves, "T")


def all_padding(d: Sizes) -> ops.Pattern:
    """Padding, of which the first sequence has nothing else."""
    lengths = d.lengths("S")
    lengths[0] = 0
    return ops.Padding(lengths)


def shared_heads(d: Sizes) -> None:
    """Sizes for four query heads that share two key heads; the next letters get the sizes 3, 5 and 6."""
    d.sizes |= {"B": 2, "G": 2, "H": 4}
    d.left = [size for size in d.left if size in (3, 5, 6)]


def derived_attention(d: Sizes, pattern: Rule = lambda d: ops.Full()) -> Arguments:
    shared_heads(d)
    return given(d("B H T D"), d("B G S D"), d("B G S D"), pattern(d))


def derived_relative_attention(d: Sizes, pattern: Rule = lambda d: ops.Full()) -> Arguments:
    d.sizes["R"] = d.S + d.T - 1
    q, k, v, r, biases = d("B H T D"), d("B H S D"), d("B H S D"), d("H R D"), (d("H D"), d("H D"))
    return given(q, k, v, r, *biases, pattern(d))


def allowed(q: np.ndarray, k: np.ndarray, *others: Any) -> dict[str, np.ndarray]:
    """The pairs that the pattern, the last argument, allows: (B, H, T, S)."""
    B, H, T, S = *q.shape[:3], k.shape[2]
    pattern = others[-1] if isinstance(others[-1], ops.Pattern) else ops.Full()
    table = pattern.table(H, T, S, np)
    return {"m": np.broadcast_to(np.True_ if table is None else table, (B, H, T, S))}


ENTRIES = [
    OperationEntry(
        "attention",
        names=allowed,
        tests="tests/ops/test_attention.py tests/kernels/test_twins.py tests/ops/test_all_operations.py "
        "tests/testing/test_precision.py "
        "-k '(test_attention.py or attention and (broadcast or bounds)) and not strict'",
    )
    .case("", attention)
    .case("large scores", attention, pattern=causal, keys="T", scale=40)
    .case("full", attention, pattern=lambda d: ops.Full())
    .case("causal", attention, pattern=causal, keys="T")
    .case("causal, more keys or queries", attention, pattern=causal)
    .case("padding", attention, pattern=padding, keys="T")
    .case("causal and padding", attention, pattern=lambda d: ops.Causal() & padding(d), keys="T")
    .case("local", attention, pattern=lambda d: ops.Local(1))
    .case("strided", attention, pattern=lambda d: ops.Strided(2))
    .case("causal, local or strided", attention, pattern=local_or_strided, keys="T")
    .case(
        "causal, same block or block ends",
        attention,
        pattern=lambda d: ops.Causal() & (ops.SameBlock(3) | ops.BlockEnds(3, 2)),
        keys="T",
    )
    .case("same block, more keys or queries", attention, pattern=lambda d: ops.SameBlock(2))
    .case(
        "a pattern for each head",
        attention,
        pattern=lambda d: each(d, ops.Causal(), ops.Strided(2), None, ops.Local(1), ops.SameBlock(2)),
    )
    .case("causal, a pattern for each half of the heads", of_four_heads)
    .case("edges", attention, pattern=lambda d: ops.Edges(d.integers("T T", 3) == 0), keys="T")
    .case("empty rows", attention, pattern=empty, keys="T")
    .case("grouped", attention, group=3)
    .case("grouped, large scores", attention, pattern=causal, group=2, scale=40)
    .case(
        "grouped, causal window and padding",
        attention,
        pattern=lambda d: ops.Causal() & ops.Local(2) & padding(d),
        keys="T",
        group=2,
    )
    .case(
        "grouped, a pattern for each head",
        attention,
        pattern=lambda d: each(d, ops.Causal(), ops.Padding(d.lengths("S")), None, ops.Local(1)),
        group=2,
    )
    .extension(
        "several heads, heads that share keys and values, a mask, safe from overflow",
        "head|group|mask|pattern|overflow",
        "h",
        g="h",
        G="H",
        m="1",
    )
    .derivation("", derived_attention)
    .derivation("causal", derived_attention, pattern=causal)
    .derivation("local", derived_attention, pattern=lambda d: ops.Local(1))
    .derivation("padding", derived_attention, pattern=all_padding)
    .mistake(
        "The second term of the softmax is left out",
        "Raising one score lowers the other probabilities of its row. Without this term, the rows of dz do not sum to "
        "0.",
        equation=SCORES,
        wrong="dz_hts = p_hts dp_hts",
    )
    .mistake(
        "The sum runs over the queries",
        "The softmax is over the keys of a query, a row, and so is the sum. The shapes fit either way.",
        equation=SCORES,
        wrong="dz_hts = p_hts (dp_hts − Σ_t' p_ht's dp_ht's)",
        code="dz = p * (dp - (p * dp).sum(axis=-2, keepdims=True))",
    )
    .mistake(
        "The scaling is used in forward only",
        "dq and dk are √D times too large, while dv is right.",
        equation="da_hts = dz_hts/√D",
        wrong="da_hts = dz_hts",
    )
    .mistake(
        "dk is transposed, and a reshape hides it",
        "The numbers are right, but in the wrong places. With weights near 0 they were all so small that a test with a "
        "tolerance of 1e-4 passed.",
        equation=KEYS,
        wrong="dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_{h, t, (s D + d) mod S} q_{h, t, ⌊(s D + d)/S⌋}",
        code="dk = (q.T @ da).reshape(k.shape)",
        replace={
            "    dk = xp.matrix_transpose(da) @ q\n": "    dk = xp.reshape(xp.matrix_transpose(q) @ da, k.shape)\n"
        },
    )
    .mistake(
        "Each key head gets the gradient of only one of its query heads",
        "With shared keys, the gradients of all query heads of the group add up.",
        equation=KEYS,
        wrong="dk_gsd = Σ_t da_hts q_htd with h = ⌊g H/G⌋",
        replace={
            "    dk = xp.matrix_transpose(da) @ q\n": (
                "    dk = xp.matrix_transpose(da[:, :, : shape[2]]) @ q[:, :, : shape[2]]\n"
            )
        },
        tests="tests/ops/test_attention.py -k grouped",
    )
    .mistake(
        "dk has a wrong factor",
        "dk is seven times too large, in the reference alone.",
        replace={"    dk = xp.matrix_transpose(da) @ q\n": "    dk = 7 * xp.matrix_transpose(da) @ q\n"},
        tests="tests/testing/test_cases.py -k nothing_planted",
    )
    .mistake(
        "An array of float64 ones as a factor, and no cast",
        "The gradients of float32 arrays are float64.",
        replace={
            "k.shape[1]\n    scale = 1 / math.sqrt(shape[-1])": (
                "k.shape[1]\n    scale = array_module(q).ones(1) / math.sqrt(shape[-1])"
            ),
            "dq, dk, dv = (cast(x, dy.dtype) for x in (xp.reshape(dq, shape), dk, dv))": ("dq = dq.reshape(shape)"),
        },
        tests="tests/ops/test_all_operations.py",
    )
    .mistake(
        "An empty tile is taken for a full one",
        "Work is done that should be skipped.",
        file="ops/patterns.py",
        replace={"        if left > last + S - T:\n            return Tile.EMPTY\n": ""},
    )
    .survivors(
        "attention_backward",
        {
            "xp, shape, G = array_module(q), q.shape, k.shape[1] -> "
            "xp, shape, G = array_module(q), q.shape, v.shape[1]": "v has the heads of k",
            **WIDENED,
        },
    ),
    OperationEntry("relative_shift", analytic=True)
    .case("", relative_shift)
    .mistake(
        "Shifted the same way again",
        "Gradients reach the wrong distances; only the middle row is right.",
        equation="dx_tj = dy_{t, j−(T−1−t)} where 0 ≤ j − (T − 1 − t) < S, 0 elsewhere",
        wrong="dx_tj = dy_{t, j−t} where 0 ≤ j − t < S, 0 elsewhere",
    )
    .mistake(
        "The windows move the other way",
        "Forward reads the scores of other distances, and backward writes there.",
        replace={"return T - 1 - xp.arange(T)[:, None]": "return xp.arange(T)[:, None]"},
        tests="tests/ops/test_relative.py -k shift",
    ),
    OperationEntry(
        "relative_attention",
        names=allowed,
        tests="tests/ops/test_relative.py tests/ops/test_all_operations.py tests/testing/test_precision.py "
        "-k 'test_relative.py or relative and (stays or broadcast or bounds)'",
        helpers=True,
    )
    .case("", relative_attention)
    .case("large scores", relative_attention, pattern=causal, keys="T", scale=40)
    .case("causal", relative_attention, pattern=causal, keys="T")
    .case("causal, more keys or queries", relative_attention, pattern=causal)
    .case("padding", relative_attention, pattern=padding, keys="T")
    .case("strided", relative_attention, pattern=lambda d: ops.Strided(2))
    .case("causal, local or strided", relative_attention, pattern=local_or_strided, keys="T")
    .case(
        "a pattern for each head",
        relative_attention,
        pattern=lambda d: each(d, ops.Causal(), ops.Strided(2), ops.Padding(d.lengths("S"))),
    )
    .case("empty rows", relative_attention, pattern=empty, keys="T")
    .extension("several sequences and heads, a mask", "sequence|head|mask|pattern", "bhn", m="1")
    .derivation("", derived_relative_attention)
    .derivation("causal", derived_relative_attention, pattern=causal)
    .derivation("padding", derived_relative_attention, pattern=all_padding)
    .mistake(
        "q gets only one of its two gradients",
        "q is used twice, for the content and for the distance, so its gradient is a sum.",
        equation="dq_htd = dqu_htd + dqw_htd",
        wrong="dq_htd = dqu_htd",
    )
    .mistake(
        "The gradient of r is averaged over the sequences",
        "All sequences share r: their gradients are summed, not averaged.",
        equation="dr_hjd = Σ_{n,t} db_nhtj qw_nhtd",
        wrong="dr_hjd = mean_n(Σ_t db_nhtj qw_nhtd)",
    )
    .mistake(
        "The keys get the bias of the positions",
        "The keys meet the queries with the content's bias. Right as long as both biases are equal, as they are at the "
        "start.",
        equation="dk_hsd = Σ_t da_hts qu_htd",
        wrong="dk_hsd = Σ_t da_hts qw_htd",
        replace={"@ (q + content_bias[:, None, :])\n    dr": "@ (q + position_bias[:, None, :])\n    dr"},
    )
    .survivors("relative_attention_backward", WIDENED),
]

"""Tiled attention on NumPy: neither forward nor backward ever holds a whole (T, S) array.

Scores are computed a tile of queries and keys at a time, for a few heads together, so that they stay in a core's cache.
Tiles that the pattern leaves empty are skipped, and memory is linear in T + S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..ops.attention import check_attention
from ..ops.patterns import SIDE, Full, Pattern

TILE = 1 << 18  # scores at once, over all heads processed together: a megabyte in float32
WIDTH = 1024  # columns at once
SHORT = 64 * 64  # the most scores of a sequence that is a single tile
SAFE = 60.0  # for scores up to this size m can be 0: exp(60) is 1e26, and float32 reaches 3e38
REAL = {np.dtype(np.float32), np.dtype(np.float64)}
FINE = 1e4  # scores up to this size have digits enough for m to be one of the terms of their sums


class Strip(NamedTuple):
    """Neighbouring pieces of a pattern with the same rows."""

    rows: slice
    columns: slice
    forbidden: list[tuple[slice, np.ndarray]]  # columns, counted from the start of the run, and 0 or −∞ to add to z
    first: bool  # whether no earlier run has any of its rows


def plan(pattern: Pattern, b: int, T: int, S: int, dtype: np.dtype) -> list[Strip]:
    """The runs of sequence b: the pieces of the pattern, with neighbours joined up to WIDTH columns."""
    runs: list[Strip] = []
    seen = np.zeros(T, dtype=bool)
    for rows, columns, allowed in pattern.pieces(b, T, S, np):
        step = columns.step or 1
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.rows == rows
            and last.columns.step == columns.step
            and columns.start - last.columns.stop in (0, step - 1)
            and (columns.stop - last.columns.start) // step <= WIDTH
        ):
            run = runs[-1] = last._replace(columns=slice(last.columns.start, columns.stop, columns.step))
        else:
            run = Strip(rows, columns, [], not seen[rows].any())
            runs.append(run)
            seen[rows] = True
        if allowed is not None:
            start = (columns.start - run.columns.start) // step
            within = slice(start, start + len(range(columns.start, columns.stop, step)))
            run.forbidden.append((within, np.where(allowed, 0, -np.inf).astype(dtype)))
    return runs


def forbid(z: np.ndarray, run: Strip) -> None:
    """Add −∞ to the forbidden scores z (..., rows, columns) of a run, which are finite."""
    for within, minus_infinity in run.forbidden:
        z[..., within] += minus_infinity


Group = tuple[tuple[slice, slice], list[Strip]]  # what is processed together, of (B, H), and its runs


def groups(pattern: Pattern, shape: tuple[int, ...], S: int, dtype: np.dtype, shared: int = 1) -> Iterator[Group]:
    """All sequences and heads of `shape` (B, H, T, D), in groups as large as tiles of TILE scores allow.

    shared: how many neighbouring heads share their keys. What goes together is whole sets of them, or part of one.
    """
    B, H, T, _ = shape
    if pattern.differs and 0 < T * S <= SHORT:
        yield from short_groups(pattern, shape, S, dtype, shared)
        return
    for heads, part in pattern.of_heads(H):
        runs = plan(part, 0, T, S, dtype) if B and not part.differs else []
        together = max(1, TILE // (min(T, SIDE * part.tall) * min(S, WIDTH))) if T and S else 1
        sequences = 1 if part.differs else max(1, TILE // max(1, H * T * S))
        for b in range(0, B, sequences):
            visited = plan(part, b, T, S, dtype) if part.differs else runs
            for group in cut_heads(heads, together, shared):
                yield (slice(b, b + sequences), group), visited


def groups_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None) -> Iterable[Group]:
    """The groups of arguments that fit. Those of a pattern without arrays are kept for the next call."""
    if pattern is None or vars(type(pattern)).get("by_value"):
        return kept_groups(q.shape, k.shape, v.shape, q.dtype, pattern) or []
    return groups(pattern, q.shape, k.shape[2], q.dtype, q.shape[1] // max(1, k.shape[1]))


@lru_cache(16)
def kept_groups(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: np.dtype, pattern: Pattern | None
) -> list[Group] | None:
    """The groups of arguments of these shapes, which are the same whatever the arrays hold; None if they do not fit."""
    arrays = (np.broadcast_to(np.zeros((), dtype), shape) for shape in (q, k, v))
    if not accepted(check_attention, *arrays, pattern):
        return None
    return [*groups(pattern or Full(), q, k[2], dtype, q[1] // max(1, k[1]))]


def cut_heads(heads: slice, together: int, shared: int) -> Iterator[slice]:
    """Slices of at most `together` heads: each is made of whole sets of `shared` heads, or lies within one."""
    h = heads.start
    while h < heads.stop:
        size = min(together, heads.stop - h)
        if h % shared or size < shared:
            size = min(size, shared - h % shared)
        else:
            size -= size % shared
        yield slice(h, h + size)
        h += size


def by_key_head(x: np.ndarray, heads: slice, shared: int) -> np.ndarray:
    """(B, heads, ...) -> (B, key heads, heads that share one, ...), a view; x itself if none share."""
    if shared == 1:
        return x
    size = min(shared, heads.stop - heads.start)
    return x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])


def product_of_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """aᵀ b for a (..., rows, I) and b (..., rows, O): (..., I, O), summed over the heads that share keys."""
    if a.ndim == 5:
        a, b = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (a, b))
    return a.swapaxes(-1, -2) @ b


def short_groups(pattern: Pattern, shape: tuple[int, ...], S: int, dtype: np.dtype, shared: int) -> Iterator[Group]:
    """Groups of short sequences whose patterns differ: one tile for each, in a single run of all pairs."""
    B, H, T, _ = shape
    allowed = pattern.table(H, T, S, np)
    table = np.where(np.ones((1, 1, 1, 1), bool) if allowed is None else allowed, 0, -np.inf).astype(dtype)
    if shared > 1:
        table = table[:, :, None] if table.shape[1] == 1 else by_key_head(table, slice(0, H), shared)
    sequences = max(1, TILE // (H * T * S))
    for b in range(0, B, sequences):
        forbidden = table[b : b + sequences] if table.shape[0] > 1 else table
        yield (
            (slice(b, b + sequences), slice(0, H)),
            [Strip(slice(0, T), slice(0, S), [(slice(0, S), forbidden)], True)],
        )


def with_column(x: np.ndarray, column: np.ndarray | float) -> np.ndarray:
    """x (..., D) and one more column (...), as (..., D + 1)."""
    wider = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wider[..., :-1] = x
    wider[..., -1] = column
    return wider


def add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, first: bool) -> None:
    """out += a b. first: whether `out` is still zero."""
    if first:
        np.matmul(a, b, out=out)
    else:
        out += a @ b


def heads_inside(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty (B, H, T, D) array with the memory layout (B, T, H, D), so that joining heads needs no copy."""
    B, H, T, D = shape
    return np.empty((B, T, H, D), dtype).transpose(0, 2, 1, 3)


def largest_norm(x: np.ndarray) -> float:
    """The largest Euclidean norm of a row of x (..., D)."""
    return math.sqrt(float(np.vecdot(x, x).max(initial=0)))


def row_maxima(scores: Callable[[Strip], np.ndarray], top: np.ndarray, runs: list[Strip]) -> None:
    """Write to top (..., T) the largest allowed score of each row, or 0 if it is within ±SAFE or nothing is allowed.

    (So large scores of other rows, or of keys that a row may not see, do not change what is subtracted from it.)
    """
    top[...] = -np.inf
    for run in runs:
        z = scores(run)
        forbid(z, run)
        np.maximum(top[..., run.rows], z.max(axis=-1), out=top[..., run.rows])
    top[(np.abs(top) <= SAFE) | (top == -np.inf)] = 0


def accepted(check: Callable, *args: Any) -> bool:
    """Whether these arguments pass the check of a reference. If not, the reference raises the error."""
    try:
        check(*args)
    except Exception:
        return False
    return True


def fits(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None = None) -> bool:
    """The (1, S) scores of one query need no tiles."""
    if not (type(q) is type(k) is type(v) is np.ndarray and q.dtype == k.dtype == v.dtype and q.dtype in REAL):
        return False
    if q.shape[2:3] == (1,):
        return False
    if pattern is None or vars(type(pattern)).get("by_value"):
        return kept_groups(q.shape, k.shape, v.shape, q.dtype, pattern) is not None
    return accepted(check_attention, q, k, v, pattern)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None = None) -> tuple[np.ndarray, tuple]:
    """As `ops.attention`, in memory linear in T + S.

    Forward, for each sequence and query head h, as in `attention`. allowed_hts = 1 if query t may see key s:

        z_hts = 1/√D Σ_d q_htd k_gsd with g = ⌊h G/H⌋
        p_hts = softmax_{s, allowed_hts = 1}(z_hts) where allowed_hts = 1, 0 elsewhere
        y_htd = Σ_s p_hts v_gsd with g = ⌊h G/H⌋

    Any number m_ht may be subtracted from the scores of a row, since it cancels in the quotient. So the output can be
    divided by l instead of the probabilities, and its two sums run over J tiles of W keys each, in any order:

        m := shift
        e_hts = exp(z_hts − m_ht) where allowed_hts = 1, 0 elsewhere
        l_ht = Σ_s e_hts = Σ_j Σ_{s, ⌊s/W⌋ = j} e_hts        p_hts = e_hts/l_ht
        y_htd = 1/l_ht Σ_j Σ_{s, ⌊s/W⌋ = j} e_hts v_gsd with g = ⌊h G/H⌋

    One product gives both sums, since e times [v, 1], with a further column of ones, is [y l, l].

    The only purpose of m is to keep exp in range. By Cauchy-Schwarz no score exceeds the largest |q_t|/√D times the
    largest |k_s|; if this bound is small, m is 0. Otherwise a first pass over the tiles finds the maximum of each row,
    and m is this maximum where it is large and 0 elsewhere. From m and one more number per row, the backward recomputes
    the probabilities:

        log_sum_ht = log(l_ht)
        p_hts = exp(z_hts − m_ht − log_sum_ht) where allowed_hts = 1, 0 elsewhere

    The two are kept apart: in their sum, the log-sum-exp, a large m would round off the digits of log l. (A query that
    sees no key has l = 0 and y = 0. Its log_sum is the largest finite number, which makes p = 0.) A further
    column subtracts one of them: if the bound is small, the product of [q/√D, −log l] and [k, 1] is z − log l, and if
    it is not large, that of [q/√D, −m] and [k, 1] is z − m, in the forward too. A large z has few digits, and a sum
    that includes −m would have others. Then m is subtracted from the finished z, which all passes round alike.

    Backward. The last sum of dz runs over a whole row, which is never in memory at once. But it equals a dot product of
    two rows of D numbers, which are known before the first tile:

        dp_hts = Σ_d dy_htd v_gsd with g = ⌊h G/H⌋
        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')
        δ_ht := Σ_s p_hts dp_hts = Σ_d dy_htd Σ_s p_hts v_gsd = Σ_d dy_htd y_htd with g = ⌊h G/H⌋

    A further column subtracts δ too, in the product of [dy, −δ] and [v, 1]. Then the tiles are independent, and what
    each adds to dq, dk and dv is a product:

        dz_hts = p_hts (dp_hts − δ_ht)
        dq_htd = 1/√D Σ_j Σ_{s, ⌊s/W⌋ = j} dz_hts k_gsd with g = ⌊h G/H⌋
        dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t dz_hts q_htd/√D
        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t p_hts dy_htd

    For the rows and columns of a tile, dz is first dp − δ:

        delta = np.vecdot(output, y_part)
        output_delta = with_column(output, -delta)
        p = probabilities(run)
        sum_dv[columns] += product_of_rows(p, output[rows])
        dz = output_delta[rows] @ values_one[columns].swapaxes(-1, -2)
        dz *= p
        add_product(dz, keys[columns], sum_dq[rows], run.first)
        sum_dk[columns] += product_of_rows(dz, queries[rows])
        np.multiply(sum_dq, scale, out=dq_part)
        dk[of_keys], dv[of_keys] = sum_dk, sum_dv
        return dq, dk, dv

    Shared keys. A tile holds whole groups of H/G heads, or part of one where a pattern splits the group. The queries
    then have one more axis, (B, G, H/G, T, D). For dk and dv the rows of a group are stacked, one head after another.

    If m is 0, e may be as large as exp(60), so e v overflows in float32 for values from 1e12 on.

    The cache keeps q, k, v, y (which a caller must not change before backward), m and log l for each row, and the
    bounds, where the reference keeps T S probabilities for each head.
    Source: Dao et al., "FlashAttention", 2022, algorithms 1 and 4, appendix B; Rabe, Staats, "Self-attention does not
    need O(n²) memory", 2021.
    """
    (B, H, T, D), G = q.shape, k.shape[1]
    shared = H // max(1, G)
    y, shift, log_sum = heads_inside(q.shape, q.dtype), *np.zeros((2, B, H, T), q.dtype)
    bounds = []
    for (sequences, heads), runs in groups_of(q, k, v, pattern):
        part, of_keys = (sequences, heads), (sequences, slice(heads.start // shared, -(-heads.stop // shared)))
        queries, *results = (by_key_head(x[part], heads, shared) for x in (q, y, shift, log_sum))
        queries = queries * (1 / math.sqrt(D))
        keys, values = (x if shared == 1 else x[:, :, None] for x in (k[of_keys], with_column(v[of_keys], 1)))
        bounds.append(largest_norm(queries) * largest_norm(keys))
        attend(products, queries, keys, values, runs, bounds[-1], *results)
    return y, (q, k, v, y, shift, log_sum, bounds, pattern)


Scores = Callable[[np.ndarray, np.ndarray, Strip], np.ndarray]  # of queries and keys, for a run: (..., rows, columns)


def products(queries: np.ndarray, keys: np.ndarray, run: Strip) -> np.ndarray:
    return queries[..., run.rows, :] @ keys[..., run.columns, :].swapaxes(-1, -2)


def attend(
    scores: Scores, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, runs: list[Strip], bound: float,
    y: np.ndarray, shift: np.ndarray, log_sum: np.ndarray,
) -> None:  # fmt: skip
    """Write y, m and log l of a group. values: with a column of ones. bound: on the scores."""
    if not bound <= FINE:
        queries, keys = np.ascontiguousarray(queries), np.ascontiguousarray(keys)
    if not bound <= SAFE:
        row_maxima(partial(scores, queries, keys), shift, runs)
    if SAFE < bound <= FINE:
        queries, keys = with_column(queries, -shift), with_column(keys, 1)
    total = np.zeros((*y.shape[:-1], values.shape[-1]), y.dtype)  # [y l, l]
    for run in runs:
        z = scores(queries, keys, run)
        if not bound <= FINE:
            z -= shift[..., run.rows, None]
        forbid(z, run)
        np.exp(z, out=z)
        add_product(z, values[..., run.columns, :], total[..., run.rows, :], run.first)
    sums = total[..., -1]
    seen = sums != 0
    np.divide(total[..., :-1], np.where(seen, sums, 1)[..., None], out=y)
    log_sum[...] = np.where(seen, np.log(sums, out=sums, where=seen), np.finfo(y.dtype).max)


def probabilities_of(
    scores: Scores, queries: np.ndarray, keys: np.ndarray, bound: float, shift: np.ndarray, log_sum: np.ndarray
) -> Callable[[Strip], np.ndarray]:
    """A function that gives the probabilities of a run, with scores that are rounded as in `attend`."""
    after: tuple[np.ndarray, ...] = (log_sum,)
    if bound <= FINE:
        within, after = (log_sum, ()) if bound <= SAFE else (shift, after)
        queries, keys = with_column(queries, -within), with_column(keys, 1)
    else:
        queries, after = np.ascontiguousarray(queries), (shift, log_sum)

    def probabilities(run: Strip) -> np.ndarray:
        p = scores(queries, keys, run)
        for x in after:
            p -= x[..., run.rows, None]
        forbid(p, run)
        return np.exp(p, out=p)

    return probabilities


def attention_backward(dy: np.ndarray, cache: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, y, shift, log_sum, bounds, pattern = cache
    (_, H, _, D), G = q.shape, k.shape[1]
    shared = H // max(1, G)
    dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v))
    scale = 1 / math.sqrt(D)
    for (part, runs), bound in zip(groups_of(q, k, v, pattern), bounds, strict=True):
        sequences, heads = part
        of_keys = sequences, slice(heads.start // shared, -(-heads.stop // shared))
        q_part, y_part, dq_part, *statistics = (by_key_head(x[part], heads, shared) for x in (q, y, dq, shift, log_sum))
        queries = q_part * scale
        output = by_key_head(np.ascontiguousarray(dy[part]), heads, shared)
        keys, values_one = np.ascontiguousarray(k[of_keys]), with_column(v[of_keys], 1)
        sum_dq, sum_dk, sum_dv = np.zeros_like(output), np.zeros_like(keys), np.zeros_like(keys)
        keys, values_one = (x if shared == 1 else x[:, :, None] for x in (keys, values_one))
        probabilities = probabilities_of(products, queries, keys, bound, *statistics)
        delta = np.vecdot(output, y_part)
        output_delta = with_column(output, -delta)
        for run in runs:
            rows, columns = (..., run.rows, slice(None)), (..., run.columns, slice(None))
            p = probabilities(run)
            sum_dv[columns] += product_of_rows(p, output[rows])
            dz = output_delta[rows] @ values_one[columns].swapaxes(-1, -2)
            dz *= p
            add_product(dz, keys[columns], sum_dq[rows], run.first)
            sum_dk[columns] += product_of_rows(dz, queries[rows])
        np.multiply(sum_dq, scale, out=dq_part)
        if heads.start % shared == 0:
            dk[of_keys], dv[of_keys] = sum_dk, sum_dv
        else:  # the rest of a group whose first heads came before
            dk[of_keys] += sum_dk
            dv[of_keys] += sum_dv
    return dq, dk, dv


ops.attention.add_twin(np.ndarray, fits, attention, attention_backward)

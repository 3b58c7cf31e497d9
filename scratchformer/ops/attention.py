"""Scaled dot-product attention with a pattern."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_columns, expect_floating, expect_like, expect_shape
from ..dispatch import backward, operation
from .patterns import Full, Pattern, expect_pattern


class AttentionCache(NamedTuple):
    q: Array  # (B, H, T, D)
    k: Array  # (B, G, S, D)
    v: Array  # (B, G, S, D)
    probabilities: Array  # (B, H, T, S)


def check_attention(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> None:
    """Check the arguments of `attention`.

    Raises ValueError unless they are q (B, H, T, D) and k, v (B, G, S, D) with a G that divides H, and a pattern that
    fits B sequences and H heads; TypeError unless they are floating-point arrays and a Pattern or None.
    """
    expect_floating(q=q, k=k, v=v)
    expect_pattern(pattern)
    array_module(q, k, v)
    expect_shape("q", q, "B H T D")
    expect_columns("q", q)
    B, H, _, D = q.shape
    expect_shape("k", k, "B G S D", B=B, D=D)
    G = k.shape[1]
    if G != H and (not G or H % G):
        raise ValueError(f"k: expected (B, G, S, D) with a G that divides the {H} heads of q, got {tuple(k.shape)}")
    expect_shape("v", v, "B G S D", B=B, G=G, S=k.shape[2], D=D)
    if pattern is not None:
        pattern.check(B)
        pattern.of_heads(H)


@operation
def attention(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> tuple[Array, AttentionCache]:
    """y_t = Σ_s p_ts v_s with p_ts = softmax_s(q_t · k_s / √D), over the keys s that query t may see.

    q: (B, H, T, D). k, v: (B, G, S, D), where G divides H: query head h uses key head ⌊h/(H/G)⌋, so each group of H/G
    neighbouring query heads shares its keys and values, which are not repeated in memory. With G = H every query head
    has its own, with G = 1 all share one. pattern: see `patterns`; None for all pairs. Returns y (B, H, T, D) and the
    cache. If a query may see no key, its output and its gradient are 0. Numbers must be finite even where no query may
    see them (padding), since they are multiplied by 0, and 0 · NaN is NaN. Raises ValueError if shapes do not fit,
    TypeError if `pattern` is not a Pattern.

    Forward. Each query is compared with each key, a softmax turns the scores of a query into weights, and y is the mean
    of the values with these weights. Each head h does this alone. A group of heads shares the keys and values of its
    head g. A mask says which keys a query may see: m_hts is 1 if query t may see key s, else 0:

        a_hts = Σ_d q_htd k_gsd with g = ⌊h G/H⌋        z_hts = a_hts/√D
        p := probabilities
        Z_ht = Σ_s m_hts exp(z_hts)        p_hts = m_hts exp(z_hts)/Z_ht where Σ_s' m_hts' > 0, 0 elsewhere
        y_htd = Σ_s p_hts v_gsd with g = ⌊h G/H⌋

    With the row's largest score subtracted, as in `softmax`, no exponential overflows:

        c_ht := max_{s, m_hts = 1}(z_hts) where Σ_s m_hts > 0, 0 elsewhere
        e_ht := Σ_{s, m_hts = 1} exp(z_hts − c_ht)
        p_hts = exp(z_hts − c_ht)/e_ht where m_hts = 1, 0 elsewhere

    Backward, from last to first. y is a product of p and v, so each gets the other factor. An element of p is part of
    all outputs of its query, and an element of v is part of one output of each query. So the sums run over these
    outputs. All query heads h of a group g use the same v, which adds a sum over them:

        ∂y_htd/∂p_hts = v_gsd with g = ⌊h G/H⌋
        dp_hts = Σ_d dy_htd ∂y_htd/∂p_hts = Σ_d dy_htd v_gsd with g = ⌊h G/H⌋
        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t p_hts dy_htd

    Then the softmax of each row (derived in `softmax`) and the scaling. The mask is not needed, since dz_hts is 0 where
    p_hts is:

        dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')        da_hts = dz_hts/√D

    Last, the product of q and k, where each gets the other factor. For k there is a sum over its group of heads again:

        dq_htd = Σ_s da_hts k_gsd with g = ⌊h G/H⌋
        dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd

    In code, a sum over s is a product such as da k; a sum over t is a product with the transpose, such as daᵀ q. If the
    rows of all heads in a group are stacked, one head after another, the latter also sums over the group:

        dv = xp.matrix_transpose(probabilities) @ dy
        dp = widen(dy) @ xp.matrix_transpose(widen(v))
        dz = probabilities * (dp - xp.sum(probabilities * dp, axis=-1, keepdims=True))
        da = dz * scale
        dq = da @ k
        dk = xp.matrix_transpose(da) @ q

    Half precision is computed in float32, since dp may overflow where dq and dk do not.

    The cache keeps q, k, v and the (T, S) probabilities, each a factor of some product above.
    Source: Vaswani et al., "Attention is all you need", 2017, section 3.2.1, equation 1; Ainslie et al., "GQA: training
    generalized multi-query transformer models from multi-head checkpoints", 2023, section 2.2, for groups.
    """
    check_attention(q, k, v, pattern)
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    xp, scale = array_module(q, k, v), 1 / math.sqrt(D)
    z = xp.reshape(stack_groups(widen(q) * scale, G) @ xp.matrix_transpose(widen(k)), (B, H, T, S))
    probabilities = cast(masked_softmax(z, pattern), q.dtype)
    y = cast(xp.reshape(stack_groups(probabilities, G) @ v, (B, H, T, D)), q.dtype)
    return y, AttentionCache(q, k, v, probabilities)


def stack_groups(x: Array, G: int) -> Array:
    """(B, H, T, ...) -> (B, G, H/G · T, ...): the rows of a group's heads, one head after another."""
    B, H, T, width = x.shape
    return x if G == H else array_module(x).reshape(x, (B, G, H // G * T, width))


@operation
def masked_softmax(z: Array, pattern: Pattern | None) -> Array:
    """The softmax of each row of scores z (B, H, T, S) over the keys that the pattern allows; 0 for all others."""
    xp, (_, H, T, S) = array_module(z), z.shape
    if not S:
        return z
    allowed = (pattern or Full()).table(H, T, S, xp)
    if allowed is None:
        probabilities = xp.exp(z - xp.max(z, axis=-1, keepdims=True))
        probabilities /= xp.sum(probabilities, axis=-1, keepdims=True)
    else:
        row_max = xp.max(xp.where(allowed, z, -xp.inf), axis=-1, keepdims=True)
        row_max = cast(xp.where(xp.any(allowed, axis=-1, keepdims=True), row_max, 0), z.dtype)
        probabilities = xp.exp(xp.where(allowed, z - row_max, -xp.inf))
        total = xp.sum(probabilities, axis=-1, keepdims=True)
        probabilities /= xp.where(total == 0, 1, total)  # a row that sees nothing stays zero
    return probabilities


@backward
def attention_backward(dy: Array, cache: AttentionCache) -> tuple[Array, Array, Array]:
    """(dq, dk, dv): see `attention`."""
    q, k, v, probabilities = cache
    xp, shape, G = array_module(q), q.shape, k.shape[1]
    scale = 1 / math.sqrt(shape[-1])
    expect_like("dy", dy, shape)
    q, dy, probabilities = (stack_groups(x, G) for x in (q, dy, probabilities))
    dv = xp.matrix_transpose(probabilities) @ dy
    dp = widen(dy) @ xp.matrix_transpose(widen(v))
    dz = probabilities * (dp - xp.sum(probabilities * dp, axis=-1, keepdims=True))
    da = dz * scale
    dq = da @ k
    dk = xp.matrix_transpose(da) @ q
    dq, dk, dv = (cast(x, dy.dtype) for x in (xp.reshape(dq, shape), dk, dv))
    return dq, dk, dv

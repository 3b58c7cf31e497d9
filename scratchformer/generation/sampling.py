"""Sampling: the choice of the next token from its logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from ..checks import expect_array, expect_at_least, expect_number, expect_real_number, expect_shape
from ..rng import Key, expect_key


def probabilities(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The distributions (B, V) to sample from, for logits (B, V), on the CPU in float64.

    temperature: τ in softmax(z/τ), which is sharper for τ < 1 and flatter for τ > 1; τ = 0 gives the most likely token
    probability 1 (greedy). top_k: keep only the k most likely tokens; of equally likely ones, those with lower ids.
    top_p: keep only the smallest set of most likely tokens whose probabilities add up to p (Holtzman et al. 2020). The
    rest is normalised again. allowed: booleans (V,), true for the tokens that may be chosen; None for all.
    Raises ValueError for a value out of range or logits that are not finite; TypeError if top_k is not an integer.
    """
    z = _masked(logits, temperature, top_k, top_p, allowed)
    if temperature == 0:
        p = np.zeros(z.shape)
        p[np.arange(len(z)), z.argmax(axis=-1)] = 1
        return p
    return _distributions(z, temperature, top_k, top_p)


def choose(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    allowed: np.ndarray | None,
    key: Key,
) -> np.ndarray:
    """One token (B,) from each of the `probabilities` of logits (B, V), by `sample`, as a rule in less time.

    Greedy choice needs no distributions, and with top_k they are those of k tokens.
    """
    z = _masked(logits, temperature, top_k, top_p, allowed)
    if temperature == 0:
        return z.argmax(axis=-1)
    if top_k is None or top_k >= z.shape[-1]:
        return sample(_distributions(z, temperature, None, top_p), key)
    ids = np.nonzero(_likeliest(z, z, temperature, top_k, None))[1].reshape(len(z), top_k)  # k of each row
    places = sample(_distributions(np.take_along_axis(z, ids, axis=-1), temperature, None, top_p), key)
    return np.take_along_axis(ids, places[:, None], axis=-1)[:, 0]


def _masked(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None, allowed: np.ndarray | None
) -> np.ndarray:
    """The logits (B, V), −∞ for tokens that are not allowed, in float32 or float64; raises for bad options."""
    expect_number("temperature", temperature)
    if top_k is not None:
        expect_at_least(1, top_k=top_k)
    if top_p is not None:
        expect_real_number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p: expected 0 < top_p <= 1, got {top_p}")
    z = expect_array("logits", logits)
    z = z if z.dtype in (np.float32, np.float64) else z.astype(np.float64)
    expect_shape("logits", z, "B V")
    if not np.isfinite(z).all():
        raise ValueError("logits: expected finite numbers")
    if allowed is not None:
        allowed = np.asarray(allowed)
        if allowed.dtype != bool or allowed.shape != z.shape[-1:] or not allowed.any():
            raise ValueError(f"allowed: expected booleans ({z.shape[-1]},) of which at least one is true")
        z = np.where(allowed, z, -np.inf)
    return z


def _distributions(z: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """`probabilities` of logits that are checked, for a temperature above 0."""
    z = z.astype(np.float64, copy=False)
    top = z.max(axis=-1, keepdims=True)
    p = z - top
    with np.errstate(over="ignore"):  # −∞ is right for a temperature near 0
        p /= temperature
    np.exp(p, out=p)
    if top_k is not None or top_p is not None:
        p *= _likeliest(z, top, temperature, top_k, top_p)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def _likeliest(
    z: np.ndarray, top: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """The tokens that top_k and top_p keep, boolean (B, V).

    Only the logits are sorted, since sorting the tokens too takes several times as long; with top_k only the largest.
    The n most likely tokens are those above the n-th largest logit, and as many of those equal to it as are needed.
    """
    if top_k is not None and top_k < (V := z.shape[-1]):
        ranked = np.partition(z, V - top_k, axis=-1)[:, V - top_k :]
    else:
        ranked = z
    ranked = np.sort(ranked, axis=-1)[:, ::-1]  # largest first
    n = np.full((len(z), 1), ranked.shape[1])
    if top_p is not None:
        with np.errstate(over="ignore"):  # −inf for a tiny temperature
            p = np.exp((ranked - top) / temperature)
        p /= p.sum(axis=-1, keepdims=True)
        n = (np.cumsum(p, axis=-1) - p < top_p).sum(axis=-1, keepdims=True)  # those before which the sum is < p
    last = np.take_along_axis(ranked, n - 1, axis=-1)
    above, equal = z > last, z == last
    return above | (equal & (np.cumsum(equal, axis=-1) <= n - above.sum(axis=-1, keepdims=True)))


def occurrences(texts: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Which tokens occur in each of B texts of ids (T,): booleans (B, V)."""
    occurred = np.zeros((len(texts), vocab_size), bool)
    for row, ids in zip(occurred, texts, strict=True):
        row[ids] = True
    return occurred


def penalised(logits: np.ndarray, occurred: np.ndarray, penalty: float) -> np.ndarray:
    """The logits (B, V), smaller for tokens that have occurred, booleans (B, V): z/θ where z > 0, and z θ elsewhere.

    penalty: θ > 0; with θ > 1 a text repeats itself less. Raises ValueError for a penalty that is out of range.
    Source: Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019, section
    4.1; there every z is divided, which makes negative ones larger.
    """
    expect_number("penalty", penalty, zero=False)
    z = expect_array("logits", logits, np.float64)
    expect_shape("logits", z, "B V")
    with np.errstate(over="ignore"):  # ∞ is replaced by the largest number
        changed = np.where(z > 0, z / penalty, z * penalty).clip(-sys.float_info.max, sys.float_info.max)
    return np.where(occurred, changed, z)


def sample(p: np.ndarray, key: Key) -> np.ndarray:
    """One token (B,) from each distribution of p (B, V): where a uniform number falls among the cumulative sums.

    Raises ValueError if the sum of a row is not positive and finite.
    """
    p = expect_array("p", p, np.float64)
    expect_shape("p", p, "B V")
    expect_key(key)
    u = key.generator().random((p.shape[0], 1))
    cumulated = np.cumsum(p, axis=-1)
    if not ((cumulated[:, -1] > 0) & (cumulated[:, -1] < math.inf)).all():
        raise ValueError("p: expected probabilities with a positive sum in each row")
    return (cumulated <= u * cumulated[:, -1:]).sum(axis=-1)

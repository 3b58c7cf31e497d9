"""From logits to the next token."""

from __future__ import annotations

import numpy as np

from ..rng import Key


def probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> np.ndarray:
    """The distribution to sample from, (B, V), for logits (B, V), on the CPU in float64.

    temperature: τ > 0; softmax(z/τ), sharper below 1 and flatter above. τ = 0 puts all on the likeliest token (greedy).
    top_k: only the k likeliest tokens; of equal ones, those of the lower number. top_p: only the fewest likeliest
    tokens whose probabilities add up to p (Holtzman et al. 2020). What is left is scaled to sum 1.
    Raises ValueError for a value out of range, or logits that are not finite.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature: expected a number >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected 0 < top_p <= 1, got {top_p}")
    z = np.asarray(logits, np.float64)
    if not np.isfinite(z).all():
        raise ValueError("logits: expected finite numbers")
    order = np.argsort(-z, axis=-1, kind="stable")  # (B, V), likeliest first
    ranked = np.take_along_axis(z, order, axis=-1)
    if temperature == 0:
        top_k, temperature = 1, 1.0
    p = np.exp((ranked - ranked[:, :1]) / temperature)
    p /= p.sum(axis=-1, keepdims=True)
    if top_k is not None:
        p[:, top_k:] = 0
        p /= p.sum(axis=-1, keepdims=True)
    if top_p is not None:
        before = np.cumsum(p, axis=-1) - p  # what the likelier tokens add up to
        p[before >= top_p] = 0
        p /= p.sum(axis=-1, keepdims=True)
    result = np.zeros_like(p)
    np.put_along_axis(result, order, p, axis=-1)
    return result


def sample(p: np.ndarray, key: Key) -> np.ndarray:
    """One token (B,) from each distribution of p (B, V): where a uniform number falls among the cumulated sums."""
    u = key.generator().random((p.shape[0], 1))
    cumulated = np.cumsum(p, axis=-1)
    return (cumulated <= u * cumulated[:, -1:]).sum(axis=-1)

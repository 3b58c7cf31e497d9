"""What several exhibits are made of: softmax and attention, with right gradients."""

from __future__ import annotations

import math

import numpy as np


def softmax(z):
    """Over the last axis; a score of −∞ gets 0, and so does a row of nothing else."""
    top = z.max(axis=-1, keepdims=True)
    e = np.exp(z - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0)


def probabilities(q, k, mask=True):
    """p (..., T, S) of q (..., T, D) and k (..., S, D): the softmax of q kᵀ/√D where `mask` allows it."""
    z = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where(mask, z, -np.inf))


def attend_backward(dy, q, k, v, p):
    """(dq, dk, dv) of y = p v, as the page of `ops.attention` derives them."""
    dp = dy @ v.swapaxes(-1, -2)
    dz = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return dz @ k, dz.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy


def causal(T, S):
    """Whether query t may see key s: (T, S)."""
    return np.arange(S) <= np.arange(T)[:, None]

"""Twins of the operations that would take most of the time of a step with `PortableArray`s.

Each computes what its reference does with such arrays, bit by bit: for every number the same operations in the same
order, and sums in the order of `portable.total`. Only the passes over memory, and the calls, are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import ops
from ..checks import expect_floating
from ..ops.attention import check_attention, stack_groups, without_nan
from ..ops.layernorm import LARGE, check_layernorm
from ..ops.patterns import Full, Pattern
from ..ops.relative import check_relative_attention
from ..ops.rmsnorm import check_rmsnorm
from ..ops.rotary import tables
from ..ops.swiglu import check_swiglu
from ..portable import HALF, INFINITY, NAN, ONE, ZERO, PortableArray, where
from .numba_portable import collapse, exact, exp, product, total
from .numba_rows import maximum_of_row
from .numba_vectors import LANES, load, store
from .numpy_attention import accepted
from .numpy_relative import shifted

LARGE_32, LARGEST = np.float32(LARGE), np.finfo(np.float32).max


def fits(check: Callable, arrays: int) -> Callable:
    """A function that says whether the first arguments, so many of them, are arrays of float32 that are not empty, and
    all arguments pass the check of the reference.
    """

    def fit(*args: Any, **options: Any) -> bool:
        float32 = (type(x) in (PortableArray, np.ndarray) and x.dtype == np.float32 and x.size for x in args[:arrays])
        return len(args) >= arrays and all(float32) and accepted(partial(check, **options), *args)

    return fit


def rows_of(x: np.ndarray) -> np.ndarray:
    """x (..., C) as a contiguous ordinary array (N, C)."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def relu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y, positive = np.empty(x.shape, np.float32), np.empty(x.shape, bool)
    relu_of(*(np.ascontiguousarray(each).reshape(-1) for each in (x, y, positive)))
    return y.view(PortableArray), positive


def relu_backward(dy: np.ndarray, positive: np.ndarray) -> np.ndarray:
    dx = np.empty(dy.shape, np.float32)
    relu_gradients(*(np.ascontiguousarray(each).reshape(-1) for each in (dy, positive, dx)))
    return dx.view(PortableArray)


@exact
def relu_of(x: Any, y: Any, positive: Any) -> None:
    for i in range(y.size):
        positive[i] = x[i] > ZERO
        y[i] = where(x[i] <= ZERO, ZERO, x[i])  # NaN stays


@exact
def relu_gradients(dy: Any, positive: Any, dx: Any) -> None:
    for i in range(dy.size):
        dx[i] = dy[i] * where(positive[i], ONE, ZERO)


ops.relu.add_twin(PortableArray, fits(lambda x: expect_floating(x=x), 1), relu, relu_backward, fast=True)


def swiglu(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, Any]:
    y = np.empty(gate.shape, np.float32)
    swiglu_of(*(np.ascontiguousarray(x).reshape(-1) for x in (gate, up)), y.reshape(-1))
    return y.view(PortableArray), (gate, up)


def swiglu_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, np.ndarray]:
    dgate, dup = np.empty((2, *dy.shape), np.float32)
    numbers = (np.ascontiguousarray(x).reshape(-1) for x in (dy, *cache))
    swiglu_gradients(*numbers, dgate.reshape(-1), dup.reshape(-1))
    return dgate.view(PortableArray), dup.view(PortableArray)


@partial(exact, inline=True)
def sigmoid(x: Any) -> Any:
    e = exp(-abs(x))
    return where(x < ZERO, e, ONE) / (ONE + e)


@exact
def swiglu_of(gate: Any, up: Any, y: Any) -> None:
    for i in range(y.size):
        y[i] = gate[i] * sigmoid(gate[i]) * up[i]


@exact
def swiglu_gradients(dy: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    for i in range(dy.size):
        s = sigmoid(gate[i])
        dgate[i] = dy[i] * up[i] * (s * (ONE + gate[i] * (ONE - s)))
        dup[i] = dy[i] * (gate[i] * s)


ops.swiglu.add_twin(PortableArray, fits(check_swiglu, 2), swiglu, swiglu_backward, fast=True)


@partial(exact, inline=True)
def root_mean_square(x: Any, eps: Any, room: Any) -> Any:
    """As `ops.layernorm.root_mean_square`, for one row x (C,). room (C,) is overwritten."""
    C = x.size
    beyond = False
    for c in range(C):
        beyond |= abs(x[c]) > LARGE_32
    size = ONE
    if beyond:
        for c in range(C):
            size = max(size, abs(x[c]))
        size = min(size, LARGEST)
    for c in range(C):
        quotient = x[c] / size
        room[c] = quotient * quotient
    return size * np.sqrt(collapse(room, C, 1) / np.float32(C) + eps / size / size)


def rmsnorm(x: np.ndarray, gamma: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, Any]:
    rows, y = rows_of(x), np.empty(x.shape, np.float32)
    rrms = np.empty(len(rows), np.float32)
    rmsnorm_of(rows, np.ascontiguousarray(gamma), np.float32(eps), rows_of(y), rrms)
    return y.view(PortableArray), (rows, rrms, gamma)


def rmsnorm_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, np.ndarray]:
    rows, rrms, gamma = cache
    dx, terms = np.empty(dy.shape, np.float32), np.empty(rows.shape, np.float32)
    rmsnorm_gradients(rows_of(dy), rows, rrms, np.ascontiguousarray(gamma), rows_of(dx), terms)
    return dx.view(PortableArray), total(terms, 0).view(PortableArray)


@exact
def rmsnorm_of(x: Any, gamma: Any, eps: Any, y: Any, rrms: Any) -> None:
    N, C = x.shape
    room = np.empty(C, np.float32)
    for n in range(N):
        rrms[n] = inverse = ONE / root_mean_square(x[n], eps, room)
        for c in range(C):
            y[n, c] = gamma[c] * (x[n, c] * inverse)


@exact
def rmsnorm_gradients(dy: Any, x: Any, rrms: Any, gamma: Any, dx: Any, terms: Any) -> None:
    """Compute dx, and each row's terms of dgamma."""
    N, C = x.shape
    room = np.empty(C, np.float32)
    for n in range(N):
        for c in range(C):
            xhat = x[n, c] * rrms[n]
            terms[n, c] = dy[n, c] * xhat
            room[c] = dy[n, c] * gamma[c] * xhat
        mean = collapse(room, C, 1) / np.float32(C)
        for c in range(C):
            dx[n, c] = rrms[n] * (dy[n, c] * gamma[c] - x[n, c] * rrms[n] * mean)


ops.rmsnorm.add_twin(
    PortableArray,
    fits(lambda x, gamma, eps=1e-6: check_rmsnorm(x, gamma, eps), 2),
    rmsnorm,
    rmsnorm_backward,
    fast=True,
)


def layernorm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5) -> tuple[np.ndarray, Any]:
    rows, y = rows_of(x), np.empty(x.shape, np.float32)
    shift, rstd = np.empty((2, len(rows)), np.float32)
    weights = (np.ascontiguousarray(each) for each in (gamma, beta))
    layernorm_of(rows, *weights, np.float32(eps), rows_of(y), shift, rstd)
    return y.view(PortableArray), (rows, shift, rstd, gamma)


def layernorm_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, shift, rstd, gamma = cache
    dx, terms = np.empty(dy.shape, np.float32), np.empty(rows.shape, np.float32)
    dy = rows_of(dy)
    layernorm_gradients(dy, rows, shift, rstd, np.ascontiguousarray(gamma), rows_of(dx), terms)
    return tuple(each.view(PortableArray) for each in (dx, total(terms, 0), total(dy, 0)))  # type: ignore[return-value]


@exact
def layernorm_of(x: Any, gamma: Any, beta: Any, eps: Any, y: Any, shift: Any, rstd: Any) -> None:
    N, C = x.shape
    centred, room = np.empty(C, np.float32), np.empty(C, np.float32)
    share = ONE  # below 1/C, as in the reference
    while share * C >= 1:
        share *= HALF
    for n in range(N):
        for c in range(C):
            room[c] = (x[n, c] - x[n, 0]) * share
        shift[n] = mean = collapse(room, C, 1) / np.float32(C * share)
        for c in range(C):
            centred[c] = x[n, c] - x[n, 0] - mean
        rstd[n] = inverse = ONE / root_mean_square(centred, eps, room)
        for c in range(C):
            y[n, c] = gamma[c] * (centred[c] * inverse) + beta[c]


@exact
def layernorm_gradients(dy: Any, x: Any, shift: Any, rstd: Any, gamma: Any, dx: Any, terms: Any) -> None:
    """Compute dx, and each row's terms of dgamma."""
    N, C = x.shape
    g, along, xhat = np.empty(C, np.float32), np.empty(C, np.float32), np.empty(C, np.float32)
    for n in range(N):
        for c in range(C):
            xhat[c] = (x[n, c] - x[n, 0] - shift[n]) * rstd[n]
            terms[n, c] = dy[n, c] * xhat[c]
            g[c] = dy[n, c] * gamma[c]
            along[c] = g[c] * xhat[c]
        mean, mean_along = collapse(g, C, 1) / np.float32(C), collapse(along, C, 1) / np.float32(C)
        for c in range(C):
            dx[n, c] = rstd[n] * (dy[n, c] * gamma[c] - mean - xhat[c] * mean_along)


ops.layernorm.add_twin(
    PortableArray,
    fits(lambda x, gamma, beta, eps=1e-5: check_layernorm(x, gamma, beta, eps), 3),
    layernorm,
    layernorm_backward,
    fast=True,
)


def rotary(x: np.ndarray, *args: Any, **options: Any) -> tuple[np.ndarray, Any]:
    cos, sin = tables(x, *args, **options).values()
    return rotated(x, cos, sin * ONE), (cos, -sin)  # both sines are new: for a read-only one, code is compiled anew


def rotary_backward(dy: np.ndarray, cache: Any) -> np.ndarray:
    return rotated(dy, *cache)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    y = np.empty(x.shape, np.float32)
    x = np.asarray(x) if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
    rotate(x, cos, sin, y)
    return y.view(PortableArray)


@exact
def rotate(x: Any, cos: Any, sin: Any, y: Any) -> None:
    B, H, T, D = x.shape
    half = D // 2
    whole = half - half % LANES
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for d in range(0, whole, LANES):
                    left, right = load(x, (b, h, t, d)), load(x, (b, h, t, half + d))
                    c, s = load(cos, (t, d)), load(sin, (t, d))
                    store(y, (b, h, t, d), left * c - right * s)
                    store(y, (b, h, t, half + d), right * c + left * s)
                for d in range(whole, half):
                    one, other = x[b, h, t, d], x[b, h, t, half + d]
                    y[b, h, t, d] = one * cos[t, d] - other * sin[t, d]
                    y[b, h, t, half + d] = other * cos[t, d] + one * sin[t, d]


ops.rotary.add_twin(PortableArray, fits(tables, 1), rotary, rotary_backward, fast=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: Pattern | None = None) -> tuple[np.ndarray, Any]:
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    q, k, v = (np.asarray(x) for x in (q, k, v))
    z = product(stack_groups(q * np.float32(1 / math.sqrt(D)), G), k.swapaxes(2, 3))
    masked_softmax(z.reshape(B, H, T, S), pattern)
    y = product(z, v).reshape(B, H, T, D)
    return y.view(PortableArray), (q, k, v, z)


def masked_softmax(z: np.ndarray, pattern: Pattern | None) -> None:
    """Replace z (B, H, T, S), which is contiguous, by its `ops.attention.masked_softmax`."""
    B, H, T, S = z.shape
    allowed = (pattern or Full()).table(H, T, S, np)
    if allowed is None:
        allowed = np.ones((1, S), bool)
    if allowed.ndim > 2 or allowed.shape != (T, S):  # where it is the same for all heads, it stays so
        shape = (B, H, T) if any(size > 1 for size in allowed.shape[:-2]) else allowed.shape[:-1]
        allowed = np.broadcast_to(allowed, (*shape, S)).reshape(-1, S)
    softmax_rows(z.reshape(-1, S), np.ascontiguousarray(allowed))


def attention_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v, p = cache
    G = k.shape[1]
    q_rows, dy = stack_groups(q, G), stack_groups(np.asarray(dy), G)
    dv, da = score_gradients(dy, v, p, q.shape[-1])
    q_rows, k = map(finite, (q_rows, k))
    dq, dk = product(da, k), product(da.swapaxes(2, 3), q_rows)
    return tuple(x.view(PortableArray) for x in (dq.reshape(q.shape), dk, dv))  # type: ignore[return-value]


def score_gradients(dy: np.ndarray, v: np.ndarray, p: np.ndarray, D: int) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the values v, and of the scores before they are divided by √D; p are the probabilities."""
    dv, da = product(p.swapaxes(2, 3), dy), product(dy, v.swapaxes(2, 3))
    softmax_gradient_rows(*(x.reshape(-1, p.shape[-1]) for x in (p, da)), np.float32(1 / math.sqrt(D)))
    return dv, da


def finite(x: np.ndarray) -> np.ndarray:
    return x if np.isfinite(x).all() else np.asarray(without_nan(x.view(PortableArray)))


@exact
def softmax_rows(z: Any, allowed: Any) -> None:
    """z (N, S) = the softmax of each row over those that are allowed (..., S), as in `ops.attention`."""
    N, S = z.shape
    room = np.empty(S, np.float32)
    row = room.reshape(1, S)
    for n in range(N):
        seen = allowed[n % len(allowed)]
        some = invalid = False
        for s in range(S):
            room[s] = z[n, s] if seen[s] else -INFINITY
            some |= seen[s]
            invalid |= room[s] != room[s]
        top = where(some, where(invalid, NAN, maximum_of_row(row, 0) + ZERO), ZERO)
        for s in range(S):
            e = exp(z[n, s] - top)
            z[n, s] = room[s] = e if seen[s] else ZERO
        Z = collapse(room, S, 1)
        Z = where(Z == ZERO, ONE, Z)
        for s in range(S):
            quotient = z[n, s] / Z
            z[n, s] = quotient if seen[s] else ZERO


@exact
def softmax_gradient_rows(p: Any, dp: Any, scale: Any) -> None:
    """dp (N, S) = scale times the gradient of the scores whose softmax is p and has the gradient dp."""
    N, S = p.shape
    room = np.empty(S, np.float32)
    for n in range(N):
        for s in range(S):
            d = where(p[n, s] == ZERO, ZERO, dp[n, s])
            dp[n, s] = d
            room[s] = p[n, s] * d
        mean = collapse(room, S, 1)
        for s in range(S):
            dz = p[n, s] * (dp[n, s] - mean)
            dp[n, s] = where(p[n, s] == ZERO, ZERO, dz) * scale


ops.attention.add_twin(PortableArray, fits(check_attention, 3), attention, attention_backward, fast=True)


def relative_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, r: np.ndarray, content_bias: np.ndarray, position_bias: np.ndarray,
    pattern: Pattern | None = None,
) -> tuple[np.ndarray, Any]:  # fmt: skip
    arrays = q, k, v, r, content_bias, position_bias = [
        np.asarray(x) for x in (q, k, v, r, content_bias, position_bias)
    ]
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    qu, qw = ((q + bias[:, None]) * scale for bias in (content_bias, position_bias))
    z = product(qu, k.swapaxes(2, 3))
    z += shifted(product(qw, r.swapaxes(1, 2)))
    masked_softmax(z, pattern)
    return product(z, v).view(PortableArray), (arrays, z)


def relative_attention_backward(dy: np.ndarray, cache: Any) -> tuple[np.ndarray, ...]:
    (q, k, v, r, content_bias, position_bias), p = cache
    dv, da = score_gradients(np.asarray(dy), v, p, q.shape[-1])
    q, k, r, content_bias, position_bias = map(finite, (q, k, r, content_bias, position_bias))
    db = np.zeros((*da.shape[:-1], r.shape[1]), np.float32)
    shifted(db)[...] = da
    dqu, dqw = product(da, k), product(db, r)
    dk = product(da.swapaxes(2, 3), q + content_bias[:, None])
    dr = total(product(db.swapaxes(2, 3), q + position_bias[:, None]), 0)
    gradients = dqu + dqw, dk, dv, dr, total(dqu, (0, 2)), total(dqw, (0, 2))
    return tuple(x.view(PortableArray) for x in gradients)


ops.relative_attention.add_twin(
    PortableArray, fits(check_relative_attention, 6), relative_attention, relative_attention_backward, fast=True
)

"""Pooling over time, for padded sequences."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import expect_floating, expect_lengths, expect_like, expect_range, expect_shape
from ..dispatch import backward, operation


class MeanPoolCache(NamedTuple):
    weights: Array  # (B, T): 1/length within a sequence, 0 in its padding
    width: int  # C


def within(x: Array, lengths: Array | None) -> Array:
    """(B, T), true where t < length; all true if lengths is None."""
    expect_floating(x=x)
    xp = array_module(x, lengths)
    expect_shape("x", x, "B T C")
    if lengths is None:
        return xp.ones(x.shape[:2], dtype=xp.bool)
    expect_lengths(lengths, B=x.shape[0])
    expect_range("lengths", lengths, 0, x.shape[1])
    return xp.arange(x.shape[1])[None, :] < lengths[:, None]


def mean_weights(x: Array, lengths: Array | None = None) -> dict[str, Array]:
    """The weights a of `mean_pool`. Raises TypeError or ValueError unless its arguments are valid."""
    xp = array_module(x)
    inside = cast(within(x, lengths), widen(x).dtype)
    count = xp.maximum(xp.sum(inside, axis=1, keepdims=True), 1)  # (B, 1)
    return {"weights": inside / count}  # (B, T)


@operation(given=mean_weights, gives=("weights",))
def mean_pool(x: Array, lengths: Array | None = None) -> tuple[Array, MeanPoolCache]:
    """y_b = 1/n_b Σ_{t < n_b} x_bt: the mean of a sequence over its true length n_b.

    x: (B, T, C). lengths: (B,), the n_b, or None if there is no padding. Returns y (B, C) and the cache.
    A sequence of length 0 has mean 0. The padding must be finite: its weight is 0, but 0 · NaN is NaN.
    Raises ValueError if the shapes do not fit or a length is not in 0 ... T, TypeError if the lengths are not integers.

    Forward. The mean is a sum with weights a. Padding has weight 0:

        n := lengths        a := weights
        a_bt = [t < n_b]/max(n_b, 1)
        y_bc = 1/max(n_b, 1) Σ_{t < n_b} x_btc = Σ_t a_bt x_btc

    Backward. The mean is linear in x. Each step of the sequence gets its share of dy. Padding gets none:

        ∂y_bc/∂x_btc = a_bt        dx_btc = dy_bc ∂y_bc/∂x_btc = a_bt dy_bc

    In NumPy:

        dx = weights[:, :, None] * dy[:, None, :]

    The cache keeps the a_bt and C; x is not needed.
    """
    weights = mean_weights(x, lengths)["weights"]
    y = array_module(x).sum(x * weights[:, :, None], axis=1)
    return cast(y, x.dtype), MeanPoolCache(weights, x.shape[2])


@backward
def mean_pool_backward(dy: Array, cache: MeanPoolCache) -> Array:
    """dx: see `mean_pool`."""
    weights = cache.weights
    expect_like("dy", dy, (weights.shape[0], cache.width))
    dx = weights[:, :, None] * dy[:, None, :]
    return cast(dx, dy.dtype)


class MaxPoolCache(NamedTuple):
    winner: Array  # (B, C), the step of the maximum
    live: Array  # (B, 1), false for sequences of length 0
    length: int  # T


def winners(x: Array, lengths: Array | None = None) -> dict[str, Array]:
    """The winners and live sequences of `max_pool`. Raises TypeError or ValueError unless its arguments are valid."""
    inside = within(x, lengths)
    if not x.shape[1]:
        raise ValueError(f"x: expected (B, T, C) with at least one position, got {tuple(x.shape)}")
    xp = array_module(x)
    winner = xp.argmax(xp.where(inside[:, :, None], x, -xp.inf), axis=1)  # (B, C)
    return {"winner": winner, "live": xp.any(inside, axis=1, keepdims=True)}


@operation(given=winners, gives=("winner", "live"))
def max_pool(x: Array, lengths: Array | None = None) -> tuple[Array, MaxPoolCache]:
    """y_bc = max_{t < n_b}(x_btc): the maximum of each column over the true length n_b.

    x: (B, T, C). lengths: (B,), the n_b, or None if there is no padding. Returns y (B, C) and the cache.
    A sequence of length 0 gives 0.
    Raises ValueError if the shapes do not fit, T is 0 or a length is not in 0 ... T, TypeError if the lengths are not
    integers.

    Forward. The winner of each column is the step of its maximum, or the first such step in a tie. Padding never wins,
    and a sequence is live if n_b > 0, that is, not all padding:

        n := lengths        w := winner
        w_bc = argmax_{t < n_b}(x_btc)        live_b = [n_b > 0]
        y_bc = max_{t < n_b}(x_btc) for n_b > 0
        y_bc = x_btc where live_b = 1, 0 elsewhere with t = w_bc

    Backward. For small changes of x the winner stays the same, so all of dy goes to it. (In a tie this is one of the
    subgradients.)

        ∂y_bc/∂x_btc = live_b [t = w_bc]
        dx_btc = dy_bc ∂y_bc/∂x_btc = live_b dy_bc where t = w_bc, 0 elsewhere

    In NumPy:

        dx = xp.where((steps == winner[:, None, :]) & live[:, :, None], dy[:, None, :], 0)

    The cache keeps the winners, (B, C), rather than x, (B, T, C).
    """
    given = winners(x, lengths)
    winner, live, xp = given["winner"], given["live"], array_module(x)
    y = xp.take_along_axis(x, winner[:, None, :], axis=1)[:, 0, :]
    return cast(xp.where(live, y, 0), x.dtype), MaxPoolCache(winner, live, x.shape[1])


@backward
def max_pool_backward(dy: Array, cache: MaxPoolCache) -> Array:
    """dx: see `max_pool`."""
    winner, live = cache.winner, cache.live
    expect_like("dy", dy, winner.shape)
    xp = array_module(dy)
    steps = xp.arange(cache.length)[None, :, None]  # (1, T, 1)
    dx = xp.where((steps == winner[:, None, :]) & live[:, :, None], dy[:, None, :], 0)
    return dx

"""Numbers that are easily rounded wrongly, and the comparison of arrays bit by bit."""

import numpy as np

SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3e38, 2.0**-75, 1 + 2.0**-23])


def numbers(seed, shape, kind):
    """Numbers of many magnitudes. "ties" have few digits, so that some sums lie half-way between float32 numbers."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * 2.0 ** draw.integers(-20, 20, shape)
    if kind == "special":
        x = np.where(draw.random(shape) < 0.1, draw.choice(SPECIAL, shape), x)
    if kind == "subnormal":
        x = x * 2.0**-70
    if kind == "ties":
        x = draw.integers(-9, 9, shape) * 2.0 ** draw.integers(-14, 14, shape)
    return x.astype(np.float32)


def strided(x, how):
    """The same numbers with other strides."""
    if how == "transposed":
        return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if how == "reversed":
        return x[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
    if how == "cut out":
        room = np.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3), np.nan, x.dtype)
        room[..., 1:, 2:-1] = x
        return room[..., 1:, 2:-1]
    return x


def expect_same_bits(y, expected):
    """All NaNs count as the same."""
    assert y.dtype == expected.dtype and y.shape == expected.shape
    bits = np.dtype(f"i{y.itemsize}")
    same = (y.view(bits) == expected.view(bits)) | (np.isnan(y) & np.isnan(expected))
    assert same.all(), f"{(~same).sum()} of {y.size} numbers differ"

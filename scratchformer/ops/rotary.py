"""Rotary positions: queries and keys are turned by angles that grow with their place."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, array_module
from ..dispatch import backward, operation
from .checks import expect_at_least, expect_floating, expect_like, expect_number, expect_positive, expect_shape
from .positions import BASE
from .precision import widen

# The rope types, and what the scaling of each must say; names and meanings are those of published configurations.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

Scaling = Mapping[str, Any] | None


class RotaryCache(NamedTuple):
    cos: Array  # (T, D/2)
    sin: Array  # (T, D/2)
    shape: tuple[int, ...]  # of x, (B, H, T, D)


def check_scaling(scaling: Scaling) -> None:
    """Raise TypeError unless it is None or a mapping with numbers, ValueError unless it says what its type needs."""
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected None or a mapping, got {type(scaling).__name__}")
    kind, needed = scaling.get("rope_type"), {"rope_type", *SCALINGS.get(scaling.get("rope_type"), ())}
    if kind not in SCALINGS:
        raise ValueError(f"scaling: expected a rope_type of {', '.join(SCALINGS)}, got {kind!r}")
    if scaling.keys() != needed:
        raise ValueError(f"scaling: {kind} takes {', '.join(sorted(needed))}, got {', '.join(sorted(scaling))}")
    for name in SCALINGS[kind]:
        expect_number(f"scaling: {name}", scaling[name], zero=False)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("scaling: expected low_freq_factor < high_freq_factor")


def rotary_frequencies(
    head_width: int, base: float = BASE, scaling: Scaling = None, dtype: Any = np.float64
) -> np.ndarray:
    """θ_i = base^(−2i/D) for i = 0 ... D/2 − 1: the angles by which the pairs of a head turn from one place to the next.

    head_width: D, even. scaling: how a model was made to read longer texts than it was first trained on; None, or a
    mapping as in published configurations:

        {"rope_type": "linear", "factor": a}
            θ/a: places are counted in steps of 1/a.
        {"rope_type": "llama3", "factor": a, "low_freq_factor": l, "high_freq_factor": h,
         "original_max_position_embeddings": n}
            A pair that turns f = n θ/2π times within the n places of the first training keeps its θ if f > h, and has
            θ/a if f < l. Between the two, with m = (f − l)/(h − l), it is (1 − m) θ/a + m θ.

    Returns (D/2,), computed in `dtype`. Raises ValueError for an odd D, a base that is not positive, or another type.
    """
    expect_positive(head_width=head_width)
    if head_width % 2:
        raise ValueError(f"head_width: expected an even number, whose halves are turned as pairs, got {head_width}")
    expect_number("base", base, zero=False)
    check_scaling(scaling)
    exponents = np.arange(0, head_width, 2).astype(dtype) / head_width
    theta = 1 / np.power(np.asarray(base, dtype), exponents, dtype=np.float64).astype(dtype)
    kind = None if scaling is None else scaling["rope_type"]
    if kind == "linear":
        theta = theta / scaling["factor"]
    elif kind == "llama3":
        factor, low, high, length = (scaling[name] for name in SCALINGS[kind])
        wavelength = 2 * math.pi / theta
        kept = np.clip((length / wavelength - low) / (high - low), 0, 1)
        theta = (1 - kept) * theta / factor + kept * theta
    return theta


@operation
def rotary(x: Array, start: int = 0, base: float = BASE, scaling: Scaling = None) -> tuple[Array, RotaryCache]:
    """y_t = R_t x_t = x_t turned by its place: pair i of D/2, (x_i, x_{i+D/2}), by the angle φ_ti = (start + t) θ_i.

    x: (B, H, T, D), queries or keys. start: the place of x[:, :, 0]. base, scaling: see `rotary_frequencies`, which
    gives θ. Returns y of the shape of x, and the cache. Raises ValueError for an odd D, TypeError for a start that is
    not an integer. The pairs are those of the published Llama weights: one number from each half.

    Turning keeps lengths, and (R_t q) · (R_s k) = q · (R_{s−t} k): the score of a query and a key depends on how far
    apart they are and on no place alone. Angles are computed in the precision of x, as for the published weights.

    Backward. With a = x_{..., i} and b = x_{..., i+D/2}, at place t and with φ = φ_ti,

        y_i = a cos φ − b sin φ        y_{i+D/2} = b cos φ + a sin φ

    so that a collects from both, and b too:

        da = dy_i cos φ + dy_{i+D/2} sin φ        db = dy_{i+D/2} cos φ − dy_i sin φ

    which is R_tᵀ = R_t⁻¹: dy turned back, by −φ. The angles are constants.

        dx = turn(dy, cache.cos, -cache.sin)

    The cache keeps the cosines and sines, (T, D/2) each; x is not needed.
    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34, with pairs
    as in Llama; Chen et al., "Extending context window of large language models via positional interpolation", 2023,
    for linear scaling.
    """
    cos, sin = check_rotary(x, start, base, scaling)
    xp = array_module(x)
    cos, sin = xp.asarray(cos), xp.asarray(sin)
    return turn(widen(x), cos, sin).astype(x.dtype, copy=False), RotaryCache(cos, sin, x.shape)


def check_rotary(x: Array, start: int, base: float, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Raise TypeError or ValueError for arguments of `rotary` that do not fit; the cosines and sines for them."""
    expect_floating(x=x)
    expect_shape("x", x, "B H T D")
    expect_at_least(0, start=start)
    expect_number("base", base, zero=False)
    check_scaling(scaling)
    *_, T, D = x.shape
    if D % 2:
        raise ValueError(f"x: expected (B, H, T, D) with an even D, got {tuple(x.shape)}")
    return rotary_tables(T, D, start, base, scaling, np.float32 if x.dtype.itemsize <= 4 else np.float64)


def rotary_tables(
    T: int, D: int, start: int, base: float, scaling: Scaling, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines (T, D/2) of `rotary`, which are computed once: read-only, since they are shared."""
    return _tables(T, D, start, base, None if scaling is None else tuple(scaling.items()), dtype)


@functools.lru_cache(maxsize=8)
def _tables(T: int, D: int, start: int, base: float, items: tuple | None, dtype: Any) -> tuple[np.ndarray, ...]:
    """As `rotary_tables`. items: of the scaling."""
    theta = rotary_frequencies(D, base, None if items is None else dict(items), dtype)
    angles = np.arange(start, start + T).astype(dtype)[:, None] * theta
    tables = tuple(f(angles, dtype=np.float64).astype(dtype) for f in (np.cos, np.sin))
    for table in tables:
        table.flags.writeable = False
    return tables


def turn(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs of x (..., T, D), one number from each half, by angles whose cosines and sines are (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return array_module(x).concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@backward
def rotary_backward(dy: Array, cache: RotaryCache) -> Array:
    """dx: see `rotary`."""
    expect_like("dy", dy, cache.shape)
    dtype, dy = dy.dtype, widen(dy)
    dx = turn(dy, cache.cos, -cache.sin)
    return dx.astype(dtype, copy=False)

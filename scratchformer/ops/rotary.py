"""Rotary positions: queries and keys are rotated by angles proportional to their positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import (
    CPU,
    Array,
    Device,
    array_module,
    cast,
    cosine,
    device_of,
    kept,
    logarithm,
    power,
    sine,
    to_device,
    type_of,
    widen,
)
from ..checks import (
    expect_at_least,
    expect_boolean,
    expect_floating,
    expect_like,
    expect_number,
    expect_positive,
    expect_shape,
)
from ..dispatch import backward, operation
from .positions import BASE, kept_range

# The rope types, and the numbers that each needs; names and meanings are those of published configurations.
# "longrope" is not read, since its angles depend on the length of the text; nor is "dynamic", for the same reason.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN: Mapping[str, Any] = {  # what yarn also takes, with the defaults
    "beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True,
}  # fmt: skip

Scaling = Mapping[str, Any] | None


class RotaryCache(NamedTuple):
    cos: Array  # (T, D/2)
    sin: Array  # (T, D/2)
    shape: tuple[int, ...]  # of x, (B, H, T, D)


def check_scaling(scaling: Scaling) -> None:
    """Raise TypeError unless it is None or a mapping, ValueError unless it has the numbers that its type needs, and
    none that it does not take.
    """
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected None or a mapping, got {type(scaling).__name__}")
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"scaling: expected a rope_type of {', '.join(SCALINGS)}, got {kind!r}")
    needed = {"rope_type", *SCALINGS[kind]}
    optional = YARN if kind == "yarn" else {}
    if not needed <= scaling.keys() <= needed | optional.keys():
        more = f" and perhaps {', '.join(sorted(optional))}" if optional else ""
        raise ValueError(f"scaling: {kind} takes {', '.join(sorted(needed))}{more}, got {', '.join(sorted(scaling))}")
    for name, value in scaling.items():
        if name == "truncate":  # not None, which published code takes for False, though the default is True
            expect_boolean(**{f"scaling: {name}": value})
        elif name != "rope_type" and (name in needed or value is not None):
            expect_number(f"scaling: {name}", value, zero=False)
    if kind == "yarn":
        yarn = filled(scaling)
        if yarn["beta_fast"] < yarn["beta_slow"]:
            raise ValueError("scaling: expected beta_fast >= beta_slow")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("scaling: expected low_freq_factor < high_freq_factor")


def filled(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of "yarn", with the defaults for numbers that are missing or None, and for a missing "truncate"."""
    return {**YARN, **{name: value for name, value in scaling.items() if value is not None}}


def attention_factor(scaling: Scaling) -> float:
    """What rotated queries and keys are multiplied by: 1, unless the scaling is "yarn" (see `rotary_frequencies`)."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    yarn = filled(scaling)
    if yarn["attention_factor"] is not None:
        return float(yarn["attention_factor"])
    growth = 0.1 * logarithm(max(yarn["factor"], 1))
    if yarn["mscale"] is None or yarn["mscale_all_dim"] is None:
        return 1 + growth
    return (1 + yarn["mscale"] * growth) / (1 + yarn["mscale_all_dim"] * growth)


def rotary_frequencies(
    head_width: int, base: float = BASE, scaling: Scaling = None, dtype: Any = np.float64
) -> np.ndarray:
    """θ_i = base^(−2i/D) for i = 0 ... D/2 − 1: the angle by which pair i of a head rotates per position.

    head_width: D, even. scaling: how a model was adapted to contexts longer than those of its first training; None, or
    a mapping as in published configurations. Its "rope_type" is one of these:

    - "default", as with None: θ as it is.
    - "linear", with "factor" a: θ/a for every pair, as if positions were counted in steps of 1/a.
    - "llama3", with "factor" a, "low_freq_factor" l, "high_freq_factor" h and "original_max_position_embeddings" n: a
      pair makes f = n θ/2π turns within the original context of n. It keeps θ if f > h, and gets θ/a if f < l; between
      the two, m moves from 0 to 1.
    - "yarn", with "factor" a and "original_max_position_embeddings" n: as llama3, but r moves from 0 to 1 in equal
      steps from pair to pair. Pair x makes n base^(−2 x/D)/2π turns, so β turns are made at
      x = D log(n/2πβ)/(2 log base). r starts at u, where there are "beta_fast" p turns, by default 32, and ends at v,
      where there are "beta_slow" q, by default 1. "truncate": whether u and v are rounded outwards to whole numbers, as
      by default. The rotated queries and keys are multiplied by "attention_factor", 1 + 0.1 log(a) by default, so that
      the softmax is as sharp over a longer context. With "mscale" k and "mscale_all_dim" l, the default is
      (1 + 0.1 k log(a))/(1 + 0.1 l log(a)).

    For each pair i,

        D := head_width        n := original_max_position_embeddings
        a := factor            l := low_freq_factor        h := high_freq_factor
        p := beta_fast         q := beta_slow
        θ_i = base^(−2 i/D)
        f_i = n θ_i/(2π)        m_i = min(max((f_i − l)/(h − l), 0), 1)
        u = max(⌊D log(n/(2π p))/(2 log(base))⌋, 0)        v = min(−⌊−D log(n/(2π q))/(2 log(base))⌋, D − 1)
        r_i = min(max((i − u)/(v − u), 0), 1)
        y_i = θ_i where scaling = none,
            θ_i/a where scaling = linear,
            r_i θ_i/a + (1 − r_i) θ_i where scaling = yarn,
            (1 − m_i) θ_i/a + m_i θ_i elsewhere

    Returns y (D/2,), computed in `dtype`. Raises ValueError for an odd D, a base that is not positive (with yarn, not
    above 1), or a scaling of another type. Source: Chen et al., "Extending context window of large language models via
    positional interpolation", 2023, for linear scaling; Llama 3.1's published code for llama3; Peng et al., "YaRN:
    efficient context window extension of large language models", 2023, section 3, for yarn, with the default factors as
    in published configurations.
    """
    expect_positive(head_width=head_width)
    if head_width % 2:
        raise ValueError(f"head_width: expected an even number, to be split into pairs, got {head_width}")
    expect_number("base", base, zero=False)
    check_scaling(scaling)
    exponents = np.arange(0, head_width, 2).astype(dtype) / head_width
    theta = 1 / np.array([power(base, x) for x in exponents], dtype)
    scaling = scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        theta = theta / scaling["factor"]
    elif scaling["rope_type"] == "llama3":
        factor, low, high, length = (scaling[name] for name in SCALINGS["llama3"])
        wavelength = 2 * math.pi / theta
        kept = np.clip((length / wavelength - low) / (high - low), 0, 1)
        theta = (1 - kept) * theta / factor + kept * theta
    elif scaling["rope_type"] == "yarn":
        if base <= 1:
            raise ValueError(f"base: expected a number > 1 with yarn, got {base}")
        yarn = filled(scaling)
        length = yarn["original_max_position_embeddings"]
        first, last = (
            head_width * logarithm(length / (2 * math.pi * yarn[turns])) / (2 * logarithm(base))
            for turns in ("beta_fast", "beta_slow")
        )
        if yarn["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_width - 1)
        last += 0.001 * (first == last)  # as in published code: no division by zero
        slowed = np.clip((np.arange(head_width // 2) - first) / (last - first), 0, 1).astype(dtype)
        theta = slowed * theta / yarn["factor"] + (1 - slowed) * theta
    return theta


def tables(x: Array, start: int = 0, base: float = BASE, scaling: Scaling = None) -> dict[str, Array]:
    """The cosines and sines of `rotary`, (T, D/2), on the device of x. Raises TypeError or ValueError unless its
    arguments are valid.
    """
    expect_floating(x=x)
    expect_shape("x", x, "B H T D")
    expect_at_least(0, start=start)
    expect_number("base", base, zero=False)
    check_scaling(scaling)
    *_, T, D = x.shape
    if D % 2:
        raise ValueError(f"x: expected (B, H, T, D) with an even D, got {tuple(x.shape)}")
    dtype = np.float32 if type_of(x.dtype).itemsize <= 4 else np.float64
    first, length = kept_range(start, T, array_module(x))
    cos, sin = rotary_tables(length, D, first, base, scaling, dtype, device_of(x))
    return {"cos": cos[start - first : start - first + T, :], "sin": sin[start - first : start - first + T, :]}


@operation(given=tables, gives=("cos", "sin"))
def rotary(x: Array, start: int = 0, base: float = BASE, scaling: Scaling = None) -> tuple[Array, RotaryCache]:
    """y_t = R_t x_t: the vector at each position is rotated, pair (x_i, x_{i+D/2}) by the angle φ_ti = (start + t) θ_i.

    x: (B, H, T, D), queries or keys. start: the position of x[:, :, 0]. base, scaling: see `rotary_frequencies`, which
    gives θ. Returns y of the shape of x, and the cache. Raises ValueError for an odd D, TypeError for a start that is
    not an integer. A pair is one number from each half of the vector, as in the published Llama weights.
    Angles are computed in the precision of x, as published models do. With "yarn", the cosines and sines are
    multiplied by the attention factor, and so are y and dx.

    Forward. Column d is in pair i_d, its partner is column j_d, in the other half, and σ_d is the sign of the sine. All
    sequences b and heads h turn alike:

        φ_ti = (start + t) θ_i        cos_ti = cos(φ_ti)        sin_ti = sin(φ_ti)
        i_d = d mod (D/2)        j_d = (d + D/2) mod D        σ_d = −1 where d < D/2, 1 elsewhere
        y_bhtd = x_bhtd cos_ti + σ_d x_bhtj sin_ti with i = i_d, j = j_d

    A rotation keeps lengths, and the score of a query at t and a key at s depends only on the distance s − t: it is
    enough to rotate one of them, by the difference of the angles. If x is both queries and keys,

        Σ_d y_bhtd² = Σ_d x_bhtd²
        Σ_d y_bhtd y_bhsd = Σ_d x_bhtd (x_bhsd cos((s − t) θ_i) + σ_d x_bhsj sin((s − t) θ_i)) with i = i_d, j = j_d

    Backward. x_td contributes to two outputs: to column d, and to column j, where the sine has the opposite sign. The
    angles are constants:

        ∂y_bhtd/∂x_bhtk = δ_dk cos_ti + [k = j] σ_d sin_ti with i = i_d, j = j_d
        dx_bhtd = Σ_k dy_bhtk ∂y_bhtk/∂x_bhtd = dy_bhtd cos_ti − σ_d dy_bhtj sin_ti with i = i_d, j = j_d

    This is the rotation by −φ, the transpose and the inverse of the rotation by φ:

        dx = rotate(dy, cache.cos, -cache.sin)

    The cache keeps the cosines and sines, (T, D/2) each; x is not needed.
    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34.
    """
    cos, sin = tables(x, start, base, scaling).values()
    return cast(rotate(widen(x), cos, sin), x.dtype), RotaryCache(cos, sin, x.shape)


def rotary_tables(
    T: int, D: int, start: int, base: float, scaling: Scaling, dtype: Any, device: Device = CPU
) -> tuple[Array, Array]:
    """The cosines and sines (T, D/2) of `rotary`; they are kept for the next call, and read-only."""
    return _tables(T, D, start, base, None if scaling is None else tuple(scaling.items()), dtype, device)


@kept(8)
def _tables(
    T: int, D: int, start: int, base: float, items: tuple | None, dtype: Any, device: Device
) -> tuple[Array, Array]:
    theta = rotary_frequencies(D, base, None if items is None else dict(items), dtype)
    angles = np.arange(start, start + T).astype(dtype)[:, None] * theta
    factor = attention_factor(None if items is None else dict(items))
    cos, sin = (factor * f(angles).astype(dtype) for f in (cosine, sine))
    cos.flags.writeable = sin.flags.writeable = False
    return to_device(cos, device), to_device(sin, device)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs of x (..., T, D), one number from each half, by the angles with these cosines and sines."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return array_module(x).concat([a * cos - b * sin, b * cos + a * sin], axis=-1)


@backward
def rotary_backward(dy: Array, cache: RotaryCache) -> Array:
    """dx: see `rotary`."""
    expect_like("dy", dy, cache.shape)
    dx = rotate(dy, cache.cos, -cache.sin)
    return cast(dx, dy.dtype)

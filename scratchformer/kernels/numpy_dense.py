"""Affine map with activation on NumPy: after the product, bias and activation are applied to pieces that fit the cache.

An activation that is a user's own pair goes to the reference.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import ops
from ..ops.activations import ACTIVATIONS, CUBIC, Activation, activation_pair
from ..ops.linear import LinearCache, linear_backward
from .numpy_arrays import one_real_dtype, row_pieces


def fits(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: Activation = "relu") -> bool:
    known = isinstance(activation, str) and activation in ACTIVATIONS
    return known and one_real_dtype(x, w, b) and are_affine(x, w, b)


def are_affine(x: np.ndarray, w: np.ndarray, b: np.ndarray | None) -> bool:
    """Whether the shapes are those of x w + b."""
    return w.ndim == 2 and x.shape[-1:] == w.shape[:1] and w.size > 0 and (b is None or b.shape == w.shape[1:])


def dense(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: str = "relu") -> tuple[np.ndarray, Any]:
    """As `ops.dense`: after the product, bias and activation are applied to one piece at a time.

    Forward, with all leading axes folded into n. Each activation is h Φ(h), with a Φ that rises from 0 to 1:

        h_no = Σ_i x_ni w_io + b_o
        Φ_no = [h_no > 0] where activation = relu,
            1/(1 + exp(−h_no)) where activation = silu,
            ½ (1 + erf(h_no/√2)) where activation = gelu,
            ½ (1 + tanh(√(2/π) (h_no + 0.044715 h_no³))) elsewhere
        y_no = h_no Φ_no

    Backward. The derivative φ of Φ is a function of h and of Φ itself. For the last two lines of Φ see `gelu`; since
    tanh(…) = 2Φ − 1, its derivative 1 − tanh² is 4 Φ (1 − Φ):

        φ_no := ∂Φ_no/∂h_no
        φ_no = 0 where activation = relu,
            Φ_no (1 − Φ_no) where activation = silu,
            exp(−h_no²/2)/√(2π) where activation = gelu,
            √(8/π) Φ_no (1 − Φ_no) (1 + 3·0.044715 h_no²) elsewhere
        ∂y_no/∂h_no = Φ_no + h_no φ_no
        dh_no = dy_no ∂y_no/∂h_no = dy_no (Φ_no + h_no φ_no)
        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no        db_o = Σ_n dh_no

    ReLU does not need h: y is positive exactly where h is, so the backward reads [h > 0] from y.

        kept_no = y_no where activation = relu, h_no elsewhere        [h_no > 0] = [y_no > 0]

    dh is computed piece by piece, and then passed to `linear_backward`:

        return linear_backward(dh.reshape(dy.shape), linear)

    A piece stays in the processor's cache from its bias to its activation. The cache keeps x, w, and one array of the
    size of y: y itself for ReLU, which a caller must not change before backward, h for the others.
    """
    h = x.reshape(-1, w.shape[0]) @ w
    kept, y = h, h if activation == "relu" else np.empty_like(h)
    for part in row_pieces(h):
        h[part] += b
        activate(h[part], activation, out=y[part])
    return y.reshape(*x.shape[:-1], w.shape[1]), (LinearCache(x, w, True), kept, activation)


def dense_backward(dy: np.ndarray, cache: tuple[LinearCache, np.ndarray, str]) -> tuple[np.ndarray, ...]:
    """(dx, dw, db), as `ops.dense_backward`."""
    linear, kept, activation = cache
    flat = dy.reshape(kept.shape)
    dh = np.empty_like(flat)
    for part in row_pieces(dh):
        if activation == "relu":
            np.multiply(flat[part], kept[part] > 0, out=dh[part])
        else:
            slope_at(kept[part], activation, out=dh[part])
            dh[part] *= flat[part]
    return linear_backward(dh.reshape(dy.shape), linear)


ops.dense.add_twin(np.ndarray, fits, dense, dense_backward)


def activate(h: np.ndarray, activation: Activation, out: np.ndarray) -> np.ndarray:
    """f(h), written to `out`, which may be h."""
    if not isinstance(activation, str):
        op, _ = activation_pair(activation)
        out[...], _ = op(h)
        return out
    if activation == "relu":
        return np.maximum(h, 0, out=out)
    return np.multiply(h, cdf(h, activation, out=np.empty_like(h) if out is h else out), out=out)


# For x ≥ 0, 1 − erf(x) is a polynomial in t = 1/(1 + p x) times exp(−x²), to within 1.5e-7: Abramowitz, Stegun,
# "Handbook of mathematical functions", 1964, 7.1.26. This is about the precision of float32, in a fraction of the time.
ERF_P = 0.3275911
ERF_POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # of t⁵, ..., t


def cdf(h: np.ndarray, activation: str, out: np.ndarray) -> np.ndarray:
    """Φ(h), written to `out`, for the exact GELU, its tanh approximation, or SiLU (the sigmoid)."""
    if activation == "silu":
        np.negative(h, out=out)
        with np.errstate(over="ignore"):  # 1/∞ = 0 is right
            np.exp(out, out=out)
        out += 1
        return np.reciprocal(out, out=out)
    if activation == "gelu" and h.dtype == np.float32:
        t = np.abs(h)
        t *= ERF_P * math.sqrt(0.5)
        t += 1
        np.reciprocal(t, out=t)
        np.multiply(t, ERF_POLYNOMIAL[0], out=out)
        for coefficient in ERF_POLYNOMIAL[1:]:
            out += coefficient
            out *= t
        out *= bell(h)
        np.subtract(1, out, out=out)  # erf(|h|/√2)
        np.copysign(out, h, out=out)
        out += 1
        out *= 0.5
        return out
    if activation == "gelu":
        from scipy.special import erf  # imported here because it takes 25 MB, which ReLU does not need

        np.multiply(h, math.sqrt(0.5), out=out)
        erf(out, out=out)
    else:
        np.multiply(h, h, out=out)
        out *= CUBIC
        out += 1
        out *= h
        out *= math.sqrt(2 / math.pi)
        np.tanh(out, out=out)
    out += 1
    out *= 0.5
    return out


def bell(h: np.ndarray) -> np.ndarray:
    """exp(−h²/2)"""
    with np.errstate(over="ignore"):
        e = h * h
    e *= -0.5
    return np.exp(e, out=e)


def slope_at(h: np.ndarray, activation: str, out: np.ndarray) -> None:
    """Write Φ(h) + h Φ'(h) to `out`: see `ops.gelu` and `ops.silu`."""
    cdf(h, activation, out)
    if activation == "gelu":  # Φ' = exp(−h²/2)/√(2π)
        slope = bell(h)
        slope *= 1 / math.sqrt(2 * math.pi)
    elif activation == "silu":  # Φ' = Φ (1 − Φ)
        slope = 1 - out
        slope *= out
    else:  # Φ' = ½ (1 − t²) u' = 2 Φ (1 − Φ) u', since t = 2 Φ − 1
        slope = h * h
        slope *= 3 * CUBIC
        slope += 1
        slope *= math.sqrt(8 / math.pi)
        slope *= out
        slope *= 1 - out
    slope *= h
    out += slope

"""The exact GELU in float32 on NumPy: SciPy's error function takes seven times as long as the rest of the layer's pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import ops
from .numpy_arrays import one_real_dtype, row_pieces

# For x ≥ 0, 1 − erf(x) is a polynomial in t = 1/(1 + p x) times exp(−x²), to within 1.5e-7: Abramowitz, Stegun,
# "Handbook of mathematical functions", 1964, 7.1.26. This is about the precision of float32, in a fraction of the time.
ERF_P = 0.3275911
ERF_POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # of t⁵, ..., t


def fits(x: np.ndarray, approximate: str = "none") -> bool:
    return one_real_dtype(x) and x.dtype == np.float32 and x.ndim > 0 and approximate == "none"


def gelu(x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray, np.ndarray]:
    """As `ops.gelu`, for pieces of x that stay in the processor's cache.

    Forward, with Φ and φ of the normal distribution:

        Φ_i := ½ (1 + erf(x_i/√2))        y_i = x_i Φ_i

    Backward. φ_i is the derivative of Φ_i:

        φ_i := ∂Φ_i/∂x_i = exp(−x_i²/2)/√(2π)
        dx_i = dy_i ∂y_i/∂x_i = dy_i (Φ_i + x_i φ_i)
        slope += cdf

    The cache is x.
    """
    return by_pieces(lambda h, y: np.multiply(normal_cdf(h, bell(h)), h, out=y), x), x


def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx, as `ops.gelu_backward`."""

    def gradient(h: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slope = bell(h)
        cdf = normal_cdf(h, slope)
        slope *= 1 / math.sqrt(2 * math.pi)
        slope *= h
        slope += cdf
        np.multiply(slope, dy, out=dx)

    return by_pieces(gradient, x, dy)


ops.gelu.add_twin(np.ndarray, fits, gelu, gelu_backward)


def by_pieces(compute: Callable[..., object], *arrays: np.ndarray) -> np.ndarray:
    """A new array of the shape of each of `arrays`, of which compute(*pieces, out) writes pieces."""
    y = np.empty(arrays[0].shape, arrays[0].dtype)
    flat = [x.reshape(-1) for x in (*arrays, y)]
    for part in row_pieces(flat[0]):
        compute(*(x[part] for x in flat))
    return y


def bell(h: np.ndarray) -> np.ndarray:
    """exp(−h²/2)"""
    with np.errstate(over="ignore"):
        e = h * h
    e *= -0.5
    return np.exp(e, out=e)


def normal_cdf(h: np.ndarray, bell: np.ndarray) -> np.ndarray:
    """½ (1 + erf(h/√2)), where `bell` is exp(−h²/2)."""
    t = np.abs(h)
    t *= ERF_P * math.sqrt(0.5)
    t += 1
    np.reciprocal(t, out=t)
    y = ERF_POLYNOMIAL[0] * t
    for coefficient in ERF_POLYNOMIAL[1:]:
        y += coefficient
        y *= t
    y *= bell
    np.subtract(1, y, out=y)  # erf(|h|/√2)
    np.copysign(y, h, out=y)
    y += 1
    y *= 0.5
    return y

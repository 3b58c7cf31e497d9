"""Noise that is added to the input of a model in training."""

from __future__ import annotations

from ..backend import Array, array_module
from ..checks import expect_like, expect_number, expect_real, expect_shape
from .pooling import within
from .precision import widen


def adversarial_noise(x: Array, dx: Array, epsilon: float, lengths: Array | None = None) -> Array:
    """r_btc = ε |x_b| dx_btc/|dx_b|: a little noise in the direction in which the loss of sequence b grows fastest.

    x: (B, T, C), what the noise is added to. dx: (B, T, C), the gradient of the loss with respect to x. epsilon: ε ≥ 0,
    the length of the noise in units of the length of x_b. lengths: (B,), from 0 to T, or None if there is no padding,
    which does not count and gets no noise. Returns r (B, T, C). A sequence whose gradient is 0 gets no noise either.
    Raises ValueError if the shapes do not fit or a length or ε is out of range.

    A sequence is one long vector of all its numbers, with the length

        n := lengths        r := y
        size_b = √(Σ_{t < n_b} Σ_c x_btc²)        slope_b = √(Σ_{t < n_b} Σ_c dx_btc²)
        r_btc = [t < n_b] ε size_b dx_btc/slope_b

    Noise r changes the loss by Σ_t Σ_c r_btc dx_btc, to first order. Of all r of one length, this is largest for the
    one in the direction of dx (Cauchy-Schwarz), and then it is the product of the two lengths:

        Σ_{t < n_b} Σ_c r_btc dx_btc = ε size_b slope_b

    Whoever adds r to x treats it as a constant, so there is no backward. A factor of dx, such as a loss scale in half
    precision, cancels.

    Source: Miyato, Dai, Goodfellow, "Adversarial training methods for semi-supervised text classification", 2017,
    equation 5. They normalize the embeddings, and their ε is the length of r itself.
    """
    expect_real("x", x)
    expect_shape("x", x, "B T C")
    expect_like("dx", dx, x.shape)
    expect_number("epsilon", epsilon)
    inside = within(x, lengths)[:, :, None]
    if not x.size:
        return x.copy()
    xp, x32, g = array_module(x, dx), widen(x) * inside, widen(dx) * inside
    g, _ = _scaled(g)
    unit, scale = _scaled(x32)
    size, slope = (xp.sqrt((a**2).sum(axis=(1, 2), keepdims=True)) for a in (unit, g))
    r = epsilon * scale * size * (g / xp.where(slope > 0, slope, 1))
    return r.astype(x.dtype, copy=False)


def _scaled(x: Array) -> tuple[Array, Array]:
    """x divided by its largest number in each sequence, so that no square overflows or underflows, and that number."""
    largest = abs(x).max(axis=(1, 2), keepdims=True)  # (B, 1, 1)
    scale = array_module(x).where(largest > 0, largest, 1)
    return x / scale, scale

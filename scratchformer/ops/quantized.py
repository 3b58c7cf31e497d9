"""Matrices of 8-bit and 4-bit integers, and the affine map with them, for faster generation.

Generation is as fast as the weights can be read, so fewer bits make it faster. Each column of a matrix is divided into
groups of GROUP neighbouring inputs. A group has a scale s, and its numbers are small integers times s. PANEL columns
are stored side by side, in the order in which instructions for integers read them: four inputs of each column together.
Of 4-bit integers, a byte holds two that are four inputs apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from ..backend import Array
from ..checks import expect_columns, expect_floating, expect_instance, expect_shape
from ..dispatch import operation
from ..shell.text import shown

GROUP, PANEL = 32, 16  # inputs with one scale; columns that are stored together
ZERO = {8: 128, 4: 8}  # what is added to an integer, so that it is stored without a sign
LEVELS = (7.0, 7.5, 8.0, 8.5, 9.0)  # to which the largest magnitude of a group is scaled, for integers of 4 bits
AT_ONCE = 1024  # columns that are rounded or widened together, so that they stay in the processor's cache
SMALLEST = 2.0**-100  # if the largest magnitude of a group is below this, all its numbers count as zero


class Quantized(NamedTuple):
    """A matrix (I, O) in 8 or 4 bits, on the CPU: see `quantize`."""

    numbers: np.ndarray  # (panels, groups, GROUP bits/32, PANEL, 4), bytes
    scales: np.ndarray  # (panels, groups, PANEL), the bits of bfloat16 numbers
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        return self.numbers.shape[2] * 32 // GROUP

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # its arrays cannot be written to


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves are these 16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize(w: Array, bits: int) -> Quantized:
    """The matrix w (I, O), rounded to integers of 8 or 4 bits with a scale for each group of a column.

    For 8 bits, s is the largest magnitude of the group divided by 127, and every number is rounded to the nearest
    multiple of s, so it moves by at most s/2. A group whose largest magnitude is below 2⁻¹⁰⁰ becomes zero. For 4 bits,
    the integers are −8 ... 7, and several scales are tried, which map the number of largest magnitude to −7, −7.5, ...,
    −9; what is below −8 is cut off. The scale with the smallest sum of squared errors is kept. With the integers n_i
    that it gives, the best scale for the numbers w_i of the group is then

        s = Σ_i w_i n_i / Σ_i n_i²

    Scales are rounded to bfloat16, away from zero. A matrix takes 8.5 or 4.5 bits a number. Raises ValueError for other
    bits, or unless w has two axes, I ≥ 1, O ≥ 1, and finite numbers; TypeError unless they are floating-point.
    """
    if bits not in ZERO:
        raise ValueError(f"bits: expected 8 or 4, got {shown(bits)}")
    bits = int(bits)
    expect_floating(w=w)
    expect_shape("w", w, "I O")
    I, O = w.shape
    groups, panels = -(-I // GROUP), -(-O // PANEL)
    if not w.size:
        raise ValueError(f"w: expected (I, O) with I, O >= 1, got {(I, O)}")
    numbers = np.empty((panels, groups, GROUP * bits // 32, PANEL, 4), np.uint8)
    scales = np.empty((panels, groups, PANEL), np.uint16)
    for first in range(0, panels, AT_ONCE // PANEL):
        part = slice(first, min(first + AT_ONCE // PANEL, panels))
        count = part.stop - first
        columns = np.zeros((groups, GROUP, count * PANEL), np.float32)
        given = w[:, first * PANEL : part.stop * PANEL]
        columns.reshape(-1, count * PANEL)[:I, : given.shape[1]] = given
        if not np.isfinite(columns).all():
            raise ValueError("w: expected finite numbers")
        integers, scale_bits = rounded(columns, bits)
        stored = (integers + ZERO[bits]).astype(np.uint8)
        stored = stored.reshape(groups, GROUP // 4, 4, count, PANEL).transpose(3, 0, 1, 4, 2)
        numbers[part] = stored if bits == 8 else stored[:, :, ::2] | stored[:, :, 1::2] << 4
        scales[part] = scale_bits.reshape(groups, count, PANEL).transpose(1, 0, 2)
    for array in numbers, scales:
        array.flags.writeable = False
    return Quantized(numbers, scales, (I, O))


def rounded(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of w (groups, GROUP, columns), and the bits of the scales (groups, columns)."""
    high, low = w.max(axis=1), w.min(axis=1)
    largest = np.where(high > -low, high, low)  # with its sign
    largest[abs(largest) < SMALLEST] = 0
    if bits == 8:
        scales = bits_above(abs(largest) / np.float32(ZERO[8] - 1))
        return np.rint(quotient(w, widened(scales))), scales
    unit = quotient(w, largest)
    integers, product, square = with_level(unit, LEVELS[0])
    gain = product * product / square  # Σ unit² minus this is the sum of squared errors
    for level in LEVELS[1:]:
        new, *sums = with_level(unit, level)
        better = sums[0] * sums[0] / sums[1] > gain
        np.copyto(integers, new, where=better[:, None])
        for old, each in zip((product, square), sums, strict=True):
            np.copyto(old, each, where=better)
        gain = product * product / square
    return integers, bits_above(np.einsum("gic,gic->gc", w, integers, dtype=np.float64) / square)


def quotient(w: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """w (groups, GROUP, columns) divided by (groups, columns); 0 where the divisor is 0."""
    return np.divide(w, divisor[:, None], out=np.zeros_like(w), where=divisor[:, None] != 0)


def with_level(unit: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The integers of 4 bits if 1 becomes −level, and the sums over a group of products with `unit` and of squares."""
    n = unit * np.float32(-level)
    np.clip(np.rint(n, out=n), -ZERO[4], ZERO[4] - 1, out=n)
    product, square = (np.einsum("gic,gic->gc", n, y) for y in (unit, n))
    return n, product, np.maximum(square, 1)


def bits_above(x: np.ndarray) -> np.ndarray:
    """The bits of finite float32 numbers rounded to bfloat16, away from zero."""
    return ((x.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def dequantize(w: Quantized, panels: slice = slice(None)) -> np.ndarray:
    """The numbers that w stands for, (I, O), or those of some panels, in float32."""
    numbers, scales = w.numbers[panels], widened(w.scales[panels])
    if w.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=3)
    columns = len(numbers) * PANEL
    integers = numbers.reshape(*scales.shape[:2], GROUP // 4, PANEL, 4).transpose(1, 2, 4, 0, 3).astype(np.float32)
    integers -= ZERO[w.bits]
    integers *= scales.swapaxes(0, 1)[:, None, None]
    first = (panels.start or 0) * PANEL
    return integers.reshape(-1, columns)[: w.shape[0], : w.shape[1] - first]


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """x (N, I), each group of GROUP numbers of a row rounded to integers of 8 bits times a scale."""
    N, I = x.shape
    groups = np.zeros_like(x, shape=(N, -(-I // GROUP), GROUP))
    groups.reshape(N, -1)[:, :I] = x
    largest = abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(127, largest, out=np.zeros_like(largest), where=largest >= SMALLEST)
    groups *= inverse
    np.rint(groups, out=groups)
    groups *= largest / 127
    return groups.reshape(N, -1)[:, :I]


@operation
def quantized_linear(x: Array, w: Quantized, b: Array | None = None) -> Array:
    """y = x̂ ŵ + b, over the last axis of x, with both factors rounded to small integers times scales.

    x: (..., I), any number of leading axes. w: (I, O), from `quantize`. b: (O,), or None. Returns y (..., O).
    Raises ValueError if shapes do not fit.

    A group g of GROUP inputs has one scale in each row n of x, and one in each column o of w. The sum over its inputs i
    is a sum of products of integers, m of 8 bits for x and k of 8 or 4 bits for w, and so exact:

        y_no = Σ_g t_ng s_go Σ_i m_ngi k_gio + b_o

    The scale t_ng is the largest magnitude of x in the group divided by 127, and m_ngi is the integer nearest to
    x_ngi/t_ng. A group whose largest magnitude is below 2⁻¹⁰⁰ counts as zero.

    There is no backward: the gradient of a rounded w would be zero nearly everywhere. A model is quantised after it has
    been trained.

    Source: the format Q8_0, and its products, of llama.cpp; Dettmers et al., "LLM.int8(): 8-bit matrix multiplication
    for transformers at scale", 2022, section 2.1, for scales of both factors.
    """
    expect_instance("w", w, Quantized)
    expect_floating(x=x)
    I, O = w.shape
    if x.shape[-1:] != (I,):
        raise ValueError(f"x: expected (..., {I}), got {tuple(x.shape)}")
    expect_columns("x", x)
    if b is not None:
        expect_floating(b=b)
        expect_shape("b", b, "O", O=O)
    rows = rounded_rows(x.reshape(-1, I).astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False))
    y = np.empty_like(rows, shape=(len(rows), O))
    for first in range(0, len(w.numbers), AT_ONCE // PANEL):
        last = first + AT_ONCE // PANEL
        y[:, first * PANEL : last * PANEL] = rows @ dequantize(w, slice(first, last))
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], O).astype(x.dtype, copy=False)

"""Matrices of 8-bit and 4-bit integers, and the affine map with them: for generation, which is as fast as it can read.

A column of a matrix is divided into groups of GROUP neighbouring inputs. A group has a scale s, and its numbers are
small integers times s. Along the outputs, PANEL columns are stored side by side, in the order in which instructions
for integers read them: four inputs of each column together. Of 4-bit integers, a byte holds two that are four inputs
apart.
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
LEVELS = {8: (127.0,), 4: (7.0, 7.5, 8.0, 8.5, 9.0)}  # candidates for the integer at which the largest number lies
AT_ONCE = 1024  # columns that are rounded or widened together, so that they stay in the processor's cache
SMALLEST = 2.0**-100  # the largest number of a group below which all of them count as zero


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
    multiple of s, so it moves by at most s/2. For 4 bits, integers are −8 ... 7, and several scales are tried, at which
    the largest number lies between −7 and −9; the last of these is cut off. The scale with the smallest sum of squared
    errors is kept. With the integers n that it gives, the best scale for a column's numbers w_i is then

        s = Σ_i w_i n_i / Σ_i n_i²

    Scales are rounded to bfloat16. A matrix takes 8.5 or 4.5 bits a number. Raises ValueError for other bits, or unless
    w has two axes, I ≥ 1, O ≥ 1, and finite numbers; TypeError unless they are floating-point.
    """
    if bits not in LEVELS:
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
        integers, found = rounded(columns, bits)
        stored = (integers + ZERO[bits]).astype(np.uint8)
        stored = stored.reshape(groups, GROUP // 4, 4, count, PANEL).transpose(3, 0, 1, 4, 2)
        numbers[part] = stored if bits == 8 else stored[:, :, ::2] | stored[:, :, 1::2] << 4
        scales[part] = found.reshape(groups, count, PANEL).transpose(1, 0, 2)
    for array in numbers, scales:
        array.flags.writeable = False
    return Quantized(numbers, scales, (I, O))


def rounded(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of w (groups, GROUP, columns), and the bits of the scales (groups, columns)."""
    top, low = w.max(axis=1), w.min(axis=1)
    largest = np.where(top > -low, top, low)  # (groups, columns), with its sign
    best: Any = None
    for level in LEVELS[bits]:
        integers = nearest(w, largest / -np.float32(level), bits)
        if len(LEVELS[bits]) == 1:
            return integers, bits_of(largest / -np.float32(level))
        product, square = np.vecdot(integers, w, axis=1), np.vecdot(integers, integers, axis=1)
        gain = product * product / np.maximum(square, 1)  # Σ w² minus this is the sum of squared errors
        if best is None:
            best = [gain, integers, product, square]
            continue
        better = gain > best[0]
        for old, new in zip(best, (gain, integers, product, square), strict=True):
            np.copyto(old, new, where=better if old.ndim == 2 else better[:, None])
    _, integers, product, square = best
    return integers, bits_of(product / np.maximum(square, 1))


def nearest(w: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """The integers nearest to w/scale that have so many bits."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=abs(scale) > SMALLEST)
    n = w * inverse[:, None]
    np.rint(n, out=n)
    return np.clip(n, 1 - ZERO[bits] if bits == 8 else -ZERO[bits], ZERO[bits] - 1, out=n)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits of the bfloat16 numbers nearest to finite float32 numbers."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def dequantize(w: Quantized, panels: slice = slice(None)) -> np.ndarray:
    """The numbers that w stands for, (I, O), or those of some panels, in float32."""
    numbers, scales = w.numbers[panels], widened(w.scales[panels])
    if w.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=3)
    columns = len(numbers) * PANEL
    integers = numbers.reshape(*scales.shape[:2], GROUP // 4, PANEL, 4).transpose(1, 2, 4, 0, 3).astype(np.float32)
    integers -= ZERO[w.bits]
    integers *= scales.swapaxes(0, 1)[:, None, None]
    last = (panels.start or 0) * PANEL
    return integers.reshape(-1, columns)[: w.shape[0], : w.shape[1] - last]


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """x (N, I), each group of GROUP numbers of a row rounded to integers of 8 bits times a scale."""
    N, I = x.shape
    groups = np.zeros((N, -(-I // GROUP), GROUP), x.dtype)
    groups.reshape(N, -1)[:, :I] = x
    largest = abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(127, largest, out=np.zeros_like(largest), where=~(largest < SMALLEST))
    with np.errstate(invalid="ignore"):  # infinity becomes NaN
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
    x_ngi/t_ng. A group whose largest number is below 2⁻¹⁰⁰ counts as zero.

    There is no backward: w is rounded, so that its gradient would be zero nearly everywhere. A model is quantised when
    it is trained.

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
    y = np.empty((len(rows), O), rows.dtype)
    for first in range(0, len(w.numbers), AT_ONCE // PANEL):
        last = first + AT_ONCE // PANEL
        y[:, first * PANEL : last * PANEL] = rows @ dequantize(w, slice(first, last))
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], O).astype(x.dtype, copy=False)

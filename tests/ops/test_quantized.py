"""Matrices of integers: how they are rounded and stored, and products with them."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.dispatch import fast, reference_only
from scratchformer.ops.quantized import (
    AT_ONCE,
    GROUP,
    LEVELS,
    PANEL,
    Quantized,
    dequantize,
    quantize,
    quantized_linear,
    rounded,
    rounded_rows,
)
from scratchformer.rng import Key

SIZES = st.integers(1, 2 * GROUP + 3)


def drawn(seed, *shape, scale=1.0):
    return (scale * Key(seed).generator().standard_normal(shape)).astype(np.float32)


@given(I=SIZES, O=st.integers(1, 40), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e20]), seed=st.integers(0, 99))
def test_rounding_moves_a_number_by_half_a_step_of_its_group(I, O, scale, seed):
    w = drawn(seed, I, O, scale=scale)
    w[Key(seed + 1).generator().random(w.shape) < 0.2] = 0
    eight, four = (dequantize(quantize(w, bits)) for bits in (8, 4))
    assert eight.shape == four.shape == w.shape and eight.dtype == np.float32
    for start in range(0, I, GROUP):
        part = slice(start, start + GROUP)
        largest = abs(w[part]).max(axis=0)
        step = largest / 127 * (1 + 2**-7)  # the scale is rounded up to 8 bits
        assert (abs(eight - w)[part] <= step / 2).all()
        squares = np.square((four - w)[part] / np.maximum(largest, 1e-30)).sum(axis=0)
        plain = np.square(w[part] / np.maximum(largest, 1e-30) - np.rint(7 * w[part] / np.maximum(largest, 1e-30)) / 7)
        assert (np.sqrt(squares) <= np.sqrt(plain.sum(axis=0)) * 1.001 + np.sqrt(GROUP) / 2**7).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_times_a_scale_are_kept(bits):
    high = {8: 127, 4: 7}[bits]
    integers = Key(bits).generator().integers(-high, high + 1, (2 * GROUP, 5))
    integers[[0, GROUP]] = -high  # so that the scale is the same
    w = integers.astype(np.float32) / 64
    np.testing.assert_array_equal(dequantize(quantize(w, bits)), w)
    assert quantize(w, bits).bits == bits
    assert not any(array.flags.writeable for array in quantize(w, bits)[:2])  # copies of a model share them


def test_four_bits_take_the_level_with_the_smallest_squared_error():
    """This holds for each group, and every level is the best for some group."""
    w = drawn(0, 3, GROUP, 200).astype(np.float64)
    largest = np.take_along_axis(w, abs(w).argmax(axis=1)[:, None], axis=1)

    def errors(n):
        scale = (w * n).sum(axis=1) / (n * n).sum(axis=1)
        return ((w - scale[:, None] * n) ** 2).sum(axis=1)

    each = np.stack([errors(np.clip(np.rint(-level * w / largest), -8, 7)) for level in LEVELS])
    assert {*each.argmin(axis=0).ravel()} == {*range(len(LEVELS))}
    integers, _ = rounded(w.astype(np.float32), 4)
    np.testing.assert_allclose(errors(integers), each.min(axis=0), rtol=1e-4)


def test_a_copy_is_the_same_object():
    w = quantize(drawn(0, 3, 2), 8)
    assert copy.deepcopy([w])[0] is w


@pytest.mark.parametrize("kind", [reference_only, fast])
@given(
    I=SIZES, O=st.integers(1, 40), N=st.integers(1, 3), bits=st.sampled_from([8, 4]), bias=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_product_is_that_of_the_rounded_factors(kind, I, O, N, bits, bias, seed):
    x, w = drawn(seed, N, 1, I), quantize(drawn(seed + 1, I, O), bits)
    x[0, 0, : I // 2] = 0
    b = drawn(seed + 2, O) if bias else None
    with kind():
        y = quantized_linear(x, w, b)
    expected = rounded_rows(x[:, 0].astype(np.float64)) @ dequantize(w).astype(np.float64) + (b if bias else 0)
    assert y.dtype == np.float32 and y.shape == (N, 1, O)
    np.testing.assert_allclose(y[:, 0], expected, rtol=1e-5, atol=1e-5 * np.sqrt(I))
    # rounding x moves each number by at most half a step, 1/127 of the largest
    bound = abs(x[:, 0]).max(axis=-1, keepdims=True) / 254 * abs(dequantize(w)).sum(axis=0)
    assert (abs(expected - x[:, 0] @ dequantize(w) - (b if bias else 0)) <= bound + 1e-4).all()


@pytest.mark.parametrize("kind", [reference_only, fast])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_column_does_not_depend_on_how_many_there_are(kind, bits):
    """More than are rounded and multiplied at once."""
    O = 2 * AT_ONCE + PANEL + 3
    x, w = drawn(1, 2, 5), drawn(2, 5, O)
    whole = quantize(w, bits)
    assert whole.shape == (5, O) and whole.numbers.shape[0] == whole.scales.shape[0] == -(-O // PANEL)
    with kind():
        y = quantized_linear(x, whole)
        for first in range(0, O, AT_ONCE // 2 + 1):
            some = slice(first, first + AT_ONCE // 2 + 1)
            part = quantize(w[:, some], bits)
            np.testing.assert_array_equal(dequantize(whole)[:, some], dequantize(part))
            np.testing.assert_allclose(y[:, some], quantized_linear(x, part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_very_small_numbers_count_as_zero(bits):
    w = np.full((2 * GROUP, 2), 2.0**-100, np.float32)
    w[GROUP:] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    np.testing.assert_allclose(dequantize(quantize(w, bits)), np.where(w < 2.0**-100, 0, w), rtol=0.01)
    x = w.T.copy()
    np.testing.assert_allclose(rounded_rows(x), np.where(x < 2.0**-100, 0, x), rtol=0.01)


def test_bad_arguments_are_refused():
    w = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match="bits: expected 8 or 4, got 5"):
        quantize(w, 5)
    with pytest.raises(ValueError, match="w: expected finite numbers"):
        quantize(np.full((4, 3), np.nan, np.float32), 8)
    with pytest.raises(ValueError, match=r"w: expected \(I, O\) with I, O >= 1"):
        quantize(w[:0], 4)
    with pytest.raises(ValueError, match=r"w: expected \(I, O\), got \(4,\)"):
        quantize(w[:, 0], 4)
    with pytest.raises(TypeError, match="w"):
        quantize(np.ones((4, 3), int), 8)
    with pytest.raises(ValueError, match=r"x: expected \(..., 4\), got \(2, 3\)"):
        quantized_linear(np.ones((2, 3), np.float32), quantize(w, 8))
    with pytest.raises(TypeError, match="w: expected a Quantized"):
        quantized_linear(np.ones((2, 4), np.float32), w)
    assert isinstance(quantize(w.astype(np.float64), 8), Quantized)

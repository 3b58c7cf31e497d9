import math

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.dispatch import reference_only
from scratchformer.ops import sinusoidal_positions
from scratchformer.ops.positions import MAX_KEPT, kept_range
from scratchformer.testing.strict import STRICT, traffic


@pytest.mark.parametrize(("length", "d_model"), [(1, 1), (7, 8), (300, 6), (5, 7)])
def test_formula(length, d_model, device):
    """The table agrees with Vaswani et al. 2017, section 3.5, one number at a time."""
    found = to_cpu(sinusoidal_positions(length, d_model, device.xp, np.float64))
    assert found.shape == (length, d_model)
    for pos, column in np.ndindex(length, d_model):
        i = column // 2
        angle = pos / math.pow(10000.0, 2 * i / d_model)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert math.isclose(found[pos, column], expected, rel_tol=1e-9, abs_tol=1e-12)


def test_known_value():
    """Position 100 in the slowest pair of 512 columns."""
    angle = 100 / 10000 ** (510 / 512)
    row = sinusoidal_positions(101, 512, dtype=np.float64)[100]
    assert math.isclose(row[510], math.sin(angle)) and math.isclose(row[511], math.cos(angle))
    assert math.isclose(angle, 0.0103663292843, rel_tol=1e-10)


def test_start_continues_the_table():
    whole = sinusoidal_positions(20, 6)
    assert np.array_equal(sinusoidal_positions(8, 6, start=12), whole[12:])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_type(dtype, device):
    table = sinusoidal_positions(4, 6, device.xp, dtype)
    assert table.dtype == dtype
    assert isinstance(table, device.xp.ndarray)


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "length"), ((4, 0), "d_model")])
def test_sizes_must_be_positive(sizes, name):
    with pytest.raises(ValueError, match=f"{name}: expected a number >= 1, got 0"):
        sinusoidal_positions(*sizes)


def test_the_result_may_be_written_to():
    """The table is cached between calls, but the caller gets a copy."""
    first = sinusoidal_positions(3, 4)
    expected = first.copy()
    first[...] = 7
    assert np.array_equal(sinusoidal_positions(3, 4), expected)


def test_an_integer_type_is_refused():
    with pytest.raises(TypeError, match="dtype: expected a floating-point type, got int64"):
        sinusoidal_positions(3, 4, dtype=np.int64)


@pytest.mark.parametrize("dtype", ["x", 3, [3, "a"], object()])
def test_what_is_no_type_is_refused(dtype):
    with pytest.raises(TypeError, match=r"^dtype: expected a floating-point type, got "):
        sinusoidal_positions(3, 4, dtype=dtype)


def test_positions_that_no_memory_holds():
    with pytest.raises(ValueError, match=r"^length, d_model: expected positions that fit in .* for length 1000000000"):
        sinusoidal_positions(10**9, 10**5)


@pytest.mark.parametrize("start", [-3, 0, 2_000_000])
def test_positions_on_a_device_are_the_same_wherever_they_start(start):
    found = sinusoidal_positions(3, 6, STRICT.xp, start=start)
    np.testing.assert_array_equal(to_cpu(found), sinusoidal_positions(3, 6, start=start))
    found[...] = 0  # a copy
    np.testing.assert_array_equal(
        to_cpu(sinusoidal_positions(3, 6, STRICT.xp, start=start)), sinusoidal_positions(3, 6, start=start)
    )


@pytest.mark.parametrize("start", [0, 5, 2_000_000])
def test_rotations_on_a_device_are_the_same_wherever_they_start(start):
    x = np.ones((1, 1, 3, 4), np.float32)
    with traffic() as found:
        y, _ = ops.rotary(to_device(x, STRICT), start)
    assert len(found) <= 3  # x, and two tables of a few rows
    with reference_only():
        np.testing.assert_array_equal(to_cpu(y), ops.rotary(x, start)[0])


def test_a_growing_text_needs_few_tables_on_a_device():
    """One for each power of two, which contains the positions and at most as many others on either side of 0."""
    xp = STRICT.xp
    for start in 0, -1, -7, -8, 5:
        for length in range(1, 70):
            assert kept_range(start, length, np) == (start, length)
            first, size = kept_range(start, length, xp)
            reach = max(-start, start + length)
            assert first <= start and start + length <= first + size
            assert first + size in {2**i for i in range(8)} and reach <= first + size < 2 * reach
            assert first == (-(first + size) if start < 0 else 0)
    assert kept_range(0, MAX_KEPT, xp) == (0, MAX_KEPT)
    assert kept_range(1, MAX_KEPT, xp) == (0, 2 * MAX_KEPT)
    for start in MAX_KEPT - 1, 10 * MAX_KEPT, -MAX_KEPT:
        assert kept_range(start, 3, xp) == (start, 3)
    assert kept_range(3 * MAX_KEPT, MAX_KEPT, xp) == (0, 4 * MAX_KEPT)
    assert kept_range(3 * MAX_KEPT + 1, MAX_KEPT, xp) == (3 * MAX_KEPT + 1, MAX_KEPT)

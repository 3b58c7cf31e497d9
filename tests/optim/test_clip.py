"""Clipping by the global norm."""

import math

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.dispatch import Twin
from scratchformer.nn import Param
from scratchformer.optim import clip_by_global_norm, optimizer
from scratchformer.optim.optimizer import CHUNK, global_norm, share_for, sum_of_squares
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT, DeviceArray, traffic


def gradient(size, dtype=np.float32, scale=1.0):
    return (scale * Key(size).generator().standard_normal(size)).astype(dtype)


@pytest.mark.parametrize("size", [1, 7, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norm_agrees_with_numpy_in_double_precision(device, size, dtype, scale):
    g = gradient(size, dtype, scale)
    expected = np.linalg.norm(g.astype(np.float64))
    assert float(clip_by_global_norm(to_device(g, device), math.inf)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [5, 2 * CHUNK + 3])
@pytest.mark.parametrize("times", [1.001, 1.5, 1e4])
def test_a_clipped_gradient_has_the_requested_norm_and_its_old_direction(device, size, dtype, times):
    g = gradient(size, dtype)
    g *= times * 0.5 / np.linalg.norm(g.astype(np.float64))
    clipped = to_device(g.copy(), device)
    norm = float(clip_by_global_norm(clipped, 0.5))
    found = to_cpu(clipped)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, g * (0.5 / norm), rtol=1e-6)
    assert np.linalg.norm(found.astype(np.float64)) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_short_gradient_is_untouched_bit_for_bit(device, scale):
    g = gradient(50, scale=scale)
    clipped = to_device(g.copy(), device)
    clip_by_global_norm(clipped, 1.0)
    np.testing.assert_array_equal(to_cpu(clipped), g)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_not_scaled_and_its_norm_is_returned(device, bad):
    g = gradient(50, scale=10.0)
    g[17] = bad
    clipped = to_device(g.copy(), device)
    assert not math.isfinite(float(clip_by_global_norm(clipped, 1.0)))
    np.testing.assert_array_equal(to_cpu(clipped), g)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(device, max_norm):
    with pytest.raises(ValueError, match=r"^max_norm: expected"):
        clip_by_global_norm(to_device(gradient(5), device), max_norm)


def test_several_arrays_are_scaled_together(device):
    """Also matrices; arrays that cannot be scaled in place are refused."""
    arrays = [to_device(np.full(shape, 2.0), device) for shape in ((2, 3), (4,))]
    assert float(clip_by_global_norm(arrays, 1.0)) == pytest.approx(math.sqrt(40))
    for a in arrays:
        np.testing.assert_allclose(to_cpu(a), np.full(a.shape, 2 / math.sqrt(40)), rtol=1e-12)
    with pytest.raises(ValueError, match="grad: expected contiguous arrays"):
        clip_by_global_norm([np.ones((4, 3)).T], 1.0)
    with pytest.raises(TypeError, match="grad: expected a floating-point array, got Param"):
        clip_by_global_norm([Param(np.ones(2), "w")], 1.0)


def test_the_norm_of_a_gradient_of_which_others_have_parts(device):
    mine, theirs = (to_device(gradient(size), device) for size in (5, 9))
    norm = global_norm(mine, gather=lambda squares: [squares, [sum_of_squares(theirs)]])
    assert float(norm) == pytest.approx(float(global_norm([mine, theirs])), rel=1e-12)


@pytest.mark.parametrize("fits", [False, True])
def test_a_gradient_on_a_device_is_whole_if_its_sum_of_squares_has_a_twin(device, monkeypatch, fits):
    """A twin there needs no intermediate results. On a CPU the pieces are for threads."""
    twin = Twin("sum_of_squares", lambda x: fits, sum_of_squares.reference, None)
    for name in "CHUNK", "LARGE_CHUNK":
        monkeypatch.setattr(optimizer, name, 10)
    g = gradient(25)
    clipped = to_device(g.copy(), device)
    monkeypatch.setitem(sum_of_squares.chosen[False], type(clipped), [twin])
    sizes = []

    def noted(function, pieces):
        sizes.append([piece.size for piece in pieces])
        return map(function, pieces)

    norm = float(clip_by_global_norm(clipped, 0.5, map=noted))
    assert sizes == 2 * [[25] if fits and device is not CPU else [10, 10, 5]]
    assert norm == pytest.approx(np.linalg.norm(g.astype(np.float64)), rel=1e-12)
    np.testing.assert_allclose(to_cpu(clipped), g * (0.5 / norm), rtol=1e-5)


def test_clipping_does_not_make_the_host_wait():
    """On a device norm and share are arrays there, and on a CPU numbers."""
    g = to_device(gradient(50), STRICT)
    with traffic() as copies:
        norm = clip_by_global_norm(g, 0.5)
        share = share_for(norm, 0.5)
    assert copies == [] and type(norm) is type(share) is DeviceArray
    assert type(clip_by_global_norm(gradient(50), 0.5)) is type(share_for(2.0, 0.5)) is float


def test_a_short_gradient_is_not_written_to():
    g = gradient(50, scale=0.01)
    g.flags.writeable = False
    clip_by_global_norm(g, 1.0)

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device


def draw(shape=(3, 5, 4), seed=0):
    source = np.random.default_rng(seed)
    return source.standard_normal(shape), source.standard_normal(shape)


def noise(device, x, dx, epsilon=0.1, lengths=None):
    arrays = [None if a is None else to_device(a, device) for a in (x, dx, lengths)]
    return to_cpu(ops.adversarial_noise(*arrays[:2], epsilon, arrays[2]))


def test_its_length_is_a_part_of_that_of_the_sequence(device):
    x, dx = draw()
    r = noise(device, x, dx)
    np.testing.assert_allclose(np.sqrt((r**2).sum((1, 2))), 0.1 * np.sqrt((x**2).sum((1, 2))), rtol=1e-12)
    np.testing.assert_allclose(r / dx, (r / dx)[:, :1, :1] + np.zeros_like(x), rtol=1e-12)  # one factor for a sequence
    assert (r * dx).sum() > 0


def test_padding_has_no_influence(device):
    """Each sequence gets the noise that it gets alone, whatever numbers are in the padding of x and dx."""
    x, dx = draw()
    lengths = np.array([2, 5, 3])
    r = noise(device, x, dx, lengths=lengths)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(r[b : b + 1, :n], noise(device, x[b : b + 1, :n], dx[b : b + 1, :n]), rtol=1e-12)
        assert not r[b, n:].any()


def test_a_sequence_without_a_gradient_gets_none(device):
    x, dx = draw()
    dx[1] = 0
    r = noise(device, x, dx, lengths=np.array([0, 5, 5]))
    assert not r[:2].any() and r[2].all()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_the_scale_of_the_gradient_does_not_matter(scale, device):
    """Not even where the squares of float32 underflow or overflow."""
    if scale == 1e-38 and device.index is not None:
        pytest.skip("CuPy has its kernels take numbers below 1.2e-38 for 0")
    x, dx = (a.astype(np.float32) for a in draw())
    expected = noise(device, x, dx)
    np.testing.assert_allclose(noise(device, x, (dx * np.float32(scale))), expected, rtol=1e-4)
    if scale > 1e-38:  # where the noise itself would be too small
        found = noise(device, x * np.float32(scale), dx)
        np.testing.assert_allclose(found, expected * np.float32(scale), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_its_type_is_that_of_x(dtype, device):
    x, dx = (a.astype(dtype) for a in draw((2, 300, 16)))
    r = noise(device, x, dx)
    assert r.dtype == dtype
    wide = noise(device, x.astype(np.float64), dx.astype(np.float64))
    np.testing.assert_allclose(r.astype(np.float64), wide, rtol=2e-2, atol=1e-4)


def test_an_empty_text_gets_none():
    assert noise(CPU, np.ones((2, 0, 4)), np.ones((2, 0, 4))).shape == (2, 0, 4)


def test_wrong_arguments():
    x, dx = draw()
    with pytest.raises(ValueError, match=r"dx: expected \(3, 5, 4\), got \(3, 5, 3\)"):
        ops.adversarial_noise(x, dx[:, :, :3], 0.1)
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\), got \(5, 4\)"):
        ops.adversarial_noise(x[0], dx[0], 0.1)
    with pytest.raises(ValueError, match="epsilon: expected"):
        ops.adversarial_noise(x, dx, -0.1)
    with pytest.raises(ValueError, match="lengths: expected values from 0 to 5"):
        ops.adversarial_noise(x, dx, 0.1, np.array([1, 6, 2]))

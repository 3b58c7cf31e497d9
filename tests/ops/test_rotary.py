import cmath
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.ops.rotary import attention_factor
from scratchformer.testing.strategies import tensors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(tensors("B H T 6", scales=(1.0,)), st.integers(0, 1000), st.sampled_from([100.0, 10_000.0]))
def test_equation(device, drawn, start, base):
    """A pair is a complex number, one part from each half, and rotating it is a product with exp(iφ)."""
    (x,) = drawn
    y = to_cpu(ops.rotary(to_device(x, device), start, base)[0])
    for b, h, t in np.ndindex(x.shape[:3]):
        for i in range(3):
            rotated = complex(x[b, h, t, i], x[b, h, t, i + 3]) * cmath.exp(1j * (start + t) * base ** (-2 * i / 6))
            np.testing.assert_allclose(complex(y[b, h, t, i], y[b, h, t, i + 3]), rotated, rtol=1e-9, atol=1e-11)


@given(tensors("B H T 8", "B H T 8", scales=(1.0,)), st.integers(1, 500))
def test_scores_depend_only_on_distance(device, drawn, start):
    """Moving queries and keys together changes no score, and the backward undoes the rotation of the forward."""
    q, k = (to_device(a, device) for a in drawn)
    (q0, _), (k0, _), (q1, cache), (k1, _) = (ops.rotary(x, s) for s in (0, start) for x in (q, k))
    np.testing.assert_allclose(to_cpu(q0 @ k0.swapaxes(-1, -2)), to_cpu(q1 @ k1.swapaxes(-1, -2)), rtol=1e-9, atol=1e-9)
    assert np.abs(to_cpu(q1 - q0)).max() > 1e-3
    np.testing.assert_allclose(to_cpu(ops.rotary_backward(q1, cache)), to_cpu(q), rtol=1e-9, atol=1e-11)


def test_frequencies():
    """Linear scaling divides all of them; Llama 3's keeps the fast ones and divides the slow ones."""
    theta = ops.rotary_frequencies(8, 100.0)
    np.testing.assert_allclose(theta, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-14)
    linear = ops.rotary_frequencies(8, 100.0, {"rope_type": "linear", "factor": 4})
    np.testing.assert_allclose(linear, theta / 4, rtol=1e-14)
    assert np.array_equal(ops.rotary_frequencies(8, 100.0, {"rope_type": "default"}), theta)
    fast, middle, between, slow = ops.rotary_frequencies(8, 100.0, LLAMA3)
    turns = 64 * 0.1 / (2 * math.pi)
    assert 1 < turns < 4 < 64 * theta[1] / (2 * math.pi) * 2 and 64 * theta[3] / (2 * math.pi) < 1
    kept = [min(1, (64 * f / (2 * math.pi) - 1) / 3) for f in theta[1:3]]
    expected = [(1 - m) * f / 8 + m * f for m, f in zip(kept, theta[1:3], strict=True)]
    np.testing.assert_allclose([fast, middle, between, slow], [theta[0], *expected, theta[3] / 8], rtol=1e-12)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3, YARN], ids=str)
def test_frequencies_and_angles_are_in_the_precision_of_x(scaling):
    """Also far from the first position, where published models round the angles."""
    theta = ops.rotary_frequencies(8, 100.0, scaling, np.float32)
    assert theta.dtype == np.float32
    np.testing.assert_allclose(theta, ops.rotary_frequencies(8, 100.0, scaling), rtol=1e-6)
    _, cache = ops.rotary(np.ones((1, 1, 2, 8), np.float32), 100_003, 100.0, scaling)
    angles = np.array([[100_003], [100_004]], np.float32) * theta
    for found, expected in (cache.cos, np.cos), (cache.sin, np.sin):
        factor = attention_factor(scaling)
        np.testing.assert_array_equal(found, factor * expected(angles, dtype=np.float64).astype(np.float32))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 1 + 0.1 * math.log(4)),
        ({"attention_factor": None, "mscale": 0.5}, 1 + 0.1 * math.log(4)),
        ({"mscale_all_dim": 0.5}, 1 + 0.1 * math.log(4)),
        ({"mscale": 0.5, "mscale_all_dim": 0.25}, (1 + 0.05 * math.log(4)) / (1 + 0.025 * math.log(4))),
        ({"attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 0.25}, 0.7),
        ({"factor": 0.5}, 1.0),
    ],
    ids=str,
)
def test_the_attention_factor_of_yarn(more, expected):
    q = np.random.default_rng(0).standard_normal((1, 1, 3, 4))
    (scaled, _), (plain, _) = (ops.rotary(q, scaling=YARN | more | also) for also in ({}, {"attention_factor": 1.0}))
    np.testing.assert_allclose(scaled, expected * plain, rtol=1e-14)
    for scaling in None, {"rope_type": "linear", "factor": 4.0}:
        assert np.array_equal(ops.rotary(q, scaling=scaling)[0][:, :, 0], q[:, :, 0])  # which is not rotated


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"beta_fast": 4.0}, (3, 9)),  # of 3.25 ... 8.07, rounded outwards
        ({"beta_fast": 4.0, "truncate": False}, None),
        ({"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}, None),  # every pair is on one side of the ramp
        ({"beta_fast": 1e9, "beta_slow": 1e-9}, (0, 15)),  # at most as far as there are columns
    ],
    ids=str,
)
def test_the_ramp_of_yarn(more, ends):
    """From pair to pair r moves from 0 to 1 in equal steps, between two places that need not be whole numbers."""
    D, base, turns = 16, 10.0, {"beta_fast": 32.0, "beta_slow": 1.0} | more
    if ends is None:
        names = "beta_fast", "beta_slow"
        ends = [D * math.log(64 / (2 * math.pi * turns[name])) / (2 * math.log(base)) for name in names]
    pairs = np.arange(D // 2)
    theta, r = base ** (-2 * pairs / D), np.interp(pairs, ends, [0, 1]) if ends[0] < ends[1] else pairs > ends[0]
    expected = r * theta / 4 + (1 - r) * theta
    np.testing.assert_allclose(ops.rotary_frequencies(D, base, YARN | more), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope"}, "scaling: expected a rope_type of default, linear, llama3, yarn, got 'longrope'"),
        (
            {"rope_type": "yarn", "factor": 2.0},
            "scaling: yarn takes factor, original_max_position_embeddings, rope_type ",
        ),
        (YARN | {"mscale": -1}, "scaling: mscale: expected a finite number > 0, got -1"),
        (YARN | {"beta_slow": 33}, "scaling: expected beta_fast >= beta_slow"),
        (
            {"rope_type": ["linear"]},
            r"scaling: expected a rope_type of default, linear, llama3, yarn, got \['linear'\]",
        ),
        ({"factor": 2.0}, "scaling: expected a rope_type of default, linear, llama3, yarn, got None"),
        ({"rope_type": "linear"}, "scaling: linear takes factor, rope_type, got rope_type"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, "linear takes factor, rope_type, got beta, factor, rope"),
        ({"rope_type": "linear", "factor": 0}, "scaling: factor: expected a finite number > 0, got 0"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "scaling: expected low_freq_factor < high_freq_factor"),
        (LLAMA3 | {"truncate": True}, "scaling: llama3 takes factor, .*_embeddings, rope_type, got factor"),
        (
            YARN | {"beta": 1},
            "scaling: yarn takes factor, .*, rope_type and perhaps attention_factor, beta_fast, .*got",
        ),
    ],
)
def test_scalings_that_are_not_supported(scaling, message):
    with pytest.raises(ValueError, match=message):
        ops.rotary(np.ones((1, 1, 2, 4)), scaling=scaling)


def test_arguments_that_do_not_fit():
    x = np.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match=r"x: expected \(B, H, T, D\) with an even D, got \(1, 1, 2, 3\)"):
        ops.rotary(x[..., :3])
    with pytest.raises(ValueError, match=r"x: expected \(B, H, T, D\), got \(1, 2, 4\)"):
        ops.rotary(x[0])
    with pytest.raises(ValueError, match="start: expected a number >= 0, got -1"):
        ops.rotary(x, -1)
    with pytest.raises(ValueError, match="base: expected a finite number > 0, got 0"):
        ops.rotary(x, base=0)
    for number in 0.5, 1:
        with pytest.raises(ValueError, match=f"base: expected a number > 1 with yarn, got {number}"):
            ops.rotary(x, base=number, scaling=YARN)
    assert ops.rotary(x, base=1.5, scaling=YARN)[0].shape == x.shape
    with pytest.raises(TypeError, match="scaling: expected None or a mapping, got str"):
        ops.rotary(x, scaling="linear")
    with pytest.raises(TypeError, match="scaling: factor: expected a number, got None"):
        ops.rotary(x, scaling=YARN | {"factor": None})
    for wrong in "no", None:
        with pytest.raises(TypeError, match=f"scaling: truncate: expected True or False, got {wrong!r}"):
            ops.rotary(x, scaling=YARN | {"truncate": wrong})
    with pytest.raises(ValueError, match=r"base: expected a number > 1 with yarn, got 1\.0"):
        ops.rotary(x, base=1.0, scaling=YARN)
    with pytest.raises(ValueError, match=r"head_width: expected an even number, .* got 5"):
        ops.rotary_frequencies(5)

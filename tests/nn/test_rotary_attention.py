"""Self-attention with rotary positions and shared keys: what it adds to plain attention."""

import itertools

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.rng import Key

B, T, C, H, G, D = 2, 6, 10, 4, 2, 6
LINEAR = {"rope_type": "linear", "factor": 2.0}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def make(device, **options):
    options = {"kv_heads": G, "head_width": D, "causal": True, "key": Key(1)} | options
    return nn.RotarySelfAttention(C, options.pop("heads", H), **options).to(device, np.float64)


def test_shapes_of_the_maps_and_of_what_is_stored(device):
    layer = make(device, bias=True)
    shapes = {name: tuple(p.data.shape) for name, p in layer.named_parameters().items()}
    assert shapes == {
        "query.w": (C, H * D), "query.b": (H * D,), "key.w": (C, G * D), "key.b": (G * D,),
        "value.w": (C, G * D), "value.b": (G * D,), "unify.w": (H * D, C),
    }  # fmt: skip
    x = to_device(normal(B, T, C).astype(np.float32), device)
    for stored in layer.allocate(x, 9):
        assert stored.shape == (B, G, 9, D) and stored.dtype == np.float32 and type(stored) is type(x)


@pytest.mark.parametrize("window", [None, 1, 2, 4, T])
def test_each_position_sees_its_window_and_no_more(device, window):
    """A change of x_s changes y_t for s ≤ t < s + window, and for no other t."""
    layer, x = make(device, window=window), normal(B, T, C)
    y = to_cpu(layer(to_device(x, device)))
    for s in range(T):
        changed = x.copy()
        changed[:, s] += 1
        moved = np.abs(to_cpu(layer(to_device(changed, device))) - y).max(axis=(0, 2)) > 1e-9
        assert moved.tolist() == [s <= t < s + (window or T) for t in range(T)]


def test_order_matters_only_through_rotary_positions(device):
    """Without a causal pattern or rotation, reversing x reverses y; with the rotation it does not."""
    layer, x = make(device, causal=False), normal(B, T, C)
    y, reversed_y = (to_cpu(layer(to_device(a, device))) for a in (x, x[:, ::-1].copy()))
    assert np.abs(reversed_y[:, ::-1] - y).max() > 1e-3
    layer.rotate = lambda x, start=0: (layer.split_heads(x), None)
    y, reversed_y = (to_cpu(layer(to_device(a, device))) for a in (x, x[:, ::-1].copy()))
    np.testing.assert_allclose(reversed_y[:, ::-1], y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, None),
        ({"window": 2, "scaling": LINEAR}, None),
        ({"window": 3, "bias": True}, ops.Heads(ops.Strided(2), None)),
        ({"kv_heads": 1}, ops.Local(1)),
        ({"heads": 1, "kv_heads": 1}, None),
    ],
    ids=str,
)
def test_extend_agrees_with_the_whole_sequence(device, options, pattern):
    """One position at a time, and in pieces, with stored keys and values."""
    layer = make(device, **options)
    x = to_device(normal(B, T, C), device)
    whole = to_cpu(layer(x, pattern))
    for cuts in (list(range(T + 1)), [0, 3, 4, T], [0, 1, T]):
        stored = layer.allocate(x, T + 2)
        for array in stored:
            array[...] = np.nan  # values not yet written must not be read
        for start, stop in itertools.pairwise(cuts):
            y = layer.extend(x[:, start:stop], stored, start, pattern)
            np.testing.assert_allclose(to_cpu(y), whole[:, start:stop], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads=4, kv_heads=3), "kv_heads: 3 does not divide heads 4"),
        (dict(heads=3), "heads: 3 does not divide d_model 10"),
        (dict(heads=2, rotary_width=6), "rotary_width: expected at most 5, the width of a head, got 6"),
        (dict(heads=2), "head_width: expected an even number, .* got 5"),
        (dict(heads=2, head_width=4, rotary_width=-2), "rotary_width: expected a number >= 0, got -2"),
        (dict(heads=2, head_width=4, rotary_width=6), "rotary_width: expected at most 4, the width of a head, got 6"),
        (dict(heads=2, head_width=4, window=0), "window: expected a number >= 1, got 0"),
        (dict(heads=2, head_width=4, base=-1.0), "base: expected a finite number > 0, got -1.0"),
        (
            dict(heads=2, head_width=4, scaling={"rope_type": "longrope"}),
            "scaling: expected a rope_type of .*, got 'longrope'",
        ),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        nn.RotarySelfAttention(10, **options)


def test_x_of_another_width():
    with pytest.raises(ValueError, match=r"x: expected \(B, T, 10\), got \(2, 6, 8\)"):
        make("cpu")(np.ones((2, 6, 8)))

import copy
import math

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.dispatch import reference_only
from scratchformer.nn.quantized import QuantizedLinear
from scratchformer.rng import Key


def test_weights_at_the_start_are_uniform():
    """Matrix and bias in ±1/√d_in, with mean and variance to within five standard errors."""
    layer = nn.Linear(400, 500, key=Key(1))
    for values in (layer.w.data, layer.b.data):
        assert np.abs(values).max() <= 1 / math.sqrt(400)
        assert abs(values.mean()) < 5 * 0.05 / math.sqrt(3 * values.size)
        assert abs(values.var() * 3 * 400 - 1) < 5 / math.sqrt(values.size)


def test_the_key_decides_the_weights():
    assert np.array_equal(nn.Linear(3, 4, key=Key(1)).w.data, nn.Linear(3, 4, key=Key(1)).w.data)
    assert not np.array_equal(nn.Linear(3, 4, key=Key(1)).w.data, nn.Linear(3, 4, key=Key(2)).w.data)


def test_the_parts_of_a_block_start_with_different_weights():
    block = nn.TransformerBlock(8, 2, d_ff=8, wide=False, key=Key(1))
    square = [p.data.tobytes() for p in block.parameters() if p.data.shape == (8, 8)]
    assert len(square) == 6 and len(set(square)) == 6


def test_without_bias():
    layer = nn.Linear(3, 4, bias=False)
    assert list(layer.named_parameters()) == ["w"]
    y, cache = layer.forward(np.ones((2, 3), np.float32))
    assert layer.backward(y, cache).shape == (2, 3)
    assert layer.w.grad.any()


def test_x_of_another_width():
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        nn.Linear(512, 3)(np.ones((4, 7, 256), np.float32))


def test_without_a_key_nothing_is_dropped():
    x = np.ones((3, 4), np.float32)
    for layer, key in [(nn.Dropout(0.5), None), (nn.Dropout(0.0), Key(1))]:
        y, cache = layer.forward(x, key)
        assert y is x
        assert layer.backward(x, cache) is x


def test_with_a_key_it_is_the_operation():
    x = np.random.default_rng(0).standard_normal((30, 4))
    y, cache = nn.Dropout(0.5).forward(x, key=Key(1))
    assert np.array_equal(y, ops.dropout(x, 0.5, Key(1))[0])
    assert np.array_equal(nn.Dropout(0.5).backward(x, cache), y)


def test_one_layer_in_two_places():
    """The second forward does not change the first mask, whatever the order of the backwards."""
    layer, ones = nn.Dropout(0.5), np.ones((10, 10))
    (first, cache1), (second, cache2) = layer.forward(ones, key=Key(1)), layer.forward(ones, key=Key(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(layer.backward(ones, cache1), first)
    assert np.array_equal(layer.backward(ones, cache2), second)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_p_out_of_range(p):
    with pytest.raises(ValueError, match=f"^p: expected 0 <= p < 1, got {p}"):
        nn.Dropout(p)


def test_p_that_is_not_a_number():
    with pytest.raises(TypeError, match=r"^p: expected a number, got '0\.1'$"):
        nn.Dropout("0.1")


def test_arguments_that_do_not_fit_each_other():
    with pytest.raises(ValueError, match="bias: expected True, since the layer has an activation, got False"):
        nn.Linear(2, 3, bias=False, activation="relu")
    with pytest.raises(ValueError, match="norm: expected a width that divides 6, the width of the linear layer, got 4"):
        nn.NormedLinear(nn.Linear(2, 6), nn.RMSNorm(4))


@pytest.mark.parametrize("kind", ["linear", "without a bias", "with an activation", "tied"])
def test_a_quantized_layer_is_the_layer_with_the_rounded_matrix(kind):
    tied = kind == "tied"
    layer = (
        nn.TiedOutput(nn.TokenEmbedding(8, 32))
        if tied
        else nn.Linear(
            32,
            8,
            bias=kind == "linear" or kind == "with an activation",
            activation="relu" if "activation" in kind else None,
        )
    )
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    y, cache = QuantizedLinear(layer, 8).forward(x)
    assert cache is None
    np.testing.assert_allclose(y, layer(x), atol=0.05 * np.abs(layer(x)).max())


def test_at_the_corner_of_relu_float32_has_the_gradient_of_one_side():
    """Where rounding decides the sign of a number, float32 and float64 may be on different sides of the corner. Moved a
    little to the other side, float64 agrees.
    """
    rng, corner = np.random.default_rng(0), nn.FeedForward(8, key=Key(1))
    x, dy = (rng.standard_normal((5, 8)).astype(np.float32) for _ in range(2))
    corner.up.b.data[...] = -(x[0] @ corner.up.w.data)
    positive, gradient = {}, {}
    for side in (np.float32, np.float64, "moved"):
        layer, dtype = copy.deepcopy(corner), np.float32 if side is np.float32 else np.float64
        layer.to(dtype=dtype)
        if side == "moved":
            layer.up.b.data += np.where(positive[np.float32], 1e-6, -1e-6)
        with reference_only():
            _, cache = layer.forward(x.astype(dtype))
        layer.backward(dy.astype(dtype), cache)
        positive[side], gradient[side] = cache.up.activated[0], layer.up.w.grad
    differ = positive[np.float32] != positive[np.float64]
    error = abs(gradient[np.float32] - gradient[np.float64]).max(axis=0)
    assert differ.any() and error[differ].min() > 1e-3 and error[~differ].max() < 1e-5
    np.testing.assert_allclose(gradient[np.float32], gradient["moved"], atol=1e-5)

import math

import numpy as np
import pytest

from scratchformer import nn
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

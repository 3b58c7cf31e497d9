import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.rng import Key


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

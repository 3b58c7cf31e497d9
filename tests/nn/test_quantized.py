"""Layers whose weights are integers."""

import numpy as np
import pytest

from scratchformer.nn import Linear, TiedOutput, TokenEmbedding
from scratchformer.nn.quantized import LINE, QuantizedLinear, gather
from scratchformer.ops.quantized import dequantize
from scratchformer.ops.quantized import quantize as round_matrix
from scratchformer.rng import Key

LAYERS = {
    "bias": lambda: Linear(40, 3, key=Key(1)),
    "no bias": lambda: Linear(40, 17, bias=False, key=Key(2)),
    "activation": lambda: Linear(40, 3, activation="relu", key=Key(3)),
    "tied": lambda: TiedOutput(TokenEmbedding(5, 40, key=Key(4))),
    "tied, bias": lambda: TiedOutput(TokenEmbedding(5, 40, key=Key(5)), bias=True),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_the_output_is_that_of_the_rounded_matrix(name, bits):
    layer = LAYERS[name]()
    if layer.b is not None:
        layer.b.data[...] = 10 * np.arange(len(layer.b.data)) - 15
    matrix = layer.table.data.T if isinstance(layer, TiedOutput) else layer.w.data
    x = Key(0).generator().standard_normal((2, 3, 40)).astype(np.float32)
    y, cache = QuantizedLinear(layer, bits).forward(x)
    expected = x @ dequantize(round_matrix(matrix, bits)) + (0 if layer.b is None else layer.b.data)
    if name == "activation":
        expected = np.maximum(expected, 0)
        assert not y.all()
    np.testing.assert_allclose(y, expected, atol=0.01 * np.linalg.norm(matrix, axis=0).max() * np.sqrt(40))
    assert cache is None  # x is rounded too


def test_all_matrices_are_moved_into_one_array():
    layers = [QuantizedLinear(make(), bits) for make in LAYERS.values() for bits in (8, 4)]
    before = [layer.w for layer in layers]
    gather(layers)
    ends = []
    for layer, old in zip(layers, before, strict=True):
        assert layer.w.shape == old.shape
        for array, as_before in zip(layer.w[:2], old[:2], strict=True):
            np.testing.assert_array_equal(array, as_before)
            start = array.ctypes.data
            assert start % LINE == 0 and not array.flags.writeable and not np.shares_memory(array, as_before)
            assert not ends or 0 <= start - ends[-1] < LINE
            ends.append(start + array.nbytes)

"""Affine layers whose weights are integers of 8 or 4 bits, for generation and evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..backend import Array
from ..ops.activations import activation_pair
from ..ops.quantized import quantize, quantized_linear
from .embedding import TiedOutput
from .layer import Layer
from .pointwise import Linear

LINE = 64  # bytes that a processor reads together


class QuantizedLinear(Layer):
    """y = f(x ŵ + b), where ŵ is the w of a `Linear`, or the transposed table of a `TiedOutput`, in `bits` bits.

    For the mathematics see `ops.quantized.quantized_linear`. It has no backward. w is a `Quantized` and no parameter,
    so it is not saved. Raises what `ops.quantized.quantize` raises.
    """

    def __init__(self, layer: Linear | TiedOutput, bits: int) -> None:
        self.w = quantize(layer.table.data.T if isinstance(layer, TiedOutput) else layer.w.data, bits)
        self.b, self.activation = layer.b, getattr(layer, "activation", None)

    def forward(self, x: Array) -> tuple[Array, None]:
        y = quantized_linear(x, self.w, None if self.b is None else self.b.data)
        return y if self.activation is None else activation_pair(self.activation)[0](y)[0], None


def gather(layers: Sequence[QuantizedLinear]) -> None:
    """Move the matrices of the layers, one after another, into a single array.

    A large array gets large pages from Linux, in which a processor finds numbers in fewer steps than in those of 4 kB
    that arrays of less than 4 MB get. Each matrix is freed when it has been copied.
    """
    sizes = [-(-array.nbytes // LINE) * LINE for layer in layers for array in layer.w[:2]]
    memory = np.empty(sum(sizes) + LINE, np.uint8)
    starts = itertools.accumulate(sizes, initial=-memory.ctypes.data % LINE)
    for layer in layers:
        arrays = []
        for array in layer.w[:2]:
            start = next(starts)
            new = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            new[...] = array
            new.flags.writeable = False
            arrays.append(new)
        layer.w = layer.w._replace(numbers=arrays[0], scales=arrays[1])

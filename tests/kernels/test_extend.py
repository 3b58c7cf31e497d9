"""One new token through a block: the twin and the reference, on every kind of block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.dispatch import reference_only
from scratchformer.nn import FeedForward, TransformerBlock
from scratchformer.nn.block import extend_block
from scratchformer.rng import Key


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@settings(max_examples=max(4, settings.default.max_examples // 6))
@given(
    B=st.integers(1, 4), H=st.integers(1, 3), D=st.integers(2, 5), T=st.integers(1, 2), past=st.integers(0, 6),
    wide=st.booleans(), bias=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_twin_gives_what_the_reference_gives(norm, activation, dtype, B, H, D, T, past, wide, bias, seed):
    draw, C = Key(seed).generator(), H * D
    block = TransformerBlock(C, H, norm, causal=True, wide=wide, bias=bias, activation=activation, key=Key(seed))
    block = block.to(dtype=dtype)
    for p in block.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    x = draw.standard_normal((B, T, C)).astype(dtype)
    stored = draw.standard_normal((2, B, H, 8, C if wide else D)).astype(dtype)
    fast, plain = stored.copy(), stored.copy()
    y = extend_block(x, block, *fast, past)
    with reference_only():
        expected = extend_block(x, block, *plain, past)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == np.float32 else dict(rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, expected, **tolerance)
    np.testing.assert_allclose(fast, plain, **tolerance)  # the new keys and values are stored, and no others
    assert np.array_equal(fast[:, :, :, past + T :], stored[:, :, :, past + T :])


def test_a_block_of_other_parts_is_left_to_the_reference():
    class Half(FeedForward):
        def forward(self, x):
            y, cache = super().forward(x)
            return y / 2, cache

    block = TransformerBlock(6, 2, "pre", causal=True, key=Key(0))
    block.feedforward = Half(6, key=Key(1))
    x, keys = Key(2).generator().standard_normal((1, 1, 6)).astype(np.float32), np.zeros((1, 2, 4, 3), np.float32)
    y = extend_block(x, block, keys, keys.copy(), 0)
    assert np.array_equal(y, extend_block.reference(x, block, keys, keys.copy(), 0))

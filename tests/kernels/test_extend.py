"""One new token through a block: the twin compared with the reference, for every kind of block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.dispatch import reference_only
from scratchformer.models import LlamaBlock
from scratchformer.nn import FeedForward, Frozen, Linear, LoRA, Residual, TiedOutput, TokenEmbedding, TransformerBlock
from scratchformer.nn.block import extend_block, extend_output
from scratchformer.ops import BlockEnds, Full, Heads, Local, Padding, SameBlock, Strided
from scratchformer.rng import Key

PATTERNS = [None, Strided(2), Local(2), SameBlock(3), BlockEnds(3), Local(2) | BlockEnds(3, 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@settings(max_examples=max(4, settings.default.max_examples // 6))
@given(
    B=st.integers(1, 4), H=st.integers(1, 3), D=st.integers(2, 5), T=st.integers(1, 2), past=st.integers(0, 6),
    wide=st.booleans(), bias=st.booleans(), relative=st.booleans(), pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_twin_agrees_with_the_reference(
    norm, activation, dtype, B, H, D, T, past, wide, bias, relative, pattern, seed
):
    draw, C = Key(seed).generator(), H * D
    pattern = Heads(*(pattern or Full() for _ in range(H - 1)), Strided(2)) if seed % 5 == 0 else pattern
    block = TransformerBlock(
        C, H, norm, causal=True, wide=wide, bias=bias, activation=activation, relative=relative, key=Key(seed)
    ).to(dtype=dtype)
    for p in block.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    x = draw.standard_normal((B, T, C)).astype(dtype)
    stored = draw.standard_normal((2, B, H, 8, C if wide else D)).astype(dtype)
    fast, plain = stored.copy(), stored.copy()
    y = extend_block(x, block, tuple(fast), past, pattern)
    with reference_only():
        expected = extend_block(x, block, tuple(plain), past, pattern)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == np.float32 else dict(rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, expected, **tolerance)
    np.testing.assert_allclose(fast, plain, **tolerance)  # the new keys and values are stored, and no others
    assert np.array_equal(fast[:, :, :, past + T :], stored[:, :, :, past + T :])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=max(4, settings.default.max_examples // 3))
@given(
    B=st.integers(1, 4), G=st.integers(1, 3), K=st.integers(1, 3), D=st.integers(1, 4), past=st.integers(0, 6),
    window=st.none() | st.integers(1, 9), bias=st.booleans(), scaled=st.booleans(), pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_rotary_positions_shared_keys_and_gates(dtype, B, G, K, D, past, window, bias, scaled, pattern, seed):
    """A Llama block, no part of which is left to the reference unless heads that share keys differ in pattern."""
    draw, C, H = Key(seed).generator(), 6, G * K
    pattern = Heads(*(pattern or Full() for _ in range(H - 1)), Strided(2)) if seed % 5 == 0 else pattern
    options = dict(scaling={"rope_type": "linear", "factor": 3.0}, base=50.0) if scaled else {}
    biases = dict(bias=bias, output_bias=bias, feedforward_bias=bias)
    block = LlamaBlock(C, H, G, 5, 2 * D, window=window, eps=1e-2, key=Key(seed), **biases, **options).to(dtype=dtype)
    for p in block.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    x = draw.standard_normal((B, 1, C)).astype(dtype)
    stored = draw.standard_normal((2, B, G, 8, 2 * D)).astype(dtype)
    fast, plain = stored.copy(), stored.copy()
    y = extend_block(x, block, tuple(fast), past, pattern)
    expected = extend_block.reference(x, block, tuple(plain), past, pattern)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == np.float32 else dict(rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, expected, **tolerance)
    np.testing.assert_allclose(fast, plain, **tolerance)
    assert np.array_equal(fast[:, :, :, past + 1 :], stored[:, :, :, past + 1 :])


def test_a_llama_is_not_left_to_the_reference(monkeypatch):
    module = pytest.importorskip("scratchformer.kernels.numpy_extend", reason="no kernels")
    monkeypatch.setattr(module, "plain", None)
    x, stored = np.ones((1, 1, 8), np.float32), np.zeros((2, 1, 2, 4, 2), np.float32)
    for pattern in None, Local(1):
        extend_block(x, LlamaBlock(8, 4, 2, window=2, key=Key(0)), tuple(stored), 3, pattern)


def test_only_the_window_is_read():
    pytest.importorskip("scratchformer.kernels.numpy_extend", reason="no kernels")
    block, draw = LlamaBlock(8, 4, 2, window=3, key=Key(0)), Key(2).generator()
    x, keys, values = (draw.standard_normal(s).astype(np.float32) for s in ((1, 1, 8), (1, 2, 8, 2), (1, 2, 8, 2)))
    y = extend_block(x, block, (keys, values), 6)
    keys[:, :, [0, 1, 2, 3, 7]] = values[:, :, [0, 1, 2, 3, 7]] = np.nan
    assert np.array_equal(extend_block(x, block, (keys, values), 6), y)
    keys[:, :, 4] = np.nan
    assert np.isnan(extend_block(x, block, (keys, values), 6)).all()


@pytest.mark.parametrize("relative", [False, True])
def test_keys_that_may_not_be_seen_are_not_read(relative):
    pytest.importorskip("scratchformer.kernels.numpy_extend", reason="no kernels")
    block = TransformerBlock(6, 2, "pre", causal=True, relative=relative, key=Key(0))
    draw = Key(2).generator()
    x, keys, values = (draw.standard_normal(s).astype(np.float32) for s in ((1, 1, 6), (1, 2, 8, 3), (1, 2, 8, 3)))
    y = extend_block(x, block, (keys, values), 7, Strided(3))
    keys[:, :, [0, 2, 3, 5, 6]] = values[:, :, [0, 2, 3, 5, 6]] = np.nan
    assert np.array_equal(extend_block(x, block, (keys, values), 7, Strided(3)), y)
    assert np.isnan(extend_block(x, block, (keys, values), 7)).all()


def test_a_pattern_that_differs_between_sequences_is_left_to_the_reference():
    block = TransformerBlock(6, 2, "pre", causal=True, key=Key(0))
    draw = Key(2).generator()
    x, keys, values = (draw.standard_normal(s).astype(np.float32) for s in ((2, 1, 6), (2, 2, 4, 3), (2, 2, 4, 3)))
    y = extend_block(x, block, (keys, values), 3, Padding(np.array([4, 2])))
    assert np.array_equal(y, extend_block.reference(x, block, (keys, values), 3, Padding(np.array([4, 2]))))
    assert not np.allclose(y[1], extend_block(x, block, (keys, values), 3)[1], rtol=1e-3)


def test_a_block_of_other_parts_is_left_to_the_reference():
    class Half(FeedForward):
        def forward(self, x):
            y, cache = super().forward(x)
            return y / 2, cache

    block = TransformerBlock(6, 2, "pre", causal=True, key=Key(0))
    block.feedforward = Half(6, key=Key(1))
    x, keys = Key(2).generator().standard_normal((1, 1, 6)).astype(np.float32), np.zeros((1, 2, 4, 3), np.float32)
    y = extend_block(x, block, (keys, keys.copy()), 0)
    assert np.array_equal(y, extend_block.reference(x, block, (keys, keys.copy()), 0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize("output", ["Linear", "TiedOutput", "TiedOutput, bias"])
def test_a_large_matrix_is_divided_among_the_cores(monkeypatch, output, cores, dtype):
    """The logits of one row, and a block, with products in parts of different sizes."""
    module = pytest.importorskip("scratchformer.kernels.numpy_extend", reason="no kernels")
    monkeypatch.setattr(module, "CORES", cores)
    monkeypatch.setattr(module, "PART", 20)
    draw = Key(0).generator()
    layer = Linear(8, 17) if output == "Linear" else TiedOutput(TokenEmbedding(17, 8), bias="bias" in output)
    layer.to(dtype=dtype)
    for p in layer.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    x = draw.standard_normal((1, 1, 8)).astype(dtype)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == np.float32 else dict(rtol=1e-12, atol=1e-12)
    for rows in (x, np.repeat(x, 3, axis=0), np.repeat(x, 2, axis=1)):
        y = extend_output(rows, layer)
        assert y.dtype == dtype
        np.testing.assert_allclose(y, layer(rows), **tolerance)
    block = TransformerBlock(8, 2, "pre", causal=True, bias=True, key=Key(1)).to(dtype=dtype)
    keys, values = np.zeros((2, 1, 2, 3, 4), dtype)
    y = extend_block(x, block, (keys, values), 0)
    np.testing.assert_allclose(y, extend_block.reference(x, block, (keys, values), 0), **tolerance)


def test_an_output_of_another_kind_is_left_to_the_reference():
    class Half(Linear):
        def forward(self, x):
            y, cache = super().forward(x)
            return y / 2, cache

    x = np.ones((1, 1, 4), np.float32)
    for layer in Half(4, 3, key=Key(1)), Linear(4, 3, activation="relu", key=Key(1)):
        assert np.array_equal(extend_output(x, layer), layer(x))


class Halved(Residual):
    """A user's own residual branch."""

    def around(self, branch, x):
        return super().around(branch, x) / 2


class HalvedBlock(TransformerBlock):
    def branches(self):
        return tuple(Halved(r.branch, r.norm, r.order, r.dropout) for r in super().branches())


def exchanged():
    """Blocks with parts that the twin must not mistake for those that it knows."""
    yield HalvedBlock(6, 2, norm="pre", key=Key(1))
    yield TransformerBlock(6, 2, activation=None, key=Key(1))
    maps = ("attention", "value"), ("attention", "unify"), ("feedforward", "up"), ("feedforward", "down")
    for activation in "gelu", None:
        for layer, name in maps:
            block = TransformerBlock(6, 2, activation=None, key=Key(1))
            owner = getattr(block, layer)
            old = getattr(owner, name).w.data.shape
            setattr(owner, name, Linear(*old, key=Key(2), activation=activation))
            yield block
    for wrap in Frozen, lambda layer: LoRA(layer, 2):
        block = TransformerBlock(6, 2, activation=None, key=Key(1))
        block.feedforward.up = wrap(block.feedforward.up)
        yield block


@pytest.mark.parametrize("B", [1, 2])
def test_parts_that_were_exchanged(B):
    for block in exchanged():
        x = Key(3).generator().standard_normal((B, 1, 6), np.float32)
        stored = block.allocate(x, 4)
        y = extend_block(x, block, stored, 0)
        with reference_only():
            np.testing.assert_allclose(y, extend_block(x, block, stored, 0), rtol=1e-4, atol=1e-5)

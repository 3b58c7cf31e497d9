"""One new token through a block: the twins compared with the reference, for every kind of block."""

import copy
import functools
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.dispatch import fast, reference_only
from scratchformer.models import LlamaBlock
from scratchformer.nn import (
    FeedForward,
    Frozen,
    Linear,
    LoRA,
    Residual,
    RotarySelfAttention,
    TiedOutput,
    TokenEmbedding,
    TransformerBlock,
)
from scratchformer.nn.block import extend_block
from scratchformer.nn.embedding import extend_output
from scratchformer.ops import BlockEnds, Causal, Full, Heads, Local, Padding, SameBlock, Strided
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
    window=st.none() | st.integers(1, 9), bias=st.booleans(), scaled=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_rotary_positions_shared_keys_and_gates(dtype, B, G, K, D, past, window, bias, scaled, seed):
    """A Llama block, no part of which is left to the reference."""
    draw, C, H = Key(seed).generator(), 6, G * K
    options = dict(scaling={"rope_type": "linear", "factor": 3.0}, base=50.0) if scaled else {}
    biases = dict(bias=bias, output_bias=bias, feedforward_bias=bias)
    block = LlamaBlock(C, H, G, 5, 2 * D, window=window, eps=1e-2, key=Key(seed), **biases, **options).to(dtype=dtype)
    for p in block.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    x = draw.standard_normal((B, 1, C)).astype(dtype)
    stored = draw.standard_normal((2, B, G, 8, 2 * D)).astype(dtype)
    fast, plain = stored.copy(), stored.copy()
    y = extend_block(x, block, tuple(fast), past)
    expected = extend_block.reference(x, block, tuple(plain), past)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == np.float32 else dict(rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, expected, **tolerance)
    np.testing.assert_allclose(fast, plain, **tolerance)
    assert np.array_equal(fast[:, :, :, past + 1 :], stored[:, :, :, past + 1 :])


@pytest.mark.parametrize("kind", [nullcontext, fast])
def test_a_llama_is_not_left_to_the_reference(kind, monkeypatch):
    pytest.importorskip("scratchformer.kernels.numpy_extend", reason="no kernels")
    monkeypatch.setattr(RotarySelfAttention, "extend", None)
    x, stored = np.ones((1, 1, 8), np.float32), np.zeros((2, 1, 2, 4, 2), np.float32)
    with kind():
        extend_block(x, LlamaBlock(8, 4, 2, window=2, key=Key(0)), tuple(stored), 3)


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


def test_an_output_of_another_kind_is_left_to_the_reference():
    class Half(Linear):
        def forward(self, x):
            y, cache = super().forward(x)
            return y / 2, cache

    x = np.ones((1, 1, 4), np.float32)
    for layer in Half(4, 3, key=Key(1)), Linear(4, 3, activation="relu", key=Key(1)):
        with fast():
            assert np.array_equal(extend_output(x, layer), layer(x))


class Halved(Residual):
    """A user's own residual branch."""

    def around(self, branch, x):
        return super().around(branch, x) / 2


class HalvedBlock(TransformerBlock):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.first, self.second = (Halved(r.branch, r.norm, r.order, r.dropout) for r in (self.first, self.second))


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


@pytest.mark.parametrize("kind", [nullcontext, fast])
@pytest.mark.parametrize("B", [1, 2])
def test_parts_that_were_exchanged(B, kind):
    for block in exchanged():
        x = Key(3).generator().standard_normal((B, 1, 6), np.float32)
        stored = block.allocate(x, 4)
        with kind():
            y = extend_block(x, block, stored, 0)
        with reference_only():
            np.testing.assert_allclose(y, extend_block(x, block, stored, 0), rtol=1e-4, atol=1e-5)


COMPILED = {
    **{
        f"{norm}, {f}": (TransformerBlock, dict(norm=norm, causal=True, bias=norm == "pre", activation=f, d_ff=d_ff))
        for norm, f, d_ff in (("pre", "gelu_tanh", 600), ("post", "gelu", 320), ("post", "relu", 32), ("pre", None, 31))
    },
    "llama": (LlamaBlock, dict(kv_heads=1, head_width=8, d_ff=24, window=4)),
    "llama, bias": (LlamaBlock, dict(kv_heads=1, d_ff=288, bias=True, output_bias=True, feedforward_bias=True)),
    "narrow heads": (LlamaBlock, dict(kv_heads=2, head_width=6, d_ff=7)),
}


def with_random_weights(layer, dtype):
    """The layer in `dtype`, and in float32 with the same weights."""
    for name, p in layer.named_parameters().items():
        p.data[...] = 0.5 * Key(2).fold(name).generator().standard_normal(p.data.shape)
    layer.to(dtype=dtype)
    plain = copy.deepcopy(layer).to(dtype=np.float32)
    return layer, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_agrees_with_the_full_forward(compiled, monkeypatch, name, dtype):
    """Token after token, for one sequence and several, also with matrices that are divided among the cores."""
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    kind, options = COMPILED[name]
    block, plain = with_random_weights(kind(32, 2, key=Key(0), **options), dtype)
    x = Key(3).generator().standard_normal((3, 6, 32)).astype(dtype)
    expected = plain.to(dtype=np.float64)(x.astype(np.float64), pattern=Causal())
    for part in 1 << 20, 100:
        monkeypatch.setattr(compiled, "PART", part)
        monkeypatch.setattr(compiled, "CORES", 3)
        for B in 1, 3:
            stored = block.allocate(x[:B], 8)
            with fast():
                y = [extend_block(np.ascontiguousarray(x[:B, [t]]), block, stored, t) for t in range(6)]
            assert all(step.dtype == dtype and step.shape == (B, 1, 32) for step in y)
            error = np.abs(np.concatenate(y, axis=1).astype(np.float64) - expected[:B]).max() / np.abs(expected).max()
            assert error < (1e-6 if dtype == np.float32 else 2**-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_compiled_logits(compiled, monkeypatch, tied, dtype):
    """They are float32, also those of a bfloat16 model."""
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    layer = TiedOutput(TokenEmbedding(19, 8), bias=True) if tied else Linear(8, 19)
    layer, plain = with_random_weights(layer, dtype)
    x = Key(1).generator().standard_normal((3, 1, 8)).astype(dtype)
    for part in 1 << 20, 20:
        monkeypatch.setattr(compiled, "PART", part)
        for B in 1, 3:
            with fast():
                y = extend_output(x[:B], layer)
            assert y.dtype == np.float32
            np.testing.assert_allclose(y, plain(x[:B].astype(np.float32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_cores_changes_no_bit(compiled, monkeypatch, dtype):
    """Neither of one row through a block, whose matrices are divided, nor of logits."""
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    monkeypatch.setattr(compiled, "PART", 100)
    blocks = (
        TransformerBlock(64, 4, "pre", causal=True, d_ff=600, key=Key(0)),
        LlamaBlock(64, 8, 4, head_width=8, key=Key(0)),
        LlamaBlock(64, 4, 2, d_ff=300, key=Key(0)),
    )
    outputs = Linear(64, 91), TiedOutput(TokenEmbedding(91, 64))
    for layer in *blocks, *outputs:
        with_random_weights(layer, dtype)
    x, found = Key(1).generator().standard_normal((1, 1, 64)).astype(dtype), []
    for cores in 1, 2, 3, 7:
        monkeypatch.setattr(compiled, "CORES", cores)
        with fast():
            rows = [extend_block(x, block, block.allocate(x, 3), 0) for block in blocks]
            found.append(rows + [extend_output(x, layer) for layer in outputs])
    for other in found[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("past", [6, 17, 39])
@pytest.mark.parametrize("B", [1, 2])
def test_compiled_code_ignores_what_may_not_be_seen(compiled, past, B):
    """Nothing outside the window counts: neither earlier keys and values, nor memory for later ones."""
    block, draw = LlamaBlock(32, 2, 2, window=20, key=Key(0)), Key(2).generator()
    x = draw.standard_normal((B, 1, 32), np.float32)
    stored = block.allocate(x, 40)
    for array in stored:
        array[...] = draw.standard_normal(array.shape)
    expected = extend_block.reference(x, block, stored, past)
    with fast():
        y = extend_block(x, block, stored, past)
        for array in stored:
            array[:, :, past + 1 :] = array[:, :, : max(0, past - 19)] = np.nan
        assert np.array_equal(extend_block(x, block, stored, past), y)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
@pytest.mark.parametrize(("I", "O"), [(1, 1), (8, 16), (13, 35), (35, 13), (64, 96)])
def test_rows_times_matrices(compiled, dtype, I, O):
    """From a place in a larger matrix whose other numbers are NaN, which must not be read as its own."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), str(dtype), dtype))
    draw = Key(5).generator()
    w, x = draw.standard_normal((I, O)).astype(dtype), draw.standard_normal((20, I), np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    for multiply, inside in (compiled.multiply, w), (compiled.multiply_transposed, w.T):
        larger, y = np.full((len(inside) + 1, inside.shape[1] + 40), np.nan, dtype), np.empty(O, np.float32)
        larger[: len(inside), 5 : 5 + inside.shape[1]] = inside
        multiply(x[0], compiled.as_bits(larger), 5, y)
        np.testing.assert_allclose(y, exact[0], rtol=1e-5, atol=1e-5)
    y = np.empty((20, O), np.float32)
    for means in {compiled.means(), None}:
        rows_by_means(compiled)(means, x, compiled.as_bits(w), y)
        np.testing.assert_allclose(y, exact, atol=1e-5 if dtype == np.float32 else 2**-6 * np.abs(exact).max())


@functools.cache
def rows_by_means(module):
    """`multiply_rows` exists in compiled code only."""
    function = module.multiply_rows
    return module.compiled(lambda means, x, w, y: function(means, x, w, y))


def test_compiled_code_sees_other_weights(compiled):
    """Arrays that are prepared for compiled code are prepared again when the block gets others."""
    block, x = TransformerBlock(8, 2, causal=True, key=Key(0)), np.ones((1, 1, 8), np.float32)
    with fast():
        before = extend_block(x, block, block.allocate(x, 2), 0)
        block.feedforward.down = Linear(32, 8, key=Key(5))
        after = extend_block(x, block, block.allocate(x, 2), 0)
        np.testing.assert_allclose(after, block(x), rtol=1e-5, atol=1e-5)
    assert not np.allclose(before, after)


@pytest.mark.parametrize(
    "change",
    [
        lambda block, stored: (block, LlamaBlock(32, 4, 4).allocate(np.ones((1, 1, 32), np.float32), 4), 0),
        lambda block, stored: (block, (stored[0], stored[1][:, :, :2].copy()), 3),
        lambda block, stored: (block, stored, -1),
        lambda block, stored: (block, stored, 4),
        lambda block, stored: (setattr(block.feedforward, "down", Linear(16, 32)), stored, 0),
        lambda block, stored: (setattr(block.feedforward, "gate", Linear(32, 16)), stored, 0),
        lambda block, stored: (setattr(block.attention, "unify", Linear(16, 32)), stored, 0),
        lambda block, stored: (setattr(block.attention, "value", Linear(32, 16)), stored, 0),
    ],
    ids=["keys", "values", "past", "room", "down", "gate", "unify", "value"],
)
def test_compiled_code_refuses_what_the_numpy_twin_refuses(change):
    """It checks no index, so all shapes must be checked before."""
    pytest.importorskip("scratchformer.kernels", reason="no kernels")
    x, block = np.ones((1, 1, 32), np.float32), LlamaBlock(32, 4, 1, key=Key(0))
    changed, stored, past = change(block, block.allocate(x, 4))
    for around in (nullcontext, fast):
        with around(), pytest.raises((ValueError, IndexError)):
            extend_block(x, changed or block, stored, past)


def test_what_compiled_code_does_not_know():
    """Several tokens, patterns, float64, and keys in another order of memory, go to the NumPy twin."""
    draw = Key(2).generator()
    for dtype, T, pattern, ordered in (
        (np.float64, 1, None, True), (np.float32, 2, None, True), (np.float32, 1, Strided(2), True),
        (np.float32, 1, None, False),
    ):  # fmt: skip
        block = TransformerBlock(6, 2, "pre", causal=True, key=Key(0)).to(dtype=dtype)
        x = draw.standard_normal((2, T, 6)).astype(dtype)
        stored = block.allocate(x, 5) if ordered else tuple(np.zeros((2, 2, 2, 5, 3), dtype))
        for array in stored:
            array[...] = 0.3
        with fast():
            y = extend_block(x, block, stored, 3, pattern)
        np.testing.assert_allclose(y, extend_block.reference(x, block, stored, 3, pattern), rtol=1e-4, atol=1e-5)

"""One new token through a decoder block: the twins compared with the reference, and beam search with them."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.dispatch import fast, reference_only
from scratchformer.generation import DecoderCache, beam_search
from scratchformer.models import EncoderDecoder
from scratchformer.nn import DecoderBlock, FeedForward, Frozen, Linear, LoRA, Residual
from scratchformer.nn.decoder_block import extend_decoder_block
from scratchformer.ops import Causal, Full, Local, Padding
from scratchformer.rng import Key


def with_random_weights(layer, dtype):
    """The layer in `dtype`, and in float64 with the same weights."""
    for name, p in layer.named_parameters().items():
        p.data[...] = 0.5 * Key(2).fold(name).generator().standard_normal(p.data.shape)
    layer.to(dtype=dtype)
    return layer, copy.deepcopy(layer).to(dtype=np.float64)


def projected(block, memory):
    """Keys and values of a memory in the order of memory in which `DecoderCache` keeps them."""
    return tuple(np.ascontiguousarray(x) for x in block.cross.project(memory))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("norm", ["pre", "post"])
@settings(max_examples=max(4, settings.default.max_examples // 4))
@given(
    B=st.integers(1, 4), H=st.integers(1, 3), D=st.integers(2, 5), M=st.integers(1, 5), T=st.integers(1, 2),
    past=st.integers(0, 6), bias=st.booleans(), activation=st.sampled_from(["relu", "gelu", "gelu_tanh"]),
    kind=st.integers(0, 3), compiled=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_twins_agree_with_the_reference(norm, dtype, B, H, D, M, T, past, bias, activation, kind, compiled, seed):
    """Also where nothing of the memory may be seen."""
    draw, C = Key(seed).generator(), H * D
    block = DecoderBlock(C, H, norm, bias=bias, activation=activation, key=Key(seed)).to(dtype=dtype)
    for p in block.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    pattern = [None, Full(), Local(2), Padding(draw.integers(0, M + 3, B))][kind]
    x, memory = (draw.standard_normal((B, n, C)).astype(dtype) for n in (T, M))
    stored = block.allocate(x, 8), block.allocate(x, 8)
    for keys, others in zip(*stored, strict=True):
        keys[...] = others[...] = draw.standard_normal(keys.shape)
    with fast() if compiled else nullcontext():
        y = block.extend(x, stored[0], past, projected(block, memory), pattern)
    with reference_only():
        expected = block.extend(x, stored[1], past, projected(block, memory), pattern)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == np.float32 else dict(rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(y, expected, **tolerance)
    for found, plain in zip(*stored, strict=True):  # the new keys and values are stored, and no others
        np.testing.assert_allclose(found, plain, **tolerance)
        assert np.array_equal(found[:, :, past + T :], plain[:, :, past + T :])


class HalfFeedForward(FeedForward):
    def forward(self, x):
        y, cache = super().forward(x)
        return y / 2, cache


class Halved(Residual):
    def around(self, branch, x):
        return super().around(branch, x) / 2


class HalvedBlock(DecoderBlock):
    """Its cross-attention has a residual branch of another kind."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.second = Halved(self.cross, self.norm2, self.norm, self.dropout)


def exchanged():
    """Blocks with parts that the twins must not mistake for those that they know."""
    yield HalvedBlock(6, 2, norm="pre", key=Key(1))
    changes = {
        ("cross", "query"): Linear(6, 6, activation="gelu", key=Key(2)),
        ("cross", "unify"): Linear(6, 6, activation="relu", key=Key(2)),
        ("attention", "value"): Linear(6, 6, activation="gelu", key=Key(2)),
        ("feedforward", "up"): LoRA(Linear(6, 24, key=Key(2)), 2),
        ("feedforward", "down"): Frozen(Linear(24, 6, key=Key(2))),
    }
    for (owner, name), layer in changes.items():
        block = DecoderBlock(6, 2, key=Key(1))
        setattr(getattr(block, owner), name, layer)
        yield block
    block = DecoderBlock(6, 2, key=Key(1))
    block.feedforward = HalfFeedForward(6, key=Key(1))
    yield block


@pytest.mark.parametrize("kind", [nullcontext, fast])
@pytest.mark.parametrize("B", [1, 2])
def test_parts_that_were_exchanged(B, kind):
    for block in exchanged():
        x, memory = (Key(i).generator().standard_normal((B, n, 6), np.float32) for i, n in ((3, 1), (4, 5)))
        stored, known = block.allocate(x, 4), projected(block, memory)
        with kind():
            y = block.extend(x, stored, 0, known)
        with reference_only():
            expected = block.extend(x, stored, 0, known)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def in_parts(monkeypatch, module, part, cores):
    """Matrices with at least `part` elements are divided among so many cores."""
    monkeypatch.setattr(module, "PART", part)
    monkeypatch.setattr(module, "CORES", cores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("norm", "activation", "d_ff"), [("pre", "gelu", 600), ("post", "relu", 31)])
def test_compiled_code_agrees_with_the_full_forward(compiled, monkeypatch, norm, activation, d_ff, dtype):
    """Token after token, for one sequence and several, also with matrices that are divided among the cores.

    How float32 is rounded depends on the processor, so its bound is twice the error of the reference in float32.
    """
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    block = DecoderBlock(32, 2, norm, d_ff, activation, bias=norm == "pre", key=Key(0))
    block, plain = with_random_weights(block, dtype)
    x, memory = (Key(i).generator().standard_normal((3, n, 32)).astype(dtype) for i, n in ((3, 6), (4, 19)))
    pattern = Padding(np.array([18, 1, 19]))
    expected = plain(x.astype(np.float64), memory.astype(np.float64), pattern)

    def error(y):
        return np.abs(y.astype(np.float64) - expected[: len(y)]).max() / np.abs(expected).max()

    with reference_only():
        bound = 2 * error(block(x, memory, pattern)) if dtype == np.float32 else 2**-7
    assert bound < 3e-6 or dtype != np.float32
    for part in 1 << 20, 100:
        in_parts(monkeypatch, compiled, part, cores=3)
        for B in 1, 3:
            stored, known, seen = block.allocate(x[:B], 8), projected(block, memory[:B]), Padding(pattern.lengths[:B])
            with fast():
                steps = [np.ascontiguousarray(x[:B, [t]]) for t in range(6)]
                y = [block.extend(step, stored, t, known, seen) for t, step in enumerate(steps)]
            assert all(step.dtype == dtype and step.shape == (B, 1, 32) for step in y)
            assert error(np.concatenate(y, axis=1)) < bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_cores_changes_no_bit(compiled, monkeypatch, dtype):
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    block, _ = with_random_weights(DecoderBlock(64, 4, d_ff=600, bias=True, key=Key(0)), dtype)
    x, memory = (Key(i).generator().standard_normal((1, n, 64)).astype(dtype) for i, n in ((3, 1), (4, 21)))
    known, found = projected(block, memory), set()
    for cores in 1, 2, 3, 7:
        in_parts(monkeypatch, compiled, 100, cores)
        with fast():
            found.add(block.extend(x, block.allocate(x, 3), 0, known).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("part", [1 << 20, 100])
@pytest.mark.parametrize("B", [1, 3])
def test_padding_and_later_places_are_not_read(compiled, monkeypatch, B, part):
    in_parts(monkeypatch, compiled, part, cores=2)
    block, draw, lengths = DecoderBlock(32, 2, d_ff=64, key=Key(0)), Key(2).generator(), np.array([17, 1, 40])[:B]
    x, memory = (draw.standard_normal((B, n, 32), np.float32) for n in (1, 40))
    stored, known = block.allocate(x, 40), projected(block, memory)
    for array in stored:
        array[...] = draw.standard_normal(array.shape)
    with fast():
        y = block.extend(x, stored, 18, known, Padding(lengths))
        for array in stored:
            array[:, :, 19:] = np.nan
        for array in known:
            for b, length in enumerate(lengths):
                array[b, :, length:] = np.nan
        assert np.array_equal(block.extend(x, stored, 18, known, Padding(lengths)), y)
        known[1][0, 0, 16] = np.nan  # the last place of a memory that may be seen
        assert np.isnan(block.extend(x, stored, 18, known, Padding(lengths))[0]).all()


def without(place):
    """The same keys and values, the array at `place` of them without its last row of places."""
    return lambda arrays: tuple(x[:, :, :-1].copy() if i == place else x for i, x in enumerate(arrays))


@pytest.mark.parametrize("kind", [nullcontext, fast])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys of the memory", dict(memory=without(0))),
        ("values of the memory", dict(memory=without(1))),
        ("another batch", dict(memory=lambda arrays: tuple(np.repeat(x, 3, axis=0) for x in arrays))),
        ("other heads", dict(memory=lambda arrays: tuple(x.reshape(2, 2, 5, 16) for x in arrays))),
        ("lengths", dict(pattern=lambda _: Padding(np.array([3, 2, 1])))),
        ("stored values", dict(stored=lambda arrays: (arrays[0], arrays[1][:, :, :2].copy()))),
        ("no room", dict(past=lambda _: 4)),
        ("past", dict(past=lambda _: -1)),
        ("query", dict(block=lambda block: setattr(block.cross, "query", Linear(32, 16)))),
        ("unify", dict(block=lambda block: setattr(block.cross, "unify", Linear(16, 32)))),
        ("up", dict(block=lambda block: setattr(block.feedforward, "up", Linear(16, 128)))),
        ("norm3", dict(block=lambda block: setattr(block, "norm3", type(block.norm3)(16)))),
    ],
    ids=lambda x: x if isinstance(x, str) else "changed",
)
def test_wrong_shapes_are_refused(kind, name, change):
    """Compiled code checks no index, so all shapes must be checked before."""
    x, block = np.ones((2, 1, 32), np.float32), DecoderBlock(32, 4, key=Key(0))
    memory = projected(block, np.ones((2, 5, 32), np.float32))
    arguments = dict(block=block, stored=block.allocate(x, 4), past=3, memory=memory, pattern=Padding(np.array([5, 2])))
    for argument, to in change.items():
        arguments[argument] = to(arguments[argument]) or block
    with kind(), pytest.raises((ValueError, IndexError)):
        extend_decoder_block(x, **arguments)


def test_what_compiled_code_does_not_know():
    """Several tokens, other patterns, float64, and keys in another order of memory, go to the NumPy twin."""
    for dtype, T, pattern, ordered in (
        (np.float64, 1, None, True), (np.float32, 2, None, True), (np.float32, 1, Local(2), True),
        (np.float32, 1, Causal(), True), (np.float32, 1, None, False),
    ):  # fmt: skip
        block = DecoderBlock(6, 2, "pre", key=Key(0)).to(dtype=dtype)
        x, memory = (Key(i).generator().standard_normal((2, n, 6)).astype(dtype) for i, n in ((3, T), (4, 5)))
        stored, known = block.allocate(x, 5), projected(block, memory) if ordered else block.cross.project(memory)
        for array in stored:
            array[...] = 0.3
        with fast():
            y = block.extend(x, stored, 2, known, pattern)
        expected = extend_decoder_block.reference(x, block, stored, 2, pattern, known)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_beam_search_is_compiled_and_finds_the_same(compiled, norm, K):
    """`beam_search` runs nothing but compiled blocks, whose rows of keys and values it exchanges."""
    model = EncoderDecoder(31, 16, 2, 2, 24, norm, key=Key(5))
    model.flat.data *= 2  # stronger predictions
    source, lengths = Key(0).generator().integers(2, 31, (3, 6)), np.array([6, 1, 4])
    found = beam_search(model, source, lengths, 0, 1, K, longer=8)
    with reference_only():
        expected = beam_search(model, source, lengths, 0, 1, K, longer=8)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.ids.tolist() == plain.ids.tolist()
        assert ours.score == pytest.approx(plain.score, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_whose_rows_are_exchanged(compiled, dtype):
    dtype = getattr(pytest.importorskip("ml_dtypes"), dtype, np.float32)
    model, plain = with_random_weights(EncoderDecoder(31, 32, 2, 2, 24, key=Key(0)), dtype)
    source, lengths = Key(0).generator().integers(2, 31, (2, 6)), np.array([6, 2])
    ids, rows = np.array([3, 4, 5, 6, 7, 8]), np.array([2, 0, 0, 4, 4, 5])
    with fast():
        cache = DecoderCache(model, source, lengths, 4, copies=3)
        cache.logits(np.zeros((6, 1), np.int64))
        cache.logits(ids[:, None])
        cache.reorder(rows)
        found = cache.logits(np.full((6, 1), 9))
    written = np.stack([np.zeros(6, np.int64), ids[rows], np.full(6, 9)], axis=1)
    expected = plain(np.repeat(source, 3, axis=0), np.repeat(lengths, 3), written)[:, -1]
    assert np.abs(found - expected).max() / np.abs(expected).max() < (1e-5 if dtype == np.float32 else 2**-5)

"""The key-value cache gives the same logits as the full forward."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.dispatch import fast
from scratchformer.generation import DecoderCache, KeyValueCache, SegmentCache, cache_for, generate, quantize
from scratchformer.generation.cache import grow
from scratchformer.models import EncoderDecoder, LanguageModel, SparseTransformer, TransformerXL
from scratchformer.models.families import FAMILIES
from scratchformer.ops.rounding import bfloat16
from scratchformer.rng import Key

CONTEXT, LONG = 12, 4096
BODIES = [
    {"norm": "pre"},
    {"norm": "post", "bias": True},
    {"norm": "post", "wide": True},
    {"norm": "pre", "positions": "sinusoidal"},
    {"norm": "pre", "positions": "none", "activation": "gelu"},
    {"norm": "post", "recompute": True, "dropout": 0.5},
    {"norm": "pre", "positions": "relative"},
]
every_body = pytest.mark.parametrize("body", BODIES, ids=str)


def tokens(batch, length):
    return Key(0).generator().integers(0, 31, (batch, length))


def full_logits(model, ids):
    """Logits (B, T, V) of the whole sequence at once."""
    return to_cpu(model(to_device(ids, model.device)))


def cached_logits(cache, ids):
    return to_cpu(cache.logits(to_device(ids, cache.model.device)))


@every_body
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-13)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pieces", [[1] * CONTEXT, [5, 1, 1, 4, 1], [CONTEXT]], ids=str)
def test_logits_agree_with_the_full_forward_at_every_position(
    device, make_model, body, dtype, tolerance, batch, pieces
):
    model, ids = make_model(device, dtype, **body), tokens(batch, CONTEXT)
    expected = full_logits(model, ids)
    cache, end = KeyValueCache(model, batch), 0
    for length in pieces:
        end += length
        found = cached_logits(cache, ids[:, end - length : end])
        assert found.shape == (batch, 31)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected[:, end - 1], rtol=0, atol=tolerance * np.abs(expected).max())


@every_body
def test_a_full_cache_slides_to_its_later_half_and_stays_exact(device, make_model, body):
    """However many tokens have been seen, at least half a context and at most a whole one is kept."""
    model, ids = make_model(device, np.float64, **body), tokens(2, 4 * CONTEXT)
    cache = KeyValueCache(model, 2)
    for end in range(1, ids.shape[1] + 1):
        found = cached_logits(cache, ids[:, end - 1 : end])
        kept = cache.ids.shape[1]
        assert kept == end if end <= CONTEXT else CONTEXT // 2 <= kept <= CONTEXT
        np.testing.assert_array_equal(to_cpu(cache.ids), ids[:, end - kept : end])
        expected = full_logits(model, ids[:, end - kept : end])[:, -1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [{}, {"kind": "fixed", "width": 2}], ids=str)
@pytest.mark.parametrize("pieces", [[1] * 3 * CONTEXT, [5, 1, 1, 4, 1, 7, 2, CONTEXT, 3]], ids=len)
def test_a_sparse_transformer_has_the_logits_of_its_full_forward(device, kind, pieces):
    """Before and after the context slides; after that, its blocks are counted from the first token that is kept."""
    model = SparseTransformer(31, 12, 2, 2, CONTEXT, 3, key=Key(0), **kind)
    for p in model.parameters():
        p.data[...] = Key(1).generator().standard_normal(p.data.shape)
    model, ids = model.to(device, np.float64), tokens(2, sum(pieces))
    cache, end = KeyValueCache(model, 2), 0
    for length in pieces:
        end += length
        found = cached_logits(cache, ids[:, end - length : end])
        expected = full_logits(model, ids[:, end - cache.ids.shape[1] : end])[:, -1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_a_full_cache_computes_a_token_about_twice(device, make_model):
    model, ids = make_model(device), tokens(1, 10 * CONTEXT)
    cache, computed = KeyValueCache(model, 1), []
    extend = model.extend
    model.extend = lambda new, *rest: (computed.append(new.shape[1]), extend(new, *rest))[1]
    for end in range(1, ids.shape[1] + 1):
        cached_logits(cache, ids[:, end - 1 : end])
    assert sum(computed) < 2.2 * ids.shape[1]


@pytest.mark.parametrize("lengths", [(3, CONTEXT), (CONTEXT, 5), (7, 9), (4, 3 * CONTEXT), (2 * CONTEXT, 1)])
def test_several_tokens_that_overflow_the_context(device, make_model, lengths):
    model, ids = make_model(device, np.float64), tokens(2, sum(lengths))
    cache = KeyValueCache(model, 2)
    cached_logits(cache, ids[:, : lengths[0]])
    found = cached_logits(cache, ids[:, lengths[0] :])
    kept = cache.ids.shape[1]
    assert min(lengths[1], CONTEXT) <= kept <= CONTEXT
    np.testing.assert_allclose(found, full_logits(model, ids[:, -kept:])[:, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_shortest_contexts(device, make_model, context):
    model, ids = make_model(device, np.float64, context=context), tokens(1, 8)
    cache = KeyValueCache(model, 1)
    for end in range(1, 9):
        found = cached_logits(cache, ids[:, end - 1 : end])
        expected = full_logits(model, ids[:, end - cache.ids.shape[1] : end])[:, -1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_sequences_of_a_batch_do_not_see_each_other(device, make_model):
    model, ids = make_model(device, np.float64), tokens(3, CONTEXT)
    together = KeyValueCache(model, 3)
    alone = [KeyValueCache(model, 1) for _ in range(3)]
    for t in range(CONTEXT):
        found = cached_logits(together, ids[:, t : t + 1])
        expected = np.concatenate([cached_logits(c, ids[b : b + 1, t : t + 1]) for b, c in enumerate(alone)])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# A model with a memory


def make_xl(device, memory, dtype=np.float64, **options):
    model = TransformerXL(31, 12, 3, 2, 5, memory, key=Key(0), **options)
    for i, p in enumerate(model.parameters()):
        p.data += 0.2 * np.random.default_rng(i).standard_normal(p.data.shape).astype(np.float32)
    return model.to(device, dtype)


def segment_logits(model, ids):
    """Logits (B, T, V) of a text read segment by segment."""
    memory, logits = None, []
    for start in range(0, ids.shape[1], model.context):
        y, cache = model.forward(to_device(ids[:, start : start + model.context], model.device), memory)
        memory = model.remember(cache)
        logits.append(to_cpu(y))
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("body", [{"norm": "pre"}, {"norm": "post", "recompute": True, "dropout": 0.5}], ids=str)
@pytest.mark.parametrize("memory", [0, 3, 5, 12])
@pytest.mark.parametrize("pieces", [[1] * 23, [7, 1, 1, 5, 9], [23]], ids=str)
def test_a_segment_cache_agrees_with_reading_segment_by_segment(device, memory, pieces, body):
    """At every position of a text of several segments, in any pieces, with a memory of 0 to 2.4 segments."""
    model, ids = make_xl(device, memory, **body), tokens(2, 23)
    expected = segment_logits(model, ids)
    cache, end = cache_for(model, 2), 0
    assert isinstance(cache, SegmentCache)
    for length in pieces:
        end += length
        found = cached_logits(cache, ids[:, end - length : end])
        np.testing.assert_allclose(found, expected[:, end - 1], rtol=0, atol=1e-11 * np.abs(expected).max())
    assert cache.length <= cache.room == memory + 5


def test_a_segment_cache_computes_every_token_once(device):
    model, ids, computed = make_xl(device, 5), tokens(1, 40), []
    extend = model.extend
    model.extend = lambda new, *rest: (computed.append(new.shape[1]), extend(new, *rest))[1]
    cache = cache_for(model, 1)
    for end in range(1, 41):
        cached_logits(cache, ids[:, end - 1 : end])
    assert sum(computed) == 40


def test_generating_with_a_memory_is_the_argmax_segment_by_segment(device):
    model, ids = make_xl(device, 7), tokens(2, 4)
    found = np.stack(list(generate(model, ids, 15, temperature=0)), axis=1)
    for _ in range(15):
        ids = np.concatenate([ids, segment_logits(model, ids)[:, -1:].argmax(axis=-1)], axis=1)
    assert np.array_equal(found, ids[:, 4:])


def test_only_the_end_of_a_long_prompt_is_read(device):
    model, ids = make_xl(device, 7), tokens(2, 30)
    first, second = (
        np.stack(list(generate(model, prompt, 5, temperature=0)), axis=1) for prompt in (ids, ids[:, -12:])
    )
    assert np.array_equal(first, second)


def test_a_model_without_a_memory_gets_the_other_cache(make_model):
    assert type(cache_for(make_model(), 1)) is KeyValueCache


def with_last(ids, token):
    """Only the last token is invalid: the tokens before it, a segment or more, must not be stored either."""
    ids = ids.copy()
    ids[-1, -1] = token
    return ids


BAD_IDS = {
    "too large": (lambda ids: with_last(ids, 31), IndexError, "ids: expected values from 0 to 30, got 31"),
    "negative": (lambda ids: with_last(ids, -1), IndexError, "ids: expected values from 0 to 30, got -1"),
    "fractions": (lambda ids: ids + 0.5, TypeError, "ids: expected integers, got float64"),
    "other rows": (lambda ids: ids[:1], ValueError, r"ids: expected \(2, T\)"),
    "no axis of time": (lambda ids: ids[:, 0], ValueError, r"ids: expected \(2, T\)"),
    "no token": (lambda ids: ids[:, :0], ValueError, r"ids: expected \(B, T\) with T >= 1"),
}


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("kind", [KeyValueCache, SegmentCache, DecoderCache])
@pytest.mark.parametrize("pieces", [[5, 7, 2], [14]], ids=str)
def test_a_cache_that_refused_ids_still_agrees_with_the_full_forward(device, make_model, kind, bad, pieces):
    """With invalid ids before every piece; some pieces overflow the context or fill several segments."""
    change, error, message = BAD_IDS[bad]
    ids, full = tokens(2, 14), None
    if kind is DecoderCache:
        model = EncoderDecoder(31, 12, 3, 1, key=Key(0)).to(device, np.float64)
        source, lengths = tokens(2, 3), np.array([3, 2])
        cache = kind(model, source, lengths, 14)
        full = to_cpu(model(*(to_device(x, device) for x in (source, lengths, ids))))
    elif kind is SegmentCache:
        model = make_xl(device, 7)
        cache, full = kind(model, 2), segment_logits(model, ids)
    else:
        model = make_model(device, np.float64)
        cache = kind(model, 2)
    end = 0
    for length in pieces:
        for wrong in change(ids[:, end : end + length]), change(ids):
            with pytest.raises(error, match=f"^{message}"):
                cached_logits(cache, wrong)
        end += length
        found = cached_logits(cache, ids[:, end - length : end])
        expected = (
            full_logits(model, ids[:, end - cache.ids.shape[1] : end])[:, -1] if full is None else full[:, end - 1]
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_ids_may_be_on_the_host(device):
    model, ids = make_xl(device, 7), tokens(2, 8)
    here, there = cache_for(model, 2), cache_for(model, 2)
    found = [to_cpu(cache.logits(x)) for cache, x in ((here, ids), (there, to_device(ids, device)))]
    np.testing.assert_array_equal(*found)
    with pytest.raises(IndexError, match="ids: expected values from 0 to"):
        here.logits(ids + 1000)


@pytest.mark.parametrize("pieces", [[1, 1, 1], [2, 1], [3]], ids=str)
def test_a_full_decoder_cache_refuses_and_stays_as_it_was(device, pieces):
    """It does not slide, since a translation is one text. Its last logits are those of the full forward."""
    model = EncoderDecoder(31, 12, 3, 2, key=Key(0)).to(device, np.float64)
    source, lengths, ids = tokens(2, 4), np.array([4, 2]), tokens(2, 6)
    cache, end = DecoderCache(model, source, lengths, 3), 0
    expected = to_cpu(model(*(to_device(x, device) for x in (source, lengths, ids))))
    for length in pieces:
        with pytest.raises(ValueError, match=r"^ids: expected at most 3 target tokens, .*, got \d+$"):
            cached_logits(cache, ids[:, : 4 - end])
        end += length
        found = cached_logits(cache, ids[:, end - length : end])
        np.testing.assert_allclose(found, expected[:, end - 1], rtol=1e-9)
    for more in (1, 2):
        with pytest.raises(ValueError, match=f"^ids: expected at most 3 target tokens, .*, got {3 + more}$"):
            cached_logits(cache, ids[:, 3 : 3 + more])


@pytest.mark.parametrize("kept", [[2], [0, 2], [1, 0]], ids=str)
def test_a_cache_forgets_sources(device, kept):
    """The others have the logits that they have in the whole cache."""
    model = EncoderDecoder(31, 12, 3, 2, key=Key(0)).to(device, np.float64)
    caches = [DecoderCache(model, tokens(3, 4), np.array([3, 2, 4]), 5, copies=2) for _ in range(2)]
    first, second = tokens(6, 2), tokens(6, 1) + 1
    for cache in caches:
        cache.logits(first)
    caches[1].keep(np.array(kept))
    rows = [2 * source + copy for source in kept for copy in (0, 1)]
    np.testing.assert_allclose(caches[1].logits(second[rows]), caches[0].logits(second)[rows], rtol=1e-9)
    other = np.arange(len(rows)) ^ 1  # the two copies of each source
    for cache, moved in zip(caches, (np.arange(6) ^ 1, other), strict=True):
        cache.reorder(moved)
    np.testing.assert_allclose(caches[1].logits(second[rows]), caches[0].logits(second)[rows], rtol=1e-9)


def test_what_is_kept_is_laid_out_as_before():
    """Compiled code reads keys in the order in which they were allocated."""
    model = EncoderDecoder(31, 16, 2, 2, key=Key(0)).to(dtype=np.float32)
    cache = DecoderCache(model, tokens(3, 4), np.array([3, 2, 4]), 5, copies=100)
    order = [[x.strides[1:] for x in each] for each in (*cache.stored, *cache.memory)]
    with fast():
        cache.logits(tokens(300, 1))
        cache.keep(np.array([2], np.uint8))
        cache.logits(tokens(100, 1))
    assert [[x.strides[1:] for x in each] for each in (*cache.stored, *cache.memory)] == order
    assert len(cache.stored[0][0]) == 100 and cache.pattern.lengths.tolist() == [4] * 100


def test_a_cache_has_room_for_something(make_model):
    with pytest.raises(ValueError, match=r"^batch_size: expected .* >= 1, got 0$"):
        cache_for(make_model(), 0)
    model = EncoderDecoder(31, 12, 3, 1)
    for name in "length", "copies":
        with pytest.raises(ValueError, match=rf"^{name}: expected .* >= 1, got -1$"):
            DecoderCache(model, tokens(2, 3), np.array([3, 2]), **{"length": 5, name: -1})


WRITERS = {
    "LanguageModel": lambda: LanguageModel(31, 32, 2, 2, LONG),
    "SparseTransformer": lambda: SparseTransformer(31, 32, 2, 2, LONG, 8),
    "TransformerXL": lambda: TransformerXL(31, 32, 2, 2, 40, LONG),
    "EncoderDecoder": lambda: EncoderDecoder(31, 32, 2, 2),
    **{kind.__name__: lambda kind=kind: kind(31, 32, 2, 2, LONG) for kind in FAMILIES.values()},
}
PRECISIONS = {
    **{name: lambda model, name=name: model.to(dtype=np.dtype(name)) for name in ("float64", "float32", "float16")},
    "bfloat16": lambda model: model.to(dtype=bfloat16(CPU)),
    "int8": quantize,
    "int4": lambda model: quantize(model, 4),
}


def caches(model, count):
    """So many caches of a model that sees at most LONG tokens."""
    if isinstance(model, EncoderDecoder):
        return [DecoderCache(model, tokens(1, 4), np.array([4]), LONG) for _ in range(count)]
    return [cache_for(model, 1) for _ in range(count)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_cache_takes_memory_for_the_text_and_not_for_the_context(kind, precision):
    model = PRECISIONS[precision](WRITERS[kind]())
    (cache,) = caches(model, 1)
    bytes_of_a_token = sum(array[:, :, :1].nbytes for arrays in cache.stored for array in arrays)
    for n in 1, 20, 40, 70:
        cache.logits(tokens(1, n - cache.length))
        assert sum(array.nbytes for arrays in cache.stored for array in arrays) <= 2 * (n + 16) * bytes_of_a_token


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("precision", ["float64", "float32", "int8", "bfloat16"])
@pytest.mark.parametrize("kind", WRITERS)
def test_growing_changes_no_bit(kind, precision, is_fast):
    """Compared with a cache that has room for all tokens from the beginning; windows end in the middle of vectors."""
    model = PRECISIONS[precision](WRITERS[kind]())
    for block in getattr(getattr(model, "body", None), "blocks", []):
        if hasattr(block.attention, "window"):
            block.attention.window = 13
    growing, whole = caches(model, 2)
    grow(whole.stored, 0, whole.room, whole.allocate)
    ids = tokens(1, 70)
    with fast() if is_fast else nullcontext():
        for start, end in [(0, 3), *pairwise(range(3, 71))]:
            assert np.array_equal(*(cache.logits(ids[:, start:end]) for cache in (growing, whole))), end

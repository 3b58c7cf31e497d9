"""The key-value cache gives the very logits of the full forward."""

import numpy as np
import pytest

from scratchformer.backend import to_cpu, to_device
from scratchformer.generation import KeyValueCache
from scratchformer.rng import Key

CONTEXT = 12
BODIES = [
    {"norm": "pre"},
    {"norm": "post", "bias": True},
    {"norm": "post", "wide": True},
    {"norm": "pre", "positions": "sinusoidal"},
    {"norm": "pre", "positions": "none", "activation": "gelu"},
    {"norm": "post", "recompute": True, "dropout": 0.5},
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
def test_logits_are_those_of_the_full_forward_at_every_position(
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
def test_a_full_cache_slides_to_the_later_half_and_goes_on_exactly(device, make_model, body):
    """What is kept is at most the context and at least half of it, whatever the number of tokens seen."""
    model, ids = make_model(device, np.float64, **body), tokens(2, 4 * CONTEXT)
    cache = KeyValueCache(model, 2)
    for end in range(1, ids.shape[1] + 1):
        found = cached_logits(cache, ids[:, end - 1 : end])
        kept = cache.ids.shape[1]
        assert kept == end if end <= CONTEXT else CONTEXT // 2 <= kept <= CONTEXT
        np.testing.assert_array_equal(to_cpu(cache.ids), ids[:, end - kept : end])
        expected = full_logits(model, ids[:, end - kept : end])[:, -1]
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

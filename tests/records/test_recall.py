"""What a model with recall is told while it writes, compared with what it is told in training."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import Corpus
from scratchformer.generation import KeyValueCache, generate
from scratchformer.models import LanguageModel
from scratchformer.records import Recall, recall, recalling, searching, with_recalled
from scratchformer.records.recall import RecallCache, RecalledTexts
from scratchformer.rng import Key

CONTEXT = 12  # of the models of `make_model`
ORDERS = [1, 3, 1, 2]


@pytest.fixture(scope="session")
def make_model():
    """make_model(device=CPU, dtype=float32, **options): two blocks of width 12."""

    def make(device=CPU, dtype=np.float32, **options):
        model = LanguageModel(31, 12, 3, 2, CONTEXT, key=Key(0), **options)
        model.output.w.data *= 4  # so that the most likely tokens stand out
        return model.to(device, dtype)

    return make


@given(
    st.integers(0, 30), st.integers(1, 20), st.sampled_from([1, 2, 4, 70_000]), st.integers(0, 1000),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)  # fmt: skip
def test_rows_are_those_of_training(past, new, V, seed, orders):
    """With 70,000, also the numbers that no character has in UTF-8."""
    draw = Key(seed).generator()
    before, ids = draw.integers(0, V, past) + 55_000 * (V > 4), draw.integers(0, V, (2, new)) + 55_000 * (V > 4)
    texts = RecalledTexts(orders, [before, before])
    found = np.concatenate([texts.append(ids[:, :1]), texts.append(ids[:, 1:])], axis=1)
    for row, expected in zip(found, ids, strict=True):
        np.testing.assert_array_equal(row, recalling(np.concatenate([before, expected]), orders)[past:])


def test_the_cache_gives_the_logits_of_the_full_forward(device, make_model):
    """Token after token, also after it has slid; each row has a text of its own before it."""
    model = make_model(device, np.float64, norm="pre", embeddings=[{"layer": Recall, "orders": ORDERS}])
    draw = Key(0).generator()
    ids, before = draw.integers(0, 4, (2, 3 * CONTEXT)), [draw.integers(0, 4, n) for n in (40, 7)]
    rows = np.stack([recalling(np.concatenate(text), ORDERS)[-3 * CONTEXT :] for text in zip(before, ids, strict=True)])
    cache, plain, end = RecallCache(model, before), KeyValueCache(model, 2), 0
    differs = False
    for length in (5, *[1] * (3 * CONTEXT - 5)):
        end += length
        new = to_device(ids[:, end - length : end], model.device)
        found, alone = to_cpu(cache.logits(new)), to_cpu(plain.logits(new))
        seen = rows[:, end - cache.length : end]
        expected = to_cpu(model(to_device(seen, model.device)))[:, -1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
        differs |= np.abs(found - alone).max() > 1e-3
    assert differs and cache.length < CONTEXT + 1


def test_generate_searches_the_text_before_and_the_prompt(make_model):
    """A prompt may be longer than the context."""
    model = make_model(dtype=np.float64, norm="pre", embeddings=[{"layer": Recall, "orders": ORDERS}])
    draw = Key(1).generator()
    before, prompt = draw.integers(0, 31, 200), draw.integers(0, 31, (1, 30))
    whole = np.concatenate([before, prompt[0]])
    for count, ids in enumerate(generate(model, prompt, 5, 0.0, open_cache=searching(before))):
        rows = recalling(whole, ORDERS)[None, -min(CONTEXT, 12) :]
        if not count:
            assert ids[0] == model(rows)[0, -1].argmax()
        whole = np.append(whole, ids[0])
    a, b = (
        np.concatenate(list(generate(model, prompt, 20, 0.0, open_cache=searching(text))))
        for text in (before, before[:1])
    )
    assert (a != b).any()


def test_what_does_not_fit_is_refused(make_model):
    model, plain = make_model(embeddings=[{"layer": Recall, "orders": ORDERS}]), make_model()
    prompt = np.zeros((1, 3), int)
    for other, before, message in (
        (plain, np.zeros(3, int), "before: the model reads no further columns of ids"),
        (model, np.zeros((3, 1), int), r"before: expected \(n\), got \(3, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            next(generate(other, prompt, 1, open_cache=searching(before)))
    with pytest.raises(TypeError, match="before: expected integers"):
        next(generate(model, prompt, 1, open_cache=searching(np.zeros(3))))
    for beyond in -1, 31:
        with pytest.raises(IndexError, match=f"before: expected values from 0 to 30, got {beyond}"):
            next(generate(model, prompt, 1, open_cache=searching(np.array([0, beyond, 3]))))


def test_a_text_with_what_each_token_recalls():
    """The rows have the smallest type that holds them."""
    text = Key(0).generator().integers(0, 4, 60).astype(np.uint8)
    rows = recalling(text, (1, 3, 1))
    assert rows.dtype == np.uint16
    assert recalling(text.astype(np.int64) * 20_000, (1,)).max() == 60_001
    assert recalling(text.astype(np.int64) * 30_000, (1,)).max() == 90_001
    np.testing.assert_array_equal(rows, np.concatenate([text[:, None], recall(text[None], (1, 3, 1))[0]], axis=1))
    for bad in text.astype(int) - 1, text.astype(np.int64) + 2**31:
        with pytest.raises(ValueError, match="text: expected values from 0 to 2147483646"):
            recalling(bad, (1,))


def test_each_part_of_a_corpus_recalls_the_parts_before_it():
    text = Key(0).generator().integers(0, 4, 60).astype(np.uint8)
    corpus = with_recalled(Corpus("text", text[:40], text[40:50], text[50:]), (2, 4))
    np.testing.assert_array_equal(np.concatenate(corpus[1:]), recalling(text, (2, 4)))
    assert [len(part) for part in corpus[1:]] == [40, 10, 10] and corpus.name == "text"

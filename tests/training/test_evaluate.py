"""Evaluation, compared with loops over single predictions."""

import math

import numpy as np
import pytest

from scratchformer import models
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import Labelled, Pairs, Subwords, encode_pairs
from scratchformer.dispatch import reference_only
from scratchformer.models import EncoderDecoder
from scratchformer.testing.strict import STRICT
from scratchformer.training import (
    Replicas,
    evaluate_classifier,
    evaluate_language_model,
    evaluate_translation,
)
from scratchformer.training.estimate import _watch
from scratchformer.training.evaluate import MAX_ROWS, at_once


def log_softmax(z):
    z = z - z.max()
    return z - math.log(np.exp(z).sum())


def bits_one_position_at_a_time(model, text, stride):
    """Each position i is predicted from the first window that reaches it: the model sees text[start:i]. Windows start
    every `stride` tokens, and the last one ends with the text.
    """
    context = min(model.context, len(text) - 1)
    starts = [*range(0, len(text) - 1 - context, stride), len(text) - 1 - context]
    nats = []
    for i in range(1, len(text)):
        start = next(s for s in starts if s < i <= s + context)
        logits = to_cpu(model(to_device(text[None, start:i].astype(np.int32), model.device)))[0, -1]
        nats.append(-log_softmax(logits)[text[i]])
    return math.fsum(nats) / len(nats) / math.log(2)


@pytest.mark.parametrize(
    ("length", "stride"), [(2, None), (5, 3), (8, 4), (9, 4), (10, 4), (24, 8), (25, 1), (40, None), (41, 7)]
)
def test_every_position_is_predicted_once(device, make_model, text, length, stride):
    model = make_model("LanguageModel", device, np.float64)
    text = text[:length]
    expected = bits_one_position_at_a_time(model, text, stride or model.context // 2)
    for count, batch_size in (1, 1), (1, 4), (2, 3):
        if count == 1 or device is CPU:
            with Replicas(model, count) as replicas:
                found = evaluate_language_model(replicas, text, stride, batch_size)
            assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
            assert found["loss"] == pytest.approx(expected * math.log(2), rel=1e-12)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary(device, make_model, text):
    model = make_model("LanguageModel", device)
    model.output.w.data[...] = 0
    model.output.b.data[...] = 0
    with Replicas(model, 1) as replicas:
        assert evaluate_language_model(replicas, text)["bits_per_byte"] == pytest.approx(math.log2(29), rel=1e-6)


@pytest.mark.parametrize("keep", ["head", "both"])
def test_a_classifier_is_scored_as_if_texts_came_one_by_one(device, make_model, reviews, keep):
    model = make_model("Classifier", device, np.float64)
    losses, right = [], []
    for ids, label in zip(reviews.ids, reviews.labels, strict=True):
        excess = len(ids) - 10
        if excess > 0:
            ids = ids[:10] if keep == "head" else np.delete(ids, range(2, 2 + excess))
        log_probabilities = to_cpu(model(to_device(ids[None], device)))[0]
        losses.append(-log_probabilities[label])
        right.append(log_probabilities.argmax() == label)
    assert 0 < sum(right) < len(right)
    for count, batch_size in (1, 1), (1, 16), (1, 100), (3, 4):
        if count == 1 or device is CPU:
            with Replicas(model, count) as replicas:
                found = evaluate_classifier(replicas, reviews, 10, keep, batch_size)
            assert found["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
            assert found["accuracy"] == sum(right) / len(right)


def test_evaluation_neither_drops_out_nor_learns(device, make_model, text, reviews):
    for kind in "LanguageModel", "Classifier":
        plain, dropping = make_model(kind, device), make_model(kind, device, dropout=0.5)
        before = to_cpu(dropping.flat.data).copy(), to_cpu(dropping.flat.grad).copy()
        results = []
        for model in plain, dropping, dropping:
            with Replicas(model, 1) as replicas:
                if kind == "LanguageModel":
                    results.append(evaluate_language_model(replicas, text[:50]))
                else:
                    results.append(evaluate_classifier(replicas, reviews, 10))
        assert results[0] == results[1] == results[2]
        np.testing.assert_array_equal(to_cpu(dropping.flat.data), before[0])
        np.testing.assert_array_equal(to_cpu(dropping.flat.grad), before[1])


def test_an_empty_text_is_named(make_model, reviews):
    with Replicas(make_model("Classifier"), 1) as replicas, pytest.raises(ValueError, match="text number 1 is empty"):
        evaluate_classifier(replicas, Labelled([reviews.ids[0], reviews.ids[0][:0]], np.array([0, 1])), 10)


def test_a_label_that_is_not_a_class_is_refused(make_model, reviews):
    replicas = Replicas(make_model("Classifier"), 1)
    for label in -1, 3:
        dataset = Labelled(reviews.ids, np.append(reviews.labels[1:], label))
        with pytest.raises(IndexError, match=f"labels: expected values from 0 to 2, got {label}"):
            evaluate_classifier(replicas, dataset, 10)


def test_translations_are_scored_as_if_pairs_came_one_by_one(device):
    pytest.importorskip("tokenizers")
    words = "a red dog sees ein roter Hund sieht".split()
    subwords = Subwords.bpe([" ".join(words)] * 2, 60)
    draw = np.random.default_rng(0)
    sides = ([" ".join(draw.choice(words, draw.integers(1, 7))) for _ in range(9)] for _ in range(2))
    pairs = encode_pairs(subwords, Pairs(*sides), 64)
    model = EncoderDecoder(len(subwords), 8, 2, 1, dropout=0.5).to(device, np.float64)
    nats = []
    for source, target in zip(*pairs, strict=True):
        given = np.concatenate([[subwords["<bos>"]], target])
        arrays = (source[None], np.array([len(source)]), given[None])
        logits = to_cpu(model(*(to_device(x, device) for x in arrays)))[0]
        wanted = [*target, subwords["<eos>"]]
        nats += [-log_softmax(row)[token] for row, token in zip(logits, wanted, strict=True)]
    for count, tokens in (1, 60), (2, 30):
        if count == 1 or device is CPU:
            with Replicas(model, count) as replicas:
                found = evaluate_translation(replicas, pairs, tokens, subwords)
            assert found["loss"] == pytest.approx(math.fsum(nats) / len(nats), rel=1e-12)


def test_tokens_of_several_bytes(make_model, text):
    """The same nats, divided by the true number of predicted bytes."""
    sizes = np.arange(29) % 4 + 1
    with Replicas(make_model("LanguageModel"), 1) as replicas:
        plain, found = (evaluate_language_model(replicas, text, sizes=s) for s in (None, sizes))
    assert found["loss"] == plain["loss"]
    nats = plain["loss"] * (len(text) - 1)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(sizes[i] for i in text[1:]), rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([1] * 20, IndexError, "data: expected values from 0 to 19, got "),
        ([0] * 29, ValueError, "sizes: expected numbers of bytes, got 0 for every token"),
        ([0.5] * 29, TypeError, "sizes: expected integers"),
        ([[1] * 29], ValueError, r"sizes: expected \(V\)"),
    ],
)
def test_sizes_that_do_not_fit(make_model, text, sizes, error, message):
    with Replicas(make_model("LanguageModel"), 1) as replicas, pytest.raises(error, match=message):
        evaluate_language_model(replicas, text, sizes=sizes)


def test_labels_may_be_a_list(make_model, reviews):
    with Replicas(make_model("Classifier"), 1) as replicas:
        found = evaluate_classifier(replicas, Labelled(reviews.ids, reviews.labels.tolist()), 10)
        assert found == evaluate_classifier(replicas, reviews, 10)


@pytest.mark.parametrize("words", [256, 50_000])
@pytest.mark.parametrize("name", ["LanguageModel", "Llama", "Classifier"])
def test_a_gpu_evaluates_as_many_rows_as_fit_in_half_of_its_free_memory(name, words, monkeypatch):
    """What the caches of a forward keep is at most the room, and not a small part of it."""
    sizes, length = dict(d_model=64, heads=4, depth=3), 96
    limit = {"max_length": length, "num_classes": 2} if name == "Classifier" else {"context": length}
    model = getattr(models, name)(words, **sizes, **limit)
    ids = np.zeros((4, length), np.int32)
    batch = (ids, None, np.zeros(4, int)) if name == "Classifier" else (ids, ids)
    with reference_only():
        kept = _watch(model, batch)[0] / len(ids)
    replicas = Replicas(model.to(STRICT), 1)
    assert at_once(replicas, length) == 16  # the free memory is not known
    for room in 50 * kept, 500 * kept:
        monkeypatch.setattr("scratchformer.training.evaluate.free_memory", lambda _, room=room: 2 * room)
        rows = at_once(replicas, length)
        assert room / 3 < rows * kept < room
    monkeypatch.setattr("scratchformer.training.evaluate.free_memory", lambda _: 1e15)
    assert at_once(replicas, length) == MAX_ROWS

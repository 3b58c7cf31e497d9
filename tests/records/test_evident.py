"""Texts with evidence: their batches, and what a linear model says of the reviews of IMDb."""

from dataclasses import replace

import numpy as np
import pytest

from scratchformer.data import Labelled, LabelledBatch, LabelledBatches, in_order, load_imdb
from scratchformer.data.vocabulary import UNKNOWN
from scratchformer.records import EvidenceBatch, Evident, fit_evidence, with_evidence
from scratchformer.rng import Key

WORDS = "good bad film the a story actor plot dull great".split()


def make_texts(count, longest=40):
    """Texts in which every word is the text's index + 1, so that a batch shows where its rows come from."""
    draw = np.random.default_rng(0)
    ids = [np.full(length, 1 + i, np.int32) for i, length in enumerate(draw.integers(1, longest + 1, count))]
    return Labelled(ids, draw.integers(0, 2, count))


def equal(first, second):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def write_reviews(folder):
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for kind, rating in (("pos", 8), ("neg", 2)):
            (folder / "aclImdb" / split / kind).mkdir(parents=True)
            for number in range(12):
                text = f"{split} {kind} number{number} " + " ".join(draw.choice(WORDS, draw.integers(3, 30)))
                (folder / "aclImdb" / split / kind / f"{number}_{rating}.txt").write_text(text)
    return folder


def with_numbers(dataset):
    """Two numbers for each word: its place in its text, from 1, and that times the text's index + 1."""
    places = [np.arange(1, len(ids) + 1, dtype=np.float32) for ids in dataset.ids]
    evidence = [np.stack([t, t * ids[0]], axis=1) for t, ids in zip(places, dataset.ids, strict=True)]
    return Evident(dataset.ids, dataset.labels, evidence)


def check_evidence(batch, first=1):
    """What `with_numbers` gives, from place `first` of each text, and 0 in the padding."""
    assert batch.evidence.dtype == np.float32 and batch.evidence.shape == (*batch.ids.shape, 2)
    places = np.arange(batch.ids.shape[1]) + np.reshape(first, (-1, 1))
    inside = np.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    np.testing.assert_array_equal(batch.evidence[:, :, 0], inside * places)
    np.testing.assert_array_equal(batch.evidence[:, :, 1], inside * places * batch.ids)


@pytest.mark.parametrize("keep", ["head", "tail"])
def test_evidence_stays_with_its_words(keep):
    """When texts are drawn, put in order, cut and padded. The rest is as for texts without evidence."""
    plain = make_texts(30, longest=12)
    dataset = with_numbers(plain)
    whole = np.array([len(ids) for ids in dataset.ids])
    batches, expected = (LabelledBatches(d, 7, 8, Key(2), keep) for d in (dataset, plain))
    found = [*map(batches.batch, range(5)), *in_order(dataset, 7, 8, keep)]
    for batch, bare in zip(found, [*map(expected.batch, range(5)), *in_order(plain, 7, 8, keep)], strict=True):
        assert isinstance(batch, EvidenceBatch) and isinstance(bare, LabelledBatch)
        assert equal((batch.ids, batch.lengths, batch.labels), bare)
        assert (batch.weight, batch.tokens) == (bare.weight, bare.tokens)
        assert equal(batch.inputs, (batch.ids, batch.evidence, batch.lengths))
        check_evidence(batch, 1 + whole[batch.ids[:, 0] - 1] - batch.lengths if keep == "tail" else 1)


def test_evidence_batch_split_and_stretched():
    (batch,) = in_order(with_numbers(make_texts(5, longest=9)), 5, 9)
    parts = batch.split(2)
    assert [len(part.ids) for part in parts] == [2, 2, 1]
    for part in parts:
        assert isinstance(part, EvidenceBatch)
        check_evidence(part)
    for i in range(2, 4):  # lengths and labels
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), batch[i])
    large = batch.stretched(8, 20)
    assert (large.ids.shape, large.evidence.shape) == ((8, 20), (8, 20, 2))
    assert large.lengths.tolist() == [20] * 8 and large.labels.shape == (8,)
    assert (large.ids.dtype, large.evidence.dtype) == (np.int32, np.float32)


def test_a_word_that_is_dropped_leaves_no_evidence():
    dataset = with_numbers(make_texts(20))
    plain = LabelledBatches(dataset, 20, 40, Key(1)).batch(0)
    dropped = LabelledBatches(dataset, 20, 40, Key(1), word_dropout=0.4).batch(0)
    unknown = dropped.evidence[:, :, 0] != plain.evidence[:, :, 0]
    assert 0.3 < unknown.sum() / plain.tokens < 0.5
    assert (dropped.ids[unknown] == UNKNOWN).all() and not dropped.evidence[unknown].any()
    np.testing.assert_array_equal(dropped.ids[~unknown], plain.ids[~unknown])
    np.testing.assert_array_equal(dropped.evidence[~unknown], plain.evidence[~unknown])


def test_evidence_that_does_not_fit_its_texts():
    dataset = with_numbers(make_texts(5))
    for evidence in dataset.evidence[1:], [dataset.evidence[0][1:], *dataset.evidence[1:]]:
        with pytest.raises(ValueError, match="dataset: expected evidence \\(T, I\\) for each text"):
            LabelledBatches(replace(dataset, evidence=evidence), 2, 9, Key(0))


def test_evidence_of_evenly_spaced_texts():
    dataset = replace(with_numbers(make_texts(10)), logits=np.arange(10.0))
    some = dataset.evenly(4)
    assert some.logits.tolist() == [0, 2, 5, 7]
    assert [ids[0] - 1 for ids in some.ids] == [0, 2, 5, 7]
    assert equal(some.evidence, [dataset.evidence[i] for i in (0, 2, 5, 7)])


def test_labels_that_are_probabilities():
    """Batches have a row of them for each text."""
    ids, soft = [np.arange(1, n) for n in (3, 6, 4)], np.array([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5]])
    (batch,) = in_order(Evident(ids, soft, [np.ones((len(x), 1), np.float32) for x in ids]), 3, 9)
    assert batch.labels.dtype == np.float32 and batch.weight == 3
    np.testing.assert_allclose(batch.labels, soft[[0, 2, 1]], rtol=1e-6)
    assert batch.stretched(5, 9).labels.shape == (5, 2)


def test_each_part_has_the_evidence_and_the_logits_of_a_linear_model(tmp_path):
    """Those in the training part come from models of other films, those in the others from one model of all."""
    folder = write_reviews(tmp_path)
    data = with_evidence(load_imdb(folder, validation=4), 2)
    linear = fit_evidence(data.train.ids, data.train.labels, 2)
    for part in (data.train, data.validation, data.test):
        assert [own.shape for own in part.evidence] == [(len(ids), 2) for ids in part.ids]
        assert part.logits.shape == part.labels.shape
    for part in (data.validation, data.test):
        np.testing.assert_array_equal(part.logits, linear.logits(part.ids))
        assert all(np.array_equal(own, linear.of(ids)) for own, ids in zip(part.evidence, part.ids, strict=True))
    assert (data.train.logits != linear.logits(data.train.ids)).all()

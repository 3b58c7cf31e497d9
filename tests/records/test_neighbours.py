"""Models that look up what followed in known translations."""

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.data import Pairs, Subwords, encode_pairs
from scratchformer.data.subwords import BEGIN, END
from scratchformer.data.translation import TokenPairs
from scratchformer.generation import beam_search
from scratchformer.models import EncoderDecoder
from scratchformer.records import BackwardEncoderDecoder, neighbours, translate_together, with_neighbours
from scratchformer.records.neighbours import NeighbourOutput, largest
from scratchformer.rng import Key

TEXTS = Pairs(["a cat sits", "a dog runs", "the cat runs"], ["eine Katze sitzt", "ein Hund rennt", "die Katze rennt"])
SUBWORDS = Subwords.bpe(TEXTS.source + TEXTS.target, 40)


def make(device, backwards=False, dtype=np.float64):
    kind = BackwardEncoderDecoder if backwards else EncoderDecoder
    return kind(len(SUBWORDS), 8, 2, 1, norm="pre", key=Key(3)).to(device, dtype)


def by_hand(logits, x, keys, values, K, weight, temperature):
    """p (V,) for one vector x (C,), as the docstring writes it."""
    p = np.exp(logits - logits.max())
    p *= (1 - weight) / p.sum()
    d = ((x - keys) ** 2).sum(axis=1)
    nearest = np.argsort(d, kind="stable")[:K]
    w = np.exp(-(d[nearest] - d[nearest[0]]) / temperature)
    for n, share in zip(nearest, w / w.sum(), strict=True):
        p[values[n]] += weight * share
    return p


@pytest.mark.parametrize("most", [{}, {"ROWS": 1, "SCORES": 1, "NUMBERS": 1}, {"SCORES": 1536, "NUMBERS": 10_240}])
@pytest.mark.parametrize("N", [5, 128, 700])
def test_predictions_are_mixed_with_those_of_the_nearest(device, monkeypatch, N, most):
    """Fewer keys than a block, a whole block, and several with a part of one; also one row and one block at a time."""
    for name, count in most.items():
        monkeypatch.setattr(neighbours, name, count)
    random = np.random.default_rng(N)
    output = nn.TiedOutput(nn.TokenEmbedding(6, 4, key=Key(1)), bias=True).to(device, np.float64)
    keys, values = random.standard_normal((N, 4)), random.integers(0, 6, N)
    x = random.standard_normal((2, 3, 4))
    layer = NeighbourOutput(output, keys, values, 5, 0.4, 0.7)
    found = to_cpu(ops.softmax(layer(to_device(x, device)))[0])
    logits = to_cpu(output(to_device(x, device)))
    for place in np.ndindex(2, 3):
        expected = by_hand(logits[place], x[place], keys, values, 5, 0.4, 0.7)
        np.testing.assert_allclose(found[place], expected, rtol=1e-9)


def test_a_known_vector_predicts_the_token_that_followed(device):
    output = nn.Linear(2, 3).to(device)
    keys, values = np.array([[0, 0], [100, 0], [0, 100]], np.float32), np.array([2, 0, 1])
    layer = NeighbourOutput(output, keys, values, 3, 0.9, 1.0)  # the others are so far away that their weight is 0
    p = to_cpu(ops.softmax(layer(to_device(keys, device)))[0])
    assert p.argmax(axis=1).tolist() == values.tolist() and p.dtype == np.float32
    assert (p.max(axis=1) > 0.899).all()


@pytest.mark.parametrize("count", [1, 3, 128, 130])
def test_the_largest_are_those_of_a_full_sort(device, count):
    scores = np.random.default_rng(count).standard_normal((4, 384))
    scores[:, 250:] = -np.inf
    places = to_cpu(largest(to_device(scores, device), count))
    assert np.array_equal(np.sort(np.take_along_axis(scores, places, 1)), np.sort(scores)[:, -count:])


@pytest.mark.parametrize("backwards", [False, True])
def test_a_model_with_neighbours_repeats_what_it_has_seen(device, backwards):
    """An untrained model writes the known translations, since the nearest vector is its own; the model is unchanged."""
    model, pairs = make(device, backwards), encode_pairs(SUBWORDS, TEXTS, 64)
    before = translate_together([model], SUBWORDS, TEXTS.source, beam=1)
    known = with_neighbours(model, pairs, SUBWORDS, neighbours=1, weight=0.99, temperature=1.0)
    assert translate_together([known], SUBWORDS, TEXTS.source, beam=1) == TEXTS.target != before
    assert translate_together([model], SUBWORDS, TEXTS.source, beam=1) == before
    assert known.parameters() == model.parameters()
    assert list(known.state_dict()) == list(model.state_dict())
    with pytest.raises(ValueError, match="model: expected one without neighbours"):
        with_neighbours(known, pairs, SUBWORDS, neighbours=1)
    tokens = sum(len(ids) + 1 for ids in pairs.target)
    assert np.isfinite(to_cpu(known.output.halves)).sum() == tokens


def test_every_vector_predicts_the_token_after_it(device):
    """Keys are the inputs of the output map, and values the targets, whatever the order of the pairs in batches."""
    model, pairs = make(device), encode_pairs(SUBWORDS, TEXTS, 64)
    known = with_neighbours(model, pairs, SUBWORDS, neighbours=1)
    blocks, values = to_cpu(known.output.keys), to_cpu(known.output.values)
    keys = blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1]) + to_cpu(known.output.mean)
    table, found = to_cpu(model.output.table.data), set()
    for source, target in zip(pairs.source, pairs.target, strict=True):
        ids = np.concatenate([[SUBWORDS[BEGIN]], target])[None]
        arrays = (to_device(a, device) for a in (source[None], np.array([len(source)]), ids))
        logits = to_cpu(model(*arrays))[0]
        for z, token in zip(logits, [*target, SUBWORDS[END]], strict=True):
            distance = np.abs(keys @ table.T - z).max(axis=1)
            n = int(distance.argmin())
            assert distance[n] < 1e-9 and values[n] == token
            found.add(n)
    assert len(found) == sum(len(ids) + 1 for ids in pairs.target)


def test_half_precision_and_float32_agree(device):
    model, pairs = make(device, dtype=np.float32), encode_pairs(SUBWORDS, TEXTS, 64)
    half = make(device, dtype=np.float32).to(dtype=np.float16)
    both = [with_neighbours(one, pairs, SUBWORDS, neighbours=3) for one in (model, half)]
    x = device.xp.ones((1, 8), dtype=np.float16)
    assert {str(both[1].output.keys.dtype), str(both[1].output(x).dtype)} == {"float32"}  # float16 has 3 digits
    source, lengths = np.array([pairs.source[0]]), np.array([len(pairs.source[0])])
    found = [beam_search(one, source, lengths, SUBWORDS[BEGIN], SUBWORDS[END], 2)[0] for one in both]
    assert found[0].ids.tolist() == found[1].ids.tolist()
    assert found[0].score == pytest.approx(found[1].score, rel=0.02)


def test_keys_far_from_zero_are_told_apart(device):
    """In float32, x·k − k·k/2 of coordinates near 10,000 is known to a multiple of 16 at best."""
    random, output = np.random.default_rng(2), nn.Linear(4, 9).to(device)
    keys, values = (10_000 + random.standard_normal((300, 4))).astype(np.float32), random.integers(0, 9, 300)
    layer = NeighbourOutput(output, keys, values, 1, 0.5, 0.01)
    _, tokens = layer.nearest(to_device(keys, device))
    assert to_cpu(tokens)[:, 0].tolist() == values.tolist()
    assert layer(to_device(keys[:0], device)).shape == (0, 9)


OUTPUT = nn.Linear(2, 3)
KEYS, VALUES = np.zeros((4, 2), np.float32), np.zeros(4, int)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((KEYS, VALUES, 5), ValueError, "neighbours: expected at most the number of keys, 4, got 5"),
        ((KEYS, VALUES, 0), ValueError, "neighbours: expected a number >= 1, got 0"),
        ((KEYS, VALUES, 1, 1.0), ValueError, "weight: expected a number between 0 and 1, got 1.0"),
        ((KEYS, VALUES, 1, 0), ValueError, "weight: expected a finite number > 0, got 0"),
        ((KEYS, VALUES, 1, 0.5, 0), ValueError, "temperature: expected a finite number > 0, got 0"),
        ((KEYS[0], VALUES), ValueError, r"keys: expected \(N, C\)"),
        ((KEYS, VALUES[:3]), ValueError, r"values: expected \(4\), got \(3,\)"),
        ((KEYS, VALUES - 1, 1), ValueError, "keys, values: expected finite numbers and tokens >= 0"),
        ((KEYS + np.nan, VALUES, 1), ValueError, "keys, values: expected finite numbers and tokens >= 0"),
        ((KEYS, KEYS[:, 0]), TypeError, "keys, values: expected floats and integers, got float32 and float32"),
        ((KEYS.astype(int), VALUES), TypeError, "keys, values: expected floats and integers, got int64 and int64"),
    ],
)
def test_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        NeighbourOutput(OUTPUT, *arguments)


def test_a_value_that_the_output_does_not_have(device):
    layer = NeighbourOutput(OUTPUT, KEYS, VALUES + 3, 2)
    with pytest.raises(IndexError, match="values: expected tokens below 3, got 3"):
        layer(np.zeros((1, 2), np.float32))


def test_a_vocabulary_of_another_size(device):
    other = Subwords.bpe(TEXTS.source, 30)
    with pytest.raises(ValueError, match="vocabulary: expected"):
        with_neighbours(make(device), encode_pairs(other, TEXTS, 64), other)


def test_no_pairs(device):
    with pytest.raises(ValueError, match="pairs: expected at least one, got none"):
        with_neighbours(make(device), TokenPairs([], []), SUBWORDS)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.data import (
    DataError,
    Pairs,
    Subwords,
    TranslationBatch,
    TranslationBatches,
    encode_pairs,
    pairs_in_order,
)
from scratchformer.data.subwords import BEGIN, END, PAD
from scratchformer.data.translation import cut_by_tokens, translation_batch
from scratchformer.ops import IGNORED
from scratchformer.rng import Key

WORDS = "a the red dog cat man sees eats apples ein der rote Hund Mann sieht isst".split()


@pytest.fixture(scope="module")
def subwords():
    return Subwords.bpe([" ".join(WORDS)] * 3, 90)


@pytest.fixture(scope="module")
def pairs(subwords):
    """83 pairs of 1 to 9 words, each beginning with its encoded number, so that all differ."""
    draw = Key(0).fold("pairs").generator()
    sides = [[" ".join(draw.choice(WORDS, draw.integers(1, 10))) for _ in range(83)] for _ in range(2)]
    return encode_pairs(subwords, Pairs(*sides), 64)


def rows(batch):
    """Each pair of a batch as (source, target) without padding."""
    for source, length, target, targets in zip(*batch, strict=True):
        n = int((targets != IGNORED).sum())
        yield tuple(source[:length].tolist()), tuple(target[1:n].tolist())


def everything(pairs):
    return sorted((tuple(s.tolist()), tuple(t.tolist())) for s, t in zip(*pairs, strict=True))


def test_inputs_and_targets_of_the_decoder(subwords):
    begin, end, pad = (subwords[token] for token in (BEGIN, END, PAD))
    encoded = encode_pairs(subwords, Pairs(["the dog", "a"], ["Hund", "ein Mann"]), 64)
    batch = translation_batch(encoded, [0, 1], subwords)
    the_dog, a, hund, ein_mann = (subwords.encode(t).tolist() for t in ("the dog", "a", "Hund", "ein Mann"))
    width = len(the_dog) + 1
    assert batch.source.tolist() == [[*the_dog, end], [*a, end] + [pad] * (width - len(a) - 1)]
    assert batch.lengths.tolist() == [width, len(a) + 1]
    width = max(len(hund), len(ein_mann)) + 1
    for row, ids in enumerate((hund, ein_mann)):
        rest = width - len(ids) - 1
        assert batch.target[row].tolist() == [begin, *ids] + [pad] * rest
        assert batch.targets[row].tolist() == [*ids, end] + [IGNORED] * rest
    assert batch.weight == len(hund) + len(ein_mann) + 2
    assert batch.tokens == batch.weight + len(the_dog) + len(a) + 2
    assert {x.dtype for x in (batch.source, batch.target, batch.targets)} == {np.dtype(np.int32)}


def test_an_epoch_has_every_pair_once_in_batches_of_similar_length(pairs, subwords):
    batches = TranslationBatches(pairs, 60, subwords, Key(1))
    epochs = [[batches.batch(e * len(batches) + i) for i in range(len(batches))] for e in range(2)]
    for epoch in epochs:
        assert sorted(pair for batch in epoch for pair in rows(batch)) == everything(pairs)
        for batch in epoch:
            assert len(batch.lengths) * max(batch.source.shape[1], batch.target.shape[1]) <= 60
    orders = [[list(rows(batch)) for batch in epoch] for epoch in epochs]
    assert orders[0] != orders[1]
    filled = sum(b.tokens for b in epochs[0]) / sum(b.source.size + b.target.size for b in epochs[0])
    assert filled > 0.8


def test_a_batch_is_a_function_of_key_and_step(pairs, subwords):
    first, again, other = (TranslationBatches(pairs, 60, subwords, Key(k)) for k in (1, 1, 2))
    again.batch(3 * len(again))  # requested out of order
    for step in (0, 5, len(first) + 1):
        for a, b in zip(first.batch(step), again.batch(step), strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(list(rows(first.batch(i))) != list(rows(other.batch(i))) for i in range(3))


def test_micro_batches_are_the_rows_in_order(pairs, subwords):
    batch = TranslationBatches(pairs, 120, subwords, Key(0)).batch(2)
    parts = batch.split(2)
    assert [pair for part in parts for pair in rows(part)] == list(rows(batch))
    assert sum(part.weight for part in parts) == batch.weight
    for part in parts:
        assert len(part.lengths) <= 2
        assert part.source.shape[1] == part.lengths.max()
        assert (part.targets[:, -1] != IGNORED).any()


def test_micro_batches_end_at_the_last_target_that_counts():
    targets = np.array([[1, IGNORED, 2, IGNORED], [IGNORED] * 4])
    parts = TranslationBatch(np.ones((2, 4), int), np.array([4, 2]), np.ones((2, 4), int), targets).split(1)
    assert [part.targets.tolist() for part in parts] == [[[1, IGNORED, 2]], [[IGNORED]]]
    assert [part.target.shape for part in parts] == [(1, 3), (1, 1)]
    assert [part.weight for part in parts] == [2, 0]


def test_in_order_every_pair_comes_once(pairs, subwords):
    batches = list(pairs_in_order(pairs, 60, subwords))
    assert sorted(pair for batch in batches for pair in rows(batch)) == everything(pairs)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_cuts_cover_everything_and_fit(lengths):
    cuts = cut_by_tokens(np.array(lengths), 40)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(len(lengths)))
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        part = lengths[cut]
        assert len(part) * max(part) <= 40
        if following is not None:  # one more would not fit
            assert (len(part) + 1) * max(*part, lengths[following.start]) > 40


def test_sentences_that_are_too_long(subwords, pairs):
    long = Pairs(["a", "the dog sees apples"], ["ein", "ein"])
    with pytest.raises(DataError, match=r"^validation: source sentence 2: expected at most 3 tokens with END, got \d+"):
        encode_pairs(subwords, long, 3, "validation")
    with pytest.raises(DataError, match=r"^pairs: expected sentences, got none"):
        encode_pairs(subwords, Pairs([], []), 3)
    for sides, found in ((["a", "a"], ["ein"]), "2 sources, but 1 targets"), ((["a"], []), "1 sources, but 0 targets"):
        with pytest.raises(DataError, match=f"^test: {found}$"):
            encode_pairs(subwords, Pairs(*sides), 3, "test")
    with pytest.raises(DataError, match=r"target sentence 2: expected at most 3 tokens with END, got \d+"):
        encode_pairs(subwords, Pairs(["a", "a"], long.source), 3)
    with pytest.raises(ValueError, match=r"tokens: expected pairs of at most 4 tokens, got one of \d+"):
        TranslationBatches(pairs, 4, subwords, Key(0))
    with pytest.raises(TypeError, match=r"^key: expected a Key"):
        TranslationBatches(pairs, 50, subwords, 0)

"""BPE-dropout, compared with the library's byte-pair encoding and with a loop over merges."""

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the extra subwords")

from scratchformer.data import Subwords, TranslationBatches, encode_pairs
from scratchformer.data.bpe_dropout import DroppedMerges, split_word
from scratchformer.data.multi30k import Pairs
from scratchformer.rng import Key

TEXTS = [
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "A man at a bench holding tools and a can.",
    "Two men are at the stove preparing food.",
    "",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
] * 3


@pytest.fixture(scope="module")
def subwords():
    return Subwords.bpe(TEXTS, 90)


def test_without_dropout_it_is_the_librarys_encoding(subwords):
    texts = [*TEXTS, "A wizard's ☃ Läden"]  # with characters that the vocabulary lacks
    for found, expected in zip(
        DroppedMerges(subwords, texts, 0.0, Key(0)).encode(Key(1)), subwords.encode_all(texts), strict=True
    ):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)


def test_the_pieces_make_the_same_text_and_vary(subwords):
    dropped = DroppedMerges(subwords, TEXTS, 0.3, Key(0))
    plain = [len(ids) for ids in subwords.encode_all(TEXTS)]
    ways = [dropped.encode(Key(seed)) for seed in range(20)]
    for texts in ways:
        assert [subwords.decode(ids) for ids in texts] == TEXTS
        assert sum(map(len, texts)) > sum(plain)
    assert len({texts[0].tobytes() for texts in ways}) > 15
    assert (
        len({texts[0].tobytes() for texts in ways[:5]} | {texts[5].tobytes() for texts in ways[:5]}) > 5
    )  # texts 0 and 5 are equal
    for a, b in zip(ways[3], dropped.encode(Key(3)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_how_often_a_merge_is_left_out():
    """ "abc" with the merges ab and (ab)c: whole unless one is left out, each with probability p in its round."""
    ranks, draw, p = {("a", "b"): 0, ("ab", "c"): 1}, np.random.default_rng(0), 0.25
    found = ["+".join(split_word("abc", ranks, p, draw)) for _ in range(20_000)]
    for way, expected in ("a+b+c", p), ("ab+c", (1 - p) * p), ("abc", (1 - p) ** 2):
        assert abs(found.count(way) / 20_000 - expected) < 0.015  # four standard deviations
    ranks = {("a", "b"): 1, ("b", "c"): 0}  # bc comes first, and ab only if it is left out
    found = ["+".join(split_word("abc", ranks, p, draw)) for _ in range(20_000)]
    for way, expected in ("a+bc", 1 - p), ("ab+c", p * (1 - p)), ("a+b+c", p * p):
        assert abs(found.count(way) / 20_000 - expected) < 0.015
    assert split_word("", ranks, p, draw) == [] and split_word("ba", ranks, 1.0 - 1e-9, draw) == ["b", "a"]


def test_every_epoch_of_training_splits_words_anew(subwords):
    pairs = Pairs(TEXTS[:3] * 5, TEXTS[:3][::-1] * 5)
    encoded = encode_pairs(subwords, pairs, 200)
    plain, other, again = (
        TranslationBatches(encoded, 200, subwords, Key(0), dropped)
        for dropped in (None, *(DroppedMerges(subwords, pairs.source + pairs.target, 0.3, Key(1)) for _ in range(2)))
    )
    assert len(plain) == len(other) > 1
    seen = []
    for step in range(3 * len(plain)):
        batch, same = other.batch(step), again.batch(step)
        for a, b in zip(batch, same, strict=True):
            np.testing.assert_array_equal(a, b)
        usual = plain.batch(step)
        for row, expected in zip(batch.source, usual.source, strict=True):
            assert subwords.decode(row) == subwords.decode(expected)
        for row, expected in zip(batch.target, usual.target, strict=True):
            assert subwords.decode(row) == subwords.decode(expected)
        assert (batch.source[np.arange(len(batch.lengths)), batch.lengths - 1] == subwords["<eos>"]).all()
        seen.append(batch.tokens)
        assert batch.tokens > usual.tokens
    first, second, third = np.split(np.array(seen), 3)
    assert len({first.sum(), second.sum(), third.sum()}) == 3
    a = other.batch(0)
    other.batch(len(plain))
    for one, two in zip(a, other.batch(0), strict=True):  # a batch is a function of its step
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("options", "message"), [({"p": -0.1}, "p: "), ({"p": 1.5}, "p: "), ({"variants": 0}, "variants")]
)
def test_bad_numbers_are_named(subwords, options, message):
    with pytest.raises(ValueError, match=message):
        DroppedMerges(subwords, TEXTS, **{"p": 0.1, "key": Key(0), **options})


def test_the_texts_must_be_those_of_the_pairs(subwords):
    pairs = encode_pairs(subwords, Pairs(TEXTS[:3], TEXTS[:3]), 200)
    with pytest.raises(ValueError, match="dropped: expected the texts of all 3 sources and their targets, got 3 texts"):
        TranslationBatches(pairs, 200, subwords, Key(0), DroppedMerges(subwords, TEXTS[:3], 0.1, Key(0)))


def test_another_kind_of_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"needs a vocabulary from Subwords\.bpe"):
        DroppedMerges(Subwords.wordpiece(TEXTS, 90), TEXTS, 0.1, Key(0))
